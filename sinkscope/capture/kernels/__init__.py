"""One attention call -> its output and its row and column sums: a walk over blocks in torch, or Triton kernels."""
