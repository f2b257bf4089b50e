"""Select names by a pattern."""

import re
from collections.abc import Callable, Iterable, Sequence

from ikkuna.errors import ConfigError

__all__ = ["Pattern", "matcher", "select"]

_SPECIAL = frozenset("*+?^$|\\()[]{}")

Pattern = str | re.Pattern[str] | Sequence["str | re.Pattern[str]"] | None


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """Return a function that tests whether a name contains the string, or one of the strings, in `pattern`.

    A compiled expression, a string that begins with ``re:``, and a string with a backslash or one of ``*+?^$|()[]{}``,
    which are rare in names, is searched for as a regular expression.  ``None`` matches every name.

    Raises
    ------
    ConfigError
        If a string is no valid expression.

    Examples
    --------
    >>> select(["ln1.weight", "fc.weight", "fc.bias"], ["ln", "re:bias$"])
    ['ln1.weight', 'fc.bias']
    >>> select(["h.0.query.weight", "h.0.key.weight"], ".*query.*")
    ['h.0.query.weight']
    """
    if pattern is None:
        return lambda name: True
    parts = [pattern] if isinstance(pattern, str | re.Pattern) else list(pattern)
    tests = [_test(part) for part in parts]
    return lambda name: any(test(name) for test in tests)


def select(names: Iterable[str], pattern: Pattern) -> list[str]:
    """Return the `names` that match `pattern`, in order; an empty result is not an error."""
    matches = matcher(pattern)
    return [name for name in names if matches(name)]


def _test(part: str | re.Pattern[str]) -> Callable[[str], bool]:
    if not isinstance(part, str):
        return lambda name: part.search(name) is not None
    if not part.startswith("re:") and not _SPECIAL.intersection(part):
        return lambda name: part in name
    try:
        expression = re.compile(part.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"the pattern {part!r} is no valid regular expression: {error}") from error
    return lambda name: part in name or expression.search(name) is not None
