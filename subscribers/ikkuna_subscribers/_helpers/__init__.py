"""Code that several metrics share and that is not a metric itself."""
