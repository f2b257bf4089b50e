"""The public import name of the statistics of parameters and gradients as one dictionary."""

from ikkuna.inspect.monitor import *  # noqa: F403  # a public import name
from ikkuna.inspect.monitor import __all__ as __all__
