"""Values become tables, a summary and sentences: what a scan measured, as a run holds it."""
