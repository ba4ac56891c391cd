"""The built-in export formats: one file a format. Its name is the format's, and it declares `FORMAT`."""
