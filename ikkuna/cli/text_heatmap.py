"""Heat maps and curves in characters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ikkuna.cli.terminal import Terminal

__all__ = ["text_curve", "text_heatmap"]

_LEVELS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_ZERO, _BAD = "0", "!"
_MISSING, _MISSING_ASCII = "·", " "
_LABEL = 26


def _characters(values: NDArray[np.float64], low: float, high: float, terminal: Terminal) -> str:
    """Return a character for each value.

    The scale is logarithmic if the limits are positive and differ by more than a factor of 100.
    """
    levels, missing = (_LEVELS, _MISSING) if terminal.can_write(_LEVELS + _MISSING) else (_ASCII, _MISSING_ASCII)
    with np.errstate(all="ignore"):
        if low > 0 and high > 100 * low:
            share = np.log(values / low) / np.log(high / low)
        else:
            share = (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)
        places = np.clip(np.nan_to_num(share), 0, 1) * (len(levels) - 1)
    return "".join(
        missing if np.isnan(value) else _BAD if np.isinf(value) else _ZERO if value == 0 else levels[round(place)]
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
    )


def _limits(values: NDArray[np.float64]) -> tuple[float, float]:
    finite = values[np.isfinite(values) & (values != 0)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def _binned(values: NDArray[np.float64], bad: NDArray[np.bool_], columns: int, axis: int) -> NDArray[np.float64]:
    """Return means over equal parts of an axis; NaN where there is no value, infinite where a value is not finite."""
    count = min(columns, values.shape[axis])
    parts = zip(np.array_split(values, count, axis), np.array_split(bad, count, axis), strict=True)
    return np.stack([_mean(part, is_bad, axis) for part, is_bad in parts], axis)


def _mean(part: NDArray[np.float64], is_bad: NDArray[np.bool_], axis: int) -> NDArray[np.float64]:
    there = ~np.isnan(part)
    with np.errstate(all="ignore"):
        means: NDArray[np.float64] = np.where(there & np.isfinite(part), part, 0.0).sum(axis) / there.sum(axis)
    means[is_bad.any(axis) | (np.isinf(part) & there).any(axis)] = np.inf
    return means


def text_curve(values: NDArray[np.float64], width: int, terminal: Terminal) -> str:
    """Return a curve in one line, with ``0`` for zero and ``!`` for values that are not finite.

    Examples
    --------
    >>> import io
    >>> text_curve(np.array([1.0, 2.0, 3.0, np.nan]), 10, Terminal(io.TextIOWrapper(io.BytesIO(), "utf-8")))
    '▁▅█!'
    """
    found = _binned(values[None], ~np.isfinite(values[None]), width, 1)[0]
    return _characters(found, *_limits(found), terminal)


def text_heatmap(
    names: Sequence[str],
    values: NDArray[np.float64],
    present: NDArray[np.bool_],
    terminal: Terminal,
    rows: int = 16,
) -> list[str]:
    """Return the lines of a heat map; neighbouring modules share a line if there are more than `rows`.

    Parameters
    ----------
    names : sequence of str
        The names of the modules.
    values : ndarray (modules, steps)
        The values.
    present : ndarray (modules, steps)
        Which values are there.
    terminal : Terminal
        Decides about the width and the characters.
    rows : int
        The largest number of lines.
    """
    width = max(terminal.width - _LABEL - 2, 8)
    bad = present & ~np.isfinite(values)
    there = np.where(present, values, np.nan)
    there[bad] = 0.0
    cells = _binned(there, bad, width, 1)
    if len(names) > rows:
        cells = _binned(cells, np.isinf(cells), rows, 0)
        groups = np.array_split(np.arange(len(names)), rows)
        names = [f"{names[group[0]]} … (+{len(group) - 1})" if len(group) > 1 else names[group[0]] for group in groups]
    low, high = _limits(cells)
    return [
        f"{_label(name, terminal)}  {_characters(row, low, high, terminal)}"
        for name, row in zip(names, cells, strict=True)
    ]


def _label(name: str, terminal: Terminal) -> str:
    if not terminal.can_write("…"):
        name = name.replace("…", "~")
    cut = "…" if terminal.can_write("…") else "~"
    return (name if len(name) <= _LABEL else f"{name[: _LABEL // 2 - 1]}{cut}{name[-_LABEL // 2 :]}").ljust(_LABEL)
