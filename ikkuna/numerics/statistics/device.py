r"""Statistics of tensors on a device, computed there with torch operators, without synchronisation.

Each call reads its tensor twice, in float64: the mean first, then the powers of the deviations from it.
So no digits are lost to a large offset.  The rows of several calls merge on the device.
"""

import torch
from torch import Tensor

from ikkuna.numerics.elements import flatten, readable
from ikkuna.numerics.statistics.float_code import add_codes, merge_codes
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, record_of
from ikkuna.numerics.statistics.table import COLUMNS, EMPTY, merge_rows, repeat_rows, row_of

__all__ = ["DeviceStatistics"]

_CHUNK = 1 << 24  # bounds each temporary tensor to 128 MiB
_MOST_CALLS = 64  # rows that wait to be merged


class DeviceStatistics:
    """A row of statistics for each number that a caller gives, and histograms beside it, on one device.

    `HostStatistics` has the same methods.  Only `record` waits for the device.

    Parameters
    ----------
    device : torch.device
        The device of the tensors.

    Attributes
    ----------
    codes : dict
        Histograms by row and field.

    Examples
    --------
    >>> from ikkuna.numerics.statistics import closure
    >>> statistics, fields = DeviceStatistics(torch.device("cpu")), closure(["m2", "max"])
    >>> for x in (torch.tensor([1.0, 2.0]), torch.tensor([6.0])):
    ...     added = statistics.add(0, x, fields)
    >>> record = statistics.record(0, fields)
    >>> record.mean, record.variance(), record.max
    (3.0, 4.666666666666667, 6.0)
    """

    def __init__(self, device: torch.device) -> None:
        self.codes: dict[int, dict[str, Tensor]] = {}
        self._empty = torch.from_numpy(EMPTY.copy()).to(device)
        self._calls: dict[int, list[Tensor]] = {}

    def add(
        self,
        row: int,
        x: Tensor,
        fields: frozenset[str],
        weight: float | Tensor = 1,
        generator: torch.Generator | None = None,
    ) -> bool:
        """Add the statistics of the elements of `x` to a row; parameters are those of `HostStatistics.add`."""
        if (read := readable(x)) is None:
            return False
        values, implied_zeros = read
        parts = [self._measure(part, fields) for part in flatten(values).split(_CHUNK) if part.numel()]
        if implied_zeros:
            parts.append(torch.from_numpy(row_of(0.0, implied_zeros)).to(x.device))
        if parts:
            if isinstance(weight, Tensor) or weight != 1:
                parts = [repeat_rows(part, weight) for part in parts]
            self._append(row, parts)
        if not fields.isdisjoint(HISTOGRAMS):
            add_codes(self.codes.setdefault(row, {}), x, fields, generator)
        return True

    def _append(self, row: int, parts: list[Tensor]) -> None:
        calls = self._calls.setdefault(row, [])
        calls += parts
        if len(calls) >= _MOST_CALLS:
            calls[:] = [merge_rows(torch.stack(calls))]

    def _measure(self, x: Tensor, fields: frozenset[str]) -> Tensor:
        """Return the row of the elements of a one-dimensional tensor; columns that are not in `fields` are those of no elements."""
        x = x.double()
        nan, finite = torch.isnan(x), torch.isfinite(x)
        found = {"n": x.new_full((), x.numel()), "nans": _total(nan)}
        k = _total(finite)
        found["infs"] = found["n"] - found["nans"] - k
        clean = torch.where(finite, x, 0.0)
        if "zeros" in fields:
            found["zeros"] = _total(x == 0)
        if "l1" in fields:
            found["l1"] = clean.abs().sum()
        if "sumsq" in fields:
            found["sumsq"] = (clean * clean).sum()
        if "mean" in fields:
            found["mean"] = clean.sum() / k.clamp(min=1)
        if "m2" in fields:
            deviation = torch.where(finite, x - found["mean"], 0.0)
            power = deviation * deviation
            found["m2"] = power.sum()
            if "m3" in fields:
                found["m3"] = (power * deviation).sum()
            if "m4" in fields:
                found["m4"] = (power * power).sum()
        if "min" in fields or "max" in fields:
            found["min"], found["max"] = torch.aminmax(x)
        if "finite_min" in fields or "finite_max" in fields:
            found["finite_min"] = torch.where(finite, x, torch.inf).amin()
            found["finite_max"] = torch.where(finite, x, -torch.inf).amax()
        return torch.stack([found.get(name, self._empty[i]) for i, name in enumerate(COLUMNS)])

    def add_difference(self, row: int, x: Tensor, y: Tensor, fields: frozenset[str]) -> bool:
        """Add the statistics of ``x - y``, computed in at least float32, to a row; return whether these tensors have numbers."""
        return self.add(row, x.to(torch.promote_types(x.dtype, torch.float32)) - y, fields)

    def record(self, row: int, fields: frozenset[str]) -> Record:
        """Return the `fields` of a row; this waits for the device."""
        calls = self._calls.get(row, [self._empty])
        record = record_of(merge_rows(torch.stack(calls)).cpu().numpy(), fields)
        for name, counts in self.codes.get(row, {}).items():
            setattr(record, name, counts.cpu().numpy())
        return record

    def merge(self, other: "DeviceStatistics") -> None:
        """Add the rows of `other`, and leave it as it is."""
        for row, calls in other._calls.items():
            self._append(row, calls)
        merge_codes(self.codes, other.codes)

    def clear(self, rows: list[int] | None = None) -> None:
        """Empty some rows, or all."""
        for row in [*self._calls, *self.codes] if rows is None else rows:
            self._calls.pop(row, None)
            self.codes.pop(row, None)

    def take(self) -> tuple[list[int], Tensor | None, dict[int, dict[str, Tensor]]]:
        """Return the indices of the non-empty rows, these rows ``(rows, columns)`` or ``None``, and histograms; empty all rows."""
        by_calls: dict[int, list[int]] = {}
        for row, calls in self._calls.items():
            by_calls.setdefault(len(calls), []).append(row)
        merged = []
        for count, rows in by_calls.items():
            stacked = torch.stack([call for row in rows for call in self._calls[row]])
            merged.append(
                merge_rows(stacked.unflatten(0, (len(rows), count)).transpose(0, 1)) if count > 1 else stacked
            )
        numbers = [row for rows in by_calls.values() for row in rows]
        codes = self.codes
        self._calls, self.codes = {}, {}
        return numbers, torch.cat(merged) if merged else None, codes


def _total(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)
