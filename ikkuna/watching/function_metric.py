"""A metric that a function of one tensor computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages.kinds import EVENT_KINDS, LOGGED
from ikkuna.export.subscriber.base import Subscriber

__all__ = ["FunctionMetric"]


class FunctionMetric(Subscriber):
    """Calls ``function(tensor)`` for each tensor of a kind, and shows the number that it returns.

    Over several calls, micro-batches and ranks the value is the mean of the numbers.
    The function is called in the hook, without gradients and autocast.
    It must not change the tensor; a result that stays on the device of the tensor does not make training wait for the device.

    Parameters
    ----------
    kind : str
        A kind with tensors, such as ``"activations"``.
    function : callable
        Takes a tensor, and returns a tensor of one element, a number, or ``None`` for no value.
    name : str
        The metric publishes ``{kind}_{name}``.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError, ConfigTypeError
        If an argument is invalid.

    Examples
    --------
    >>> FunctionMetric("activations", torch.amax, "peak").publishes
    ('activations_peak',)
    """

    is_of_function = True

    def __init__(self, kind: str, function: Callable[[Tensor], Any], name: str, **options: Any) -> None:
        if not callable(function):
            raise ConfigTypeError(f"metric() needs a function of a tensor, got {type(function).__name__}")
        if kind in (*EVENT_KINDS, LOGGED):
            raise ConfigError(f"metric() needs a kind with tensors, such as 'activations', got {kind!r}")
        super().__init__(kind, publishes=f"{kind}_{name}", **options)
        self.function = function

    def measure(self, message: Any) -> Tensor | None:
        """Return the number and a one that counts it."""
        found = self.function(message.data)
        if found is None:
            return None
        value = torch.as_tensor(found, dtype=torch.float64, device=message.data.device)
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ConfigError(f"the function of {self.publishes[0]!r} must return one number, got the shape {shape}")
        value = value.detach().reshape(())
        return torch.stack([value, torch.ones_like(value)])

    def compute(self, message: Any) -> None:
        """Emit the mean."""
        total, count = message.data
        self.emit(message, total / count)
