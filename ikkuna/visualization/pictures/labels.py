"""Texts in pictures: names as matplotlib can show them."""

from functools import cache

from matplotlib import font_manager

__all__ = ["escaped", "printable"]


def printable(text: str, limit: int = 44) -> str:
    r"""Return `text` without control characters and characters that the font lacks, cut to `limit` characters.

    Examples
    --------
    >>> printable("two\nlines"), printable("encoder.layers.0.attention", 12)
    ('two·lines', '…0.attention')
    """
    text = text if len(text) <= limit else f"…{text[1 - limit :]}"
    known = _characters()
    return "".join(c if c.isprintable() and ord(c) in known else "·" for c in text)


def escaped(text: str, limit: int = 44) -> str:
    r"""Return :func:`printable` text that matplotlib shows in titles and legends letter by letter.

    Matplotlib reads a formula between dollar signs, and leaves out of legends what begins with an underscore.

    Examples
    --------
    >>> escaped("a$b$"), escaped("_private")
    ('a\\$b\\$', ' _private')
    """
    shown = printable(text, limit).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _characters() -> frozenset[int]:
    """Return the characters of matplotlib's own font; every other font may lack one, and matplotlib would warn."""
    path = font_manager.findfont("DejaVu Sans")
    return frozenset(font_manager.get_font(path).get_charmap())
