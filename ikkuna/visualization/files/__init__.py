"""Files that values are written to."""
