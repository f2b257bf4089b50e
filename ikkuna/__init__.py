"""A window into a PyTorch training run."""

__version__ = "0.1.0"
