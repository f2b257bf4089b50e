"""The public import name of probes: outputs, gradients, weights and gates of a model."""

from ikkuna.inspect.probe import *  # noqa: F403  # a public import name
from ikkuna.inspect.probe import __all__ as __all__
