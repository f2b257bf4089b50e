"""The raw door: a function of yours, called with every message as it is seen."""

from collections.abc import Callable, Iterable
from typing import Any

from ikkuna.errors import ConfigTypeError
from ikkuna.export.subscriber.base import Subscriber

__all__ = ["CallbackSubscriber"]


class CallbackSubscriber(Subscriber):
    """Call ``function(message)`` for each message of some kinds.

    For module and network data the call comes in the hook and ``message.data`` is the borrowed tensor: it is valid during the call,
    detached, and must not be changed; clone what you keep.  Events and other subscribers' results arrive when the batch is over.

    Parameters
    ----------
    kinds : str or list of str
        What to call the function for.
    function : callable
        Takes a message; what it returns is ignored.

    Raises
    ------
    ConfigTypeError
        If `function` cannot be called.

    Examples
    --------
    >>> CallbackSubscriber("layer_gradients", lambda message: print(message.module, message.data.norm()))
    CallbackSubscriber(layer_gradients)
    """

    derived = True

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
