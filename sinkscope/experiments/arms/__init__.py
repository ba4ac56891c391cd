"""Measures what a model loses under interventions: heads zeroed, keys hidden, caches rounded. A kind of arm is a file
of `kinds/`; the engine, the table and the figure are shared."""
