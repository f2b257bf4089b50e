"""Where values go: backends, the run that owns them, and the files they write."""

from ikkuna.visualization.backend import Backend, get_backend
from ikkuna.visualization.series import Series

__all__ = ["Backend", "Series", "get_backend"]
