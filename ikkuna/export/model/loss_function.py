"""Makes a function that computes a loss observable: functions have no hooks."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ikkuna.errors import ConfigTypeError
from ikkuna.signal_handlers import raise_users_exception

__all__ = ["LossFunction", "observable_loss"]


class LossFunction(nn.Module):
    """A module that calls a function of outputs and labels.

    Parameters
    ----------
    function : callable
        Its defaults of ``reduction`` and ``ignore_index`` say how its losses of several micro-batches make one loss.

    Examples
    --------
    >>> from functools import partial
    >>> from torch.nn import functional as F
    >>> loss = LossFunction(partial(F.cross_entropy, ignore_index=0))
    >>> loss.reduction, loss.ignore_index
    ('mean', 0)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:  # some functions written in C have no signature
            raise_users_exception(error)
            parameters = {}  # type: ignore[assignment]
        for name in ("reduction", "ignore_index"):
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            setattr(self, name, None if default is inspect.Parameter.empty else default)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def observable_loss(loss: Any) -> nn.Module:
    """Return a module, or a module that calls a function; raise `ConfigTypeError` if `loss` is neither."""
    if isinstance(loss, nn.Module):
        return loss
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__name__}; pass an instance" if isinstance(loss, type) else type(loss).__name__
        raise ConfigTypeError(
            f"set_loss() needs a module such as nn.CrossEntropyLoss() or a function of (output, labels), got {what}"
        )
    return LossFunction(loss)
