"""Measures a model where somebody else runs it: passes are heard, joined into sequences, and become a run."""
