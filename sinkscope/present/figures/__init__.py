"""Figures for papers, drawn with matplotlib (`pip install 'sinkscope[figures]'`)."""
