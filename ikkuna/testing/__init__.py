"""The test kit for plugins; ikkuna's own tests use it, too.

No other part of ikkuna imports this package.
"""

from ikkuna.testing.backends import RecordingBackend, check_backend
from ikkuna.testing.subscribers import Value, check_subscriber, run, small_model, special_tensors, train

__all__ = [
    "RecordingBackend",
    "Value",
    "check_backend",
    "check_subscriber",
    "run",
    "small_model",
    "special_tensors",
    "train",
]
