"""The linear maps around an attention call (input norm, W_Q, W_K, W_V, W_O), found by the values they produce."""
