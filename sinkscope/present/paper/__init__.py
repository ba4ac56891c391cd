"""Tables for papers: LaTeX, Markdown, BibTeX."""
