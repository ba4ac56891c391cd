"""Attention that a model computes in its own forward, read where its softmax meets the values."""
