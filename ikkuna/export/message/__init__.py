"""The content of a message: its kind, its stamp and its data."""
