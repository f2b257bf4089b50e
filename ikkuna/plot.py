"""The public import name of figures for the prompt."""

from ikkuna.inspect.plot import *  # noqa: F403  # a public import name
from ikkuna.inspect.plot import __all__ as __all__
