"""Zeroes the heads that a score calls dormant and compares the loss with that of zeroing random heads."""
