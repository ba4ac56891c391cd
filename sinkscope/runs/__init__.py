"""What one scan measured: per-sequence values, the tables and summary derived from them, and the run folder."""
