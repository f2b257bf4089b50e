"""The checks before the first step, and the passes that they read."""
