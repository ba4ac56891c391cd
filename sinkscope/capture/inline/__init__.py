"""Finds and reads attention that a model computes in its own code, without transformers' attention interface."""
