"""Follows sinks over training: a callback that measures while a model trains, and a series of saved checkpoints."""
