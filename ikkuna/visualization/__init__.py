"""Where values go: backends, the run that owns them, and the files they write."""

from ikkuna.visualization.backend import Backend, Series, get_backend

__all__ = ["Backend", "Series", "get_backend"]
