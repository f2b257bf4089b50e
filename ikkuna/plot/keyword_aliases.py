"""Keyword arguments under more than one name, and a helpful word for a wrong one."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

__all__ = ["keyword_aliases"]

R = TypeVar("R")


def keyword_aliases(extra: Iterable[str] = (), **aliases: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Let a function take its keywords under other names too.

    Parameters
    ----------
    extra : iterable of str
        Names that the function takes through its ``**`` argument.
    **aliases : str
        Other name to proper name.

    Raises
    ------
    TypeError
        When the function is called with an unknown keyword, or with one argument under two names;
        the message names the closest keyword.

    Examples
    --------
    >>> @keyword_aliases(y_zero="zero_line")
    ... def draw(*, zero_line=False):
    ...     return zero_line
    >>> draw(y_zero=True)
    True
    >>> draw(zero_lin=True)
    Traceback (most recent call last):
        ...
    TypeError: draw() has no argument 'zero_lin'; did you mean 'zero_line'?
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        proper = {*named, *extra}

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            settled: dict[str, Any] = {}
            for name, value in keywords.items():
                target = aliases.get(name, name)
                if target not in proper:
                    raise TypeError(_unknown(function.__name__, name, [*proper, *aliases]))
                if target in settled:
                    raise TypeError(f"{function.__name__}() got {target!r} twice, once as {name!r}")
                settled[target] = value
            return function(*args, **settled)

        return call

    return decorate


def _unknown(function: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"it takes: {', '.join(sorted(known))}"
    return f"{function}() has no argument {name!r}; {hint}"
