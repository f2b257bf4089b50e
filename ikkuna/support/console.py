"""Lines that ikkuna writes for a person: with a prefix, and in colour where a terminal shows it."""

import logging
import os
import shutil
import sys
import textwrap
from typing import TextIO

from ikkuna.printable import printable
from ikkuna.support.failures import log, suppressed

CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
"""Escape codes of styles."""


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person sees a stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


def has_colour(stream: TextIO | None) -> bool:
    """Return whether a stream shows colours: not in a file or a pipe, and not with ``NO_COLOR`` or ``TERM=dumb``."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def styled(stream: TextIO | None, text: str, *styles: str) -> str:
    """Return `text` with styles such as ``"bold"`` and ``"red"`` if the stream shows them, otherwise `text` itself."""
    if not styles or not text or not has_colour(stream):
        return text
    return f"\x1b[{';'.join(CODES[style] for style in styles)}m{text}\x1b[0m"


def is_logging_configured() -> bool:
    """Return whether the user has configured the logger ``"ikkuna"`` or the root logger."""
    logger = log.logger
    return logger.hasHandlers() or logger.level != logging.NOTSET or logging.root.level != logging.WARNING


def announce(
    text: str, level: int = logging.INFO, verbosity: int = 1, mark: str = "", styles: tuple[str, ...] = ()
) -> None:
    """Log a line; without configuration of logging, write it to the standard error stream, wrapped in a terminal.

    The level WARNING of the logger ``"ikkuna"`` or of a handler silences a line of level INFO.

    Parameters
    ----------
    text : str
        The line; without its prefix ``ikkuna:`` this is added.
    level : int
        The level of the record.
    verbosity : int
        0 to write nothing to the standard error stream.
    mark : str
        The beginning of the line that has `styles` in a terminal.
    styles : tuple of str
        Such as ``("bold", "red")``.
    """
    if is_logging_configured():
        log.log(level, "%s%s", mark, text)
    elif verbosity and sys.stderr is not None:
        with suppressed(BaseException):
            prefix = "" if text.startswith("ikkuna: ") else "ikkuna: "
            head, line = prefix + printable(mark), prefix + printable(mark) + printable(text)
            if is_terminal(sys.stderr):
                width = max(shutil.get_terminal_size().columns - 1, 40)
                line = textwrap.fill(
                    line, width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
                )
            if line.startswith(head):
                line = f"{prefix}{styled(sys.stderr, printable(mark), *styles)}{line[len(head) :]}"
            sys.stderr.write(f"{line}\n")
