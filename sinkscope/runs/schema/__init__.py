"""Typed records of the files of a run folder, with a docstring under every field; `sinkscope schema` prints them."""
