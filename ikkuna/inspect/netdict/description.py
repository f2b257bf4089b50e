"""Named statistics of tensors, and the table that shows them."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import CHUNK, as_float64, as_reals, dense, flatten, readable
from ikkuna.numerics.statistics import Record, merge, needed_fields
from ikkuna.numerics.statistics.host import measure
from ikkuna.numerics.statistics.record import NORMS
from ikkuna.printable import printable

_Statistic = tuple[tuple[str, ...], Callable[[Record, int], float]]


def _constant(record: Record) -> bool:
    """Return whether all elements are equal; rounding errors would give such data a skewness."""
    return record.min == record.max


STATISTICS: Mapping[str, _Statistic] = {
    "num_params": (("n",), lambda r, c: r.n),
    "L1_norm": (("l1",), lambda r, c: r.l1_norm),
    "L2_norm": (("sumsq",), lambda r, c: r.l2_norm),
    "L2_squared": (("sumsq",), lambda r, c: math.nan if r.nonfinite else r.sumsq or 0.0),
    "max": (("max",), lambda r, c: math.nan if r.max is None or not r.n else r.max),
    "min": (("min",), lambda r, c: math.nan if r.min is None or not r.n else r.min),
    "abs_mean": (("l1",), lambda r, c: r.l1_norm / r.count if r.count else math.nan),
    "abs_max": (("min", "max"), lambda r, c: r.linf_norm),
    "mean": (("mean",), lambda r, c: r.mean),
    "variance": (("m2",), lambda r, c: r.variance(c)),
    "std": (("m2",), lambda r, c: math.sqrt(r.variance(c))),
    "skew": (("m3", "min", "max"), lambda r, c: math.nan if _constant(r) else r.skewness),
    "kurtosis": (("m4", "min", "max"), lambda r, c: math.nan if _constant(r) else r.kurtosis),
    "sq_mean": (("sumsq",), lambda r, c: r.rms**2),
    "rms": (("sumsq",), lambda r, c: r.rms),
    "zeros": (("zeros",), lambda r, c: r.zeros or 0),
    "nonfinite": (("nans", "infs"), lambda r, c: r.nonfinite),
}
"""Every statistic by name, with the record fields that it needs and its function."""

DEFAULT = tuple(name for name in STATISTICS if name not in ("sq_mean", "rms", "zeros", "nonfinite"))
_ALIASES = {"numel": "num_params", "norm1": "L1_norm", "norm2": "L2_norm", "Linf": "abs_max", "norm1_mean": "abs_mean"}
_ALIASES |= {"var": "variance", "skewness": "skew"}


def known_statistic(name: str) -> str:
    """Return the canonical name of a statistic.

    Raises
    ------
    ConfigError
        If there is no such statistic; the message names the closest one.
    """
    canonical = _ALIASES.get(name, name)
    if canonical not in STATISTICS:
        close = difflib.get_close_matches(canonical, STATISTICS, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown statistic {name!r}; {hint}known: {', '.join(STATISTICS)}")
    return canonical


_NAN = math.nan
_NOTHING = Record(0, _NAN, 0.0, 0.0, 0.0, _NAN, _NAN, _NAN, _NAN, 0.0, 0.0, 0, 0, 0)


def record_of(tensors: Iterable[Tensor], fields: Iterable[str]) -> Record:
    """Return the :class:`~ikkuna.numerics.statistics.Record` of all elements of `tensors`."""
    wanted = needed_fields(fields)
    records = [record for tensor in tensors if (record := measure(tensor, wanted)) is not None and record.n]
    return merge(*records) if records else _NOTHING


def statistics_of(record: Record, names: Sequence[str], correction: int = 1) -> dict[str, float]:
    """Return the statistics `names` of `record`; undefined ones are NaN."""
    return {name: STATISTICS[name][1](record, correction) for name in names}


def fields_of(names: Iterable[str]) -> set[str]:
    """Return the record fields that the statistics `names` need."""
    return {field for name in names for field in STATISTICS[name][0]}


def columns_of(stats: Any, exclude: Any, layerwise: bool) -> tuple[list[str], list[str]]:
    """Return the statistics to compute, and the strings in `exclude` that hide tensors."""
    selected = DEFAULT if stats is None else [stats] if isinstance(stats, str) else stats
    excluded = [] if exclude is None else [exclude] if isinstance(exclude, str) else list(exclude)
    hidden, dropped = [], set()
    for word in excluded:
        try:
            dropped.add(known_statistic(word))
        except ConfigError:
            hidden.append(word)
    columns = [name if name == "shape" and layerwise else known_statistic(name) for name in selected]
    return [name for name in columns if name not in dropped], hidden


def row_of(tensors: list[Tensor], columns: list[str], correction: int) -> dict[str, Any]:
    """Return the statistics `columns` of all elements of `tensors`, in this order."""
    numbers = [name for name in columns if name != "shape"]
    values: dict[str, Any] = dict(statistics_of(record_of(tensors, fields_of(numbers)), numbers, correction))
    return {name: tuple(tensors[0].shape) if name == "shape" else values[name] for name in columns}


class Description(dict[str, Any]):
    """Statistics by name, of a whole net or of each of its tensors; a dictionary whose ``repr`` is a table.

    Examples
    --------
    >>> Description({"a": {"L2_norm": 5.0}, "b": {"L2_norm": 13.0}})
       L2_norm
    a        5
    b       13
    >>> _.to_dict()
    {'a/L2_norm': 5.0, 'b/L2_norm': 13.0}
    """

    @property
    def layerwise(self) -> bool:
        """Whether there is a row for each tensor."""
        return any(isinstance(value, dict) for value in self.values())

    def to_dict(self) -> dict[str, float]:
        """Return one flat dictionary of numbers, with names such as ``fc.weight/L2_norm``, for a logger."""
        flat = {}
        for key, value in self.items():
            rows = (
                {f"{key}/{name}": number for name, number in value.items()} if isinstance(value, dict) else {key: value}
            )
            flat.update({name: number for name, number in rows.items() if isinstance(number, int | float)})
        return flat

    flat = to_dict

    def __repr__(self) -> str:
        if not self:
            return "(nothing to describe)"
        if self.layerwise:
            columns = list(next(iter(self.values())))
            rows = [["", *columns], *([key, *map(_text, row.values())] for key, row in self.items())]
        else:
            rows = [[key, _text(value)] for key, value in self.items()]
        return _align([[*map(printable, row)] for row in rows])


def _text(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _align(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)] for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def power_norm(tensors: Sequence[Tensor], p: float) -> float:
    r"""Return :math:`(\sum |x_i|^p)^{1/p}` over all elements of `tensors`; 0 for no elements, NaN if one is NaN.

    An infinite element makes it infinite; that of order 0 is NaN then.

    Examples
    --------
    >>> power_norm([torch.tensor([3.0, 4.0])], 2), power_norm([torch.tensor([3.0, 0.0])], 0)
    (5.0, 1.0)
    """
    if math.isnan(p) or -math.inf < p < 0:
        raise ConfigError(f"the order of a norm must be positive, 0, inf or -inf, got {p}")
    fields, norm = NORMS.get(p, ((), ""))
    record = record_of(tensors, ("min", "max", *fields))
    if not record.n:
        return 0.0
    largest = max(abs(record.min or 0.0), abs(record.max or 0.0))
    if math.isnan(largest) or (p > 0 and not 0 < largest < math.inf):
        return largest
    if norm:
        return float(getattr(record, norm))
    parts = (part.abs() for tensor in tensors for part in _chunks(tensor))
    if p < 0:
        return min(float(part.min()) for part in parts)
    total = math.fsum(float((part / largest).pow(p).sum()) for part in parts)  # a power of the elements could vanish
    return float(largest * total ** (1 / p))


def broadcast(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Return two tensors (or numbers) as strided tensors of one shape; numbers become float64.

    Examples
    --------
    >>> [x.tolist() for x in broadcast(torch.ones(2), 0.1)]
    [[1.0, 1.0], [0.1, 0.1]]
    """
    left, right = torch.broadcast_tensors(dense(as_tensor(a)), dense(as_tensor(b)))
    return left, right


def as_tensor(value: Any) -> Tensor:
    """Return a tensor as it is, and a number as a float64 tensor on the host.

    Examples
    --------
    >>> as_tensor(0.1).item()
    0.1
    """
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


def inner_product(a: Tensor, b: Tensor) -> float:
    r"""Return the real part of :math:`\sum_i \bar a_i b_i` of two tensors of one shape."""
    if a.is_complex() or b.is_complex():
        a, b = (as_reals(x.to(torch.complex128)) for x in (a, b))
    left, right = a.reshape(-1), b.reshape(-1)
    count = left.numel() // CHUNK + 1
    pairs = zip(left.chunk(count), right.chunk(count), strict=True)
    return math.fsum(float(torch.dot(as_float64(x), as_float64(y))) for x, y in pairs)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield all elements in float64; the zeros that are not stored are one."""
    values, implied = readable(tensor) or (torch.empty(0, device="cpu"), 0)
    flat = flatten(values)
    yield from (as_float64(chunk) for chunk in flat.split(CHUNK) if chunk.numel())
    if implied:
        yield flat.new_zeros(1)
