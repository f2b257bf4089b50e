"""Observes a model with one call, and shows what was measured at the prompt."""
