"""The public import name of snapshots: `NetDict`, `get_weight`, `get_grad`."""

from ikkuna.inspect.netdict import *  # noqa: F403  # a public import name
from ikkuna.inspect.netdict import __all__ as __all__
