"""Compares runs and domains: differences with their errors, baselines, the release gate."""
