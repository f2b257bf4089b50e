"""What happens in a training step: hooks, steps, the observed model, rows of measurements."""
