"""The linear maps around an attention call, found by numbers: input norm, W_Q, W_K, W_V, W_O."""
