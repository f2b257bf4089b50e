"""Which optimizer step the training loop is in."""
