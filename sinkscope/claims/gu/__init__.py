"""Claims of Gu et al. 2410.10781: when attention sinks emerge in language models."""
