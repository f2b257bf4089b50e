"""The public import name of running moments."""

from ikkuna.inspect.running import *  # noqa: F403  # a public import name
from ikkuna.inspect.running import __all__ as __all__
