"""The logger of the library."""

import logging
import sys
from typing import Any

from ikkuna.signal_handlers import suppressed

__all__ = ["announce", "log"]


class _SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Passes records to a logger, and ignores the exceptions of its handlers and filters.

    A handler of the user must neither stop a thread of ikkuna nor raise into the training loop.

    Examples
    --------
    >>> failing = logging.Logger("failing")
    >>> failing.addFilter(lambda record: 1 / 0)
    >>> _SafeLogger(failing).warning("not shown")
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a record; its source is the caller of :meth:`warning`, :meth:`error` and so on."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        with suppressed(Exception):
            super().log(level, msg, *args, **kwargs)


log = _SafeLogger(logging.getLogger("ikkuna"))
"""Logs to the logger ``"ikkuna"`` of the standard library, which the user may configure."""


def announce(text: str) -> None:
    """Log a line of level INFO; without any configuration of logging, write it to the standard error stream.

    The level WARNING of the logger ``"ikkuna"`` or of a handler silences it.
    """
    logger = log.logger
    if logger.hasHandlers() or logger.level != logging.NOTSET or logging.root.level != logging.WARNING:
        log.info(text)
    elif sys.stderr is not None:
        with suppressed(Exception):
            sys.stderr.write(f"{text}\n")
