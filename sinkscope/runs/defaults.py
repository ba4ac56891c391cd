"""The defaults of a scan; the command line, the Python function and the request all read them here."""

from __future__ import annotations

DATA = "prose"
SEQ_LEN, NUM_SEQUENCES = 256, 32
"""Tokens per sequence, and sequences per SPEC, for text."""

EPSILON = 0.3
"""A head has a sink where alpha_0 exceeds this (Gu et al. 2410.10781)."""

DORMANT_RULE = "honor<0.4"
