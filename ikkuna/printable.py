"""Removes what would control a terminal from text that is shown or logged."""

import re

__all__ = ["printable"]

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
