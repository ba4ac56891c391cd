"""What the files of a run folder hold: typed, documented field by field, printed by `sinkscope schema`."""
