"""Claims of papers, put to any model: one file a claim, in a folder for each paper. `claim` finds them."""
