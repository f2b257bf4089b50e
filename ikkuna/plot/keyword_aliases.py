"""Keyword arguments with more than one name, and errors that suggest the right name."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

__all__ = ["keyword_aliases"]

R = TypeVar("R")


def keyword_aliases(extra: Iterable[str] = (), **aliases: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that lets a function accept keyword arguments under other names.

    Parameters
    ----------
    extra : iterable of str
        Names that the function accepts through its ``**`` argument.
    **aliases : str
        Other names, with the parameter name as value.

    Raises
    ------
    TypeError
        When the function is called with an unknown keyword, or with one argument under two names; the message names the
        closest keyword.

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
        accepted = {*named, *extra}

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            renamed: dict[str, Any] = {}
            for name, value in keywords.items():
                target = aliases.get(name, name)
                if target not in accepted:
                    raise TypeError(_unknown(function.__name__, name, [*accepted, *aliases]))
                if target in renamed:
                    raise TypeError(
                        f"{function.__name__}() got multiple values for {target!r}, one of them as {name!r}"
                    )
                renamed[target] = value
            return function(*args, **renamed)

        return call

    return decorate


def _unknown(function: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"available: {', '.join(sorted(known))}"
    return f"{function}() has no argument {name!r}; {hint}"
