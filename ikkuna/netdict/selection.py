"""Select names by a pattern."""

import re
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Pattern", "matcher", "select"]

Pattern = str | re.Pattern[str] | Sequence["str | re.Pattern[str]"] | None


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """Return a function that tests whether a name contains the string, or one of the strings, in `pattern`.

    A compiled expression, or a string that begins with ``re:``, is searched for.  ``None`` matches every name.

    Examples
    --------
    >>> select(["ln1.weight", "fc.weight", "fc.bias"], ["ln", "re:bias$"])
    ['ln1.weight', 'fc.bias']
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
    if isinstance(part, str) and not part.startswith("re:"):
        return lambda name: part in name
    expression = re.compile(part[3:]) if isinstance(part, str) else part
    return lambda name: expression.search(name) is not None
