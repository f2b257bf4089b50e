"""The hook of the gradient of an output, and the hooks of one output."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ikkuna.export.hooks.hook import Hook
from ikkuna.numerics.statistics.native.hook_functions import Function
from ikkuna.torch_internals import skip_in_compiler

__all__ = ["CACHED", "GradientHook", "OutputHooks"]

CACHED = 8
"""Number of forwards of a step whose hooks serve the next steps as well."""


class GradientHook(Hook):
    """The hook of the gradient of an output.

    Parameters
    ----------
    owner, function, bound
        See `Hook`.
    native : callable, optional
        A native function of the gradient that does what the hook would do, if it is permitted; it returns whether it was.
    """

    __slots__ = ("native",)

    def __init__(
        self,
        owner: Any = None,
        function: Callable[..., object] | None = None,
        *bound: Any,
        native: Function | None = None,
    ) -> None:
        super().__init__(owner, function, *bound)
        self.native = native

    def __call__(self, grad: Any) -> None:
        """Record the gradient."""
        if not torch.compiler.is_compiling() and (self.native is None or not self.native(grad)):
            Hook.__call__(self, grad)


skip_in_compiler(GradientHook.__call__)


class OutputHooks:
    """The hooks of the gradient of one output by the number of the forward; ``None`` for those that have not been needed.

    Attributes
    ----------
    hooks : list
        The hooks.
    dictionaries : list
        For each hook a dictionary of hooks of a tensor that contains it.
    """

    def __init__(self) -> None:
        self.hooks: list[GradientHook | None] = [None] * CACHED
        self.dictionaries: list[OrderedDict[int, GradientHook] | None] = [None] * CACHED
