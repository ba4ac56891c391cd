"""The result of a scan: per-sequence values, the tables and summary derived from them, and the run folder."""
