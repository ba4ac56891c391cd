"""Runs held against each other: differences with errors, domains, baselines, the release gate."""
