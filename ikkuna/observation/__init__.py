"""The observation of training steps: hooks, steps, the observed model, rows of measurements."""
