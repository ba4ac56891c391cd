"""Figures for papers, drawn with matplotlib (`pip install 'sinkscope[figures]'`)."""

SINGLE = ("heatmap", "profile", "length", "scatter")
"""The figures of one run that need its tables alone."""
