"""Which keys each query may see: reads every form of mask, and makes large masks in strips."""
