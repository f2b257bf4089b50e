"""What went wrong after set-up: caught, counted and said once, so that none of it reaches training."""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber.subscription import Subscription

__all__ = ["ON_ERROR", "Faults", "Here"]

ON_ERROR = ("disable", "log", "raise")
PATIENCE = 10

log = logging.getLogger("ikkuna")


class Here(threading.local):
    """What goes on on this thread.

    Attributes
    ----------
    calling : whether a subscriber's code runs
    """

    calling = False


class Faults:
    """Guards every call of a subscriber and of our own hooks.

    While a subscriber's code runs nobody looks: a model that it calls would be seen by itself, for ever.

    Parameters
    ----------
    on_error : str
        ``"disable"``: a subscriber that fails 10 times in a row is not called again; ``"log"``: it is called for ever;
        ``"raise"``: errors pass, for tests and authors of plugins.

    Attributes
    ----------
    here : what goes on on the thread that asks
    """

    def __init__(self, on_error: str = "disable") -> None:
        self.errors = 0
        self.disabled: list[str] = []
        self.here = Here()
        self.set_policy(on_error)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look for the time of a ``with`` block although a subscriber's code runs: it asked for an evaluation."""
        was, self.here.calling = self.here.calling, False
        try:
            yield
        finally:
            self.here.calling = was

    def set_policy(self, on_error: str) -> None:
        """Choose what happens on an error; raise `ConfigError` for an unknown policy."""
        if on_error not in ON_ERROR:
            raise ConfigError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        self.on_error = on_error

    def call(self, subscription: Subscription, stage: str, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a subscriber's function; on an error return ``None`` after telling whose it was."""
        here = self.here
        was, here.calling = here.calling, True
        began = time.perf_counter()
        try:
            result = function(argument)
        except Exception as error:
            self._blame(subscription, stage, error)
            return None
        finally:
            here.calling = was
            subscription.seconds += time.perf_counter() - began
        if subscription.failures:
            subscription.failures.pop(stage, None)
        return result

    def blame(self, subscription: Subscription, reason: str) -> None:
        """Disable a subscriber at once for what it did to training."""
        self.errors += 1
        self._disable(subscription, reason)

    def own(self, what: str, error: BaseException) -> None:
        """Count and tell an error of our own."""
        if self.on_error == "raise":
            raise error
        self.errors += 1
        if self._is_telling(self.errors):
            _tell("ikkuna failed in %s (training is not affected)", what, exc_info=error)

    def _blame(self, subscription: Subscription, stage: str, error: Exception) -> None:
        if self.on_error == "raise":
            raise error
        self.errors += 1
        failures = subscription.failures[stage] = subscription.failures.get(stage, 0) + 1
        name = type(subscription.subscriber).__name__  # never the user's own repr, which may be what fails
        if self._is_telling(failures):
            _tell("subscriber %s (%s) failed in %s", name, ", ".join(subscription.kinds), stage, exc_info=error)
        if isinstance(error, torch.OutOfMemoryError) or (self.on_error == "disable" and failures >= PATIENCE):
            last = traceback.format_exception_only(error)[-1]  # where str(error) may fail as well
            self._disable(subscription, f"{failures} consecutive failures; last: {last.strip()}")

    def _disable(self, subscription: Subscription, reason: str) -> None:
        if subscription.disabled:
            return
        subscription.disabled = True
        name = type(subscription.subscriber).__name__
        self.disabled.append(name)
        _tell("subscriber %s (%s) disabled after %s", name, ", ".join(subscription.kinds), reason)

    @staticmethod
    def _is_telling(count: int) -> bool:
        """Tell the 1st, 10th, 100th … time."""
        return str(count).strip("0") == "1"


def _tell(message: str, *arguments: Any, exc_info: BaseException | None = None) -> None:
    with suppress(Exception):  # of a handler that is not ours
        log.error(message, *arguments, exc_info=exc_info)
