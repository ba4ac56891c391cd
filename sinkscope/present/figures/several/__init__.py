"""Figures over several runs: one file each, gathered in `drawing`."""
