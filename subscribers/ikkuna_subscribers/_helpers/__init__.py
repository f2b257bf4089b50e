"""What several metrics share and is no metric itself."""
