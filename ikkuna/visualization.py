"""The public import name of backends: `Backend`, `Series`, `get_backend`."""

from ikkuna.backends import *  # noqa: F403  # a public import name
from ikkuna.backends import __all__ as __all__
