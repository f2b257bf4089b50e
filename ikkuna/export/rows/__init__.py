"""What to measure in a step, and the measurements."""
