"""Measures what a scan costs on this machine, compared with plain forward passes and eager attention maps."""
