"""Zero the heads that a score calls dormant and see what the model loses, beside random heads."""
