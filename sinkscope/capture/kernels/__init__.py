"""Computes the output and the row and column sums of an attention call, in torch block by block or in Triton."""
