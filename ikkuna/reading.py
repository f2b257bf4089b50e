"""The public import name of stored runs: `read_run`, `StoredRun`."""

from ikkuna.store import *  # noqa: F403  # a public import name
from ikkuna.store import __all__ as __all__
