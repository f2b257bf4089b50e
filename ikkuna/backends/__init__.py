"""Where values go: backends, and the run that owns them."""

from ikkuna.backends.backend import Backend, get_backend
from ikkuna.store.names import Series

__all__ = ["Backend", "Series", "get_backend"]
