"""Which keys a query may see: one reading of every mask, and masks made in strips."""
