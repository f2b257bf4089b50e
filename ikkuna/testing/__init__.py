"""The test kit for plugins; ikkuna's own tests use it, too.

No other part of ikkuna imports this package.
"""

from ikkuna.testing.backends import check_backend
from ikkuna.testing.recording import RecordingBackend
from ikkuna.testing.subscribers import check_subscriber, special_tensors
from ikkuna.testing.training import Value, run, small_model, train

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
