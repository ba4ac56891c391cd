"""Tables for papers and for other tools: the cells as text, and the formats that `sinkscope export` writes."""
