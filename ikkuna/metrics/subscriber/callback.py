"""A subscriber that calls a function of the user with each message."""

from collections.abc import Callable, Iterable
from typing import Any

from ikkuna.errors import ConfigTypeError
from ikkuna.metrics.subscriber.base import Subscriber

__all__ = ["CallbackSubscriber"]


class CallbackSubscriber(Subscriber):
    """Calls ``function(message)`` for each message of some kinds.

    For data of modules and the network, the function is called in the hook and ``message.data`` is the borrowed tensor.
    The tensor is detached and must not be changed; clone it if you need it after the call.
    For events and results of other subscribers, the function is called after the end of the step.

    Parameters
    ----------
    kinds : str or list of str
        The kinds to subscribe to.
    function : callable
        Called with a message; its return value is ignored.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `function` is not callable.

    Examples
    --------
    >>> CallbackSubscriber("layer_gradients", lambda message: print(message.module, message.data.norm()))
    CallbackSubscriber(layer_gradients)
    """

    derived = True
    needs_float64 = False

    def __init__(self, kinds: str | Iterable[str], function: Callable[[Any], object], **options: Any) -> None:
        if not callable(function):
            raise ConfigTypeError(f"CallbackSubscriber needs a function of a message, got {type(function).__name__}")
        super().__init__(kinds, **options)
        self.function = function

    def measure(self, message: Any) -> None:
        """Call the function with the borrowed tensor."""
        self.function(message)

    def compute(self, message: Any) -> None:
        """Call the function with an event or a result."""
        self.function(message)
