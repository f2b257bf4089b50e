"""Parts of texts that are shown, logged, or written as JSON."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

__all__ = ["counted", "finite", "listed", "printable", "text_table"]

_CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_MULTILINE = re.compile(f"(?![\n\t]){_CONTROLS.pattern}")


def printable(text: str, *, multiline: bool = False) -> str:
    r"""Return a text with escape sequences of Python in place of characters that could control a terminal.

    These are the control characters of ASCII and of C1, the marks of bidirectional text, separators of lines and paragraphs, and
    lone surrogates.  All that ikkuna writes to a terminal, a notebook or a log passes through this function.

    Parameters
    ----------
    text : str
        A name, a message, or a whole output.
    multiline : bool
        Whether line feeds and tabs are kept.

    Examples
    --------
    >>> print(printable("fc\x1b[2J\n1"))
    fc\x1b[2J\n1
    """
    pattern = _MULTILINE if multiline else _CONTROLS
    return pattern.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def listed(names: Collection[str], most: int = 4) -> str:
    """Return the first names, and how many more there are.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    first = ", ".join([*names][:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; cells are aligned to the left, and the last column is not padded.

    Examples
    --------
    >>> text_table(("step", "loss"), [("0", "2.3")])
    ['step  loss', '----  ----', '0     2.3']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    ruled = (header, ["-" * width for width in widths], *rows)
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in ruled]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 parameters``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def finite(value: Any) -> Any:
    """Return a value with NaN and infinities as texts, because JSON has no such numbers.

    Examples
    --------
    >>> finite({"loss": [0.5, float("nan")]})
    {'loss': [0.5, 'nan']}
    """
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
