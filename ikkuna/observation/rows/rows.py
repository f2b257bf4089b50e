"""The measurements of one step and of its parts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.distributed.dtensor import ShardPosition
from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.metrics.messages.batch import MeasuredStep, MessageBatch
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.metrics.subscriber.state import MERGES, DeferredRow, copied_row
from ikkuna.numerics.statistics import HISTOGRAMS
from ikkuna.numerics.statistics.device import DeviceRows, DeviceStatistics, ImpreciseRows
from ikkuna.numerics.statistics.float_code import half_size, merge_codes
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.record import Records
from ikkuna.numerics.statistics.table import COLUMN, Values, empty_rows, merge_rows, row_of
from ikkuna.observation.rows.plan import MeasuredRows, Plan, RowIndex, Selection, Selections, Site
from ikkuna.support.device_thread import HostCopy, Pending, is_full, run_beside
from ikkuna.support.failures import raise_users_exception

_NO_FIELDS = frozenset[str]()
_NO_ROWS = empty_rows(0)
_EMPTY = empty_rows(1)[0]
_NO_COUNTS = np.zeros(2 * half_size(3), np.int64)  # of histograms with three bits of the mantissa, as they are measured
_N, _NANS, _INFS, _MEAN = (COLUMN[name] for name in ("n", "nans", "infs", "mean"))

_Place = tuple[dict[Any, Any], Any, Any]
"""A dictionary and a key, and the tensor there that an array replaces once it has reached the host."""


class Part:
    """The measurements of one part of an open step, such as those of one forward.

    Parameters
    ----------
    error_guard : ErrorGuard
        Handles errors in the merge of subscribers' results.
    native : bool
        Whether to use the C++ kernels if they are available.
    imprecise : ImpreciseRows
        Which rows sums in float32 are not enough for on a device.

    Attributes
    ----------
    host : HostStatistics
        The shared statistics of tensors on the host.
    devices : dict
        Those of tensors on other devices.
    measured : dict
        The results of subscribers' own ``measure``, by row and subscriber.
    together : dict
        The results of subscribers that measure several tensors together.
    shards : dict
        By row, which shard of a distributed tensor this rank has.
    reductions : dict
        By row, how the calls of a loss become one number: ``"mean"`` or ``"sum"``.
    is_clear : bool
        Whether nothing was added since it was emptied.
    """

    def __init__(self, error_guard: ErrorGuard, native: bool, imprecise: ImpreciseRows) -> None:
        self._error_guard, self._imprecise = error_guard, imprecise
        self.host = HostStatistics(native)
        self.devices: dict[torch.device, DeviceStatistics] = {}
        self.measured: dict[int, dict[Registered, Tensor | DeferredRow]] = {}
        self.together: dict[Registered, Tensor | DeferredRow] = {}
        self.shards: dict[int, ShardPosition] = {}
        self.reductions: dict[int, str] = {}
        self.is_clear = True

    def statistics(self, x: Tensor) -> HostStatistics | DeviceStatistics:
        """Return the statistics to which a tensor is added."""
        return self.host if x.is_cpu else self.on_device(x.device)

    def on_device(self, device: torch.device) -> DeviceStatistics:
        """Return the statistics of the tensors of a device."""
        if (found := self.devices.get(device)) is None:
            found = self.devices[device] = DeviceStatistics(device, self._imprecise)
        return found

    def add_measured(
        self,
        row: int | None,
        registered: Registered,
        value: Tensor | DeferredRow,
        device: torch.device | None = None,
    ) -> None:
        """Add the result of a subscriber's ``measure`` to its row; ``None`` if it measures several tensors together.

        A new result must lie on the host or on `device`, so that it can be copied together with those of other subscribers.
        A new `DeferredRow` is dropped and counted while too many wait, before its tensor is copied.
        """
        if registered.disabled:  # since the step began
            return
        if device is not None and isinstance(value, DeferredRow) and is_full((value.tensor.device,), self._error_guard):
            registered.drop_late()
            return
        results = self.together if row is None else self.measured.setdefault(row, {})
        known = results.get(registered)
        if known is None and device is None:  # it was checked when it was new
            results[registered] = value
            return
        stage = "keep" if known is None else "merge"  # a first result does not reset the count of failed merges

        def merged(value: Tensor | DeferredRow) -> Tensor | DeferredRow:
            value = copied_row(value, device) if device is not None else value
            if isinstance(value, DeferredRow) and registered.subscriber.merge != "last":
                raise TypeError(
                    f"measure may return a DeferredRow if merge is 'last', got {registered.subscriber.merge!r}"
                )
            return value if known is None else MERGES[registered.subscriber.merge](known, value)

        if (result := self._error_guard.call_each(registered, stage, merged, (value,))) is not None:
            results[registered] = result

    def merge(self, other: "Part") -> None:
        """Add the measurements of another part, and empty that."""
        self.host.merge(other.host)
        for device, statistics in other.devices.items():
            self.on_device(device).merge(statistics)
        for row, results in ((None, other.together), *other.measured.items()):
            for registered, value in results.items():
                self.add_measured(row, registered, value)
        self.shards |= other.shards
        self.reductions |= other.reductions
        other.clear()

    def is_taken(self) -> None:
        """Handle that everything was taken, and the statistics were emptied."""
        self.measured, self.together, self.shards, self.reductions = {}, {}, {}, {}
        self.is_clear = True

    def clear(self, rows: Iterable[int] | None = None) -> None:
        """Empty some rows, or all."""
        rows = None if rows is None else list(rows)
        self.host.clear(rows)
        for statistics in self.devices.values():
            statistics.clear(rows)
        if rows is None:
            self.is_taken()
        for row in rows or ():
            for by_row in (self.measured, self.shards, self.reductions):
                by_row.pop(row, None)


class PartPool:
    """The parts of a recorder that are not in use.

    Parameters
    ----------
    error_guard, native
        See `Part`.

    Attributes
    ----------
    error_guard : ErrorGuard
        Handles errors.
    """

    def __init__(self, error_guard: ErrorGuard, native: bool) -> None:
        self.error_guard, self._native = error_guard, native
        self._imprecise = ImpreciseRows()
        self._free: list[Part] = []

    def take(self) -> Part:
        """Return an empty part."""
        return self._free.pop() if self._free else Part(self.error_guard, self._native, self._imprecise)

    def release(self, parts: Iterable[Part]) -> None:
        """Empty parts, and keep them for later, so that a step which takes as many gets the same ones in the same order."""
        for part in reversed([*parts]):
            if not part.is_clear:
                part.clear()
            self._free.append(part)


class RankMerge(Protocol):
    """Replaces the measurements of this rank by those of all ranks."""

    def arrived(self, rows: "Rows") -> bool:
        """Return whether the measurements of all ranks have arrived; called once this rank's are on the host."""

    def merge_into(self, rows: "Rows") -> None:
        """Replace the measurements of this rank; wait for the other ranks if necessary."""

    def abandon(self) -> None:
        """Forget the step, which is not delivered."""


class Rows:
    """The measurements of one step.

    While the step is open, each of its parts is measured separately, because a forward may turn out to count for nothing.
    Part 0 is the step itself.
    `close` merges the parts that count, copies their table, and starts the copies from devices; `load` completes them.

    Parameters
    ----------
    stamp : Stamp
        The step.
    plan : Plan
        What is measured in it.
    index : RowIndex
        The recorder's rows.
    pool : PartPool
        The recorder's unused parts.
    selections : Selections
        The rows that each subscriber takes.

    Attributes
    ----------
    subscriptions : sequence of Registered
        The subscribers that sample the step, in the order of registration.
    sampled : frozenset of Registered
        The same without their order.
    values : array
        ``(rows, columns)``, the shared statistics.
    codes : dict
        Histograms by row and field.
    measured, together, shards, reductions : dict
        See `Part`.
    ranks : dict
        By row, the row of each rank, if a subscriber needs them.
    skipped : bool
        Whether the optimizer left the weights unchanged.
    rank_merge : RankMerge, optional
        ``None`` in one process.
    rates : dict
        Learning rates of the step by the name of the parameter group: numbers, or tensors until the copy has arrived.
    """

    def __init__(self, stamp: Stamp, plan: Plan, index: RowIndex, pool: PartPool, selections: Selections) -> None:
        self.stamp, self.plan, self.index, self.selections = stamp, plan, index, selections
        self.subscriptions: Sequence[Registered] = plan.subscriptions
        self.sampled = plan.sampled
        self.values = _NO_ROWS
        self.codes: dict[int, dict[str, Any]] = {}
        self.measured: dict[int, dict[Registered, Any]] = {}
        self.together: dict[Registered, Any] = {}
        self.shards: dict[int, ShardPosition] = {}
        self.reductions: dict[int, str] = {}
        self.ranks: dict[int, tuple[Values | None, ...]] = {}
        self.skipped = False
        self.rank_merge: RankMerge | None = None
        self.rates: dict[str, Any] = {}
        self._pool = pool
        self._parts: dict[int, Part] = {}
        self._flags: dict[int, Any] = {}
        self._scales: dict[int, Any] = {}
        self._totals: dict[int, int] = {}
        self._repeated: dict[int, int] = {}
        self._taken: list[tuple[DeviceRows, dict[Any, Any]]] = []
        self._device_codes: list[dict[int, dict[str, Any]]] = []
        self._copies: list[tuple[list[_Place], HostCopy]] = []
        self._deferred: list[tuple[list[tuple[dict[Any, Any], Any]], Pending[list[Tensor]]]] = []
        self._is_pending = False  # whether `load` has something to complete
        self._measured_rows: MeasuredRows | None = None
        self._measurers: frozenset[Registered] = frozenset()
        self._is_finite = False
        self._tables: dict[Selection, Values] = {}
        self._batches: dict[tuple[Selection, frozenset[str], bool], MessageBatch] = {}

    # -- while the step is open -----------------------------------------------------------------------------------

    def part(self, number: int) -> Part:
        """Return a part of the step."""
        found = self._parts.get(number) or self._parts.setdefault(number, self._pool.take())
        found.is_clear = False
        return found

    def drop(self, kinds: frozenset[str]) -> None:
        """Forget the measurements of some kinds."""
        self.renew_stamp()
        rows = list(self.index.rows_of(kinds))
        for part in self._parts.values():
            part.clear(rows)
            part.together = {r: value for r, value in part.together.items() if r.kinds[0] not in kinds}

    def drop_part(self, number: int, rows: Iterable[int] | None = None) -> None:
        """Forget the measurements of a part, or some rows of it."""
        if (part := self._parts.get(number)) is not None:
            part.clear(rows)

    def drop_backward(self, number: int, with_arguments: bool) -> None:
        """Forget what a backward has added to a part; `with_arguments` if those of the loss are among that."""
        if (part := self._parts.get(number)) is None:
            return
        kinds = ("layer_gradients", "input_labels") if with_arguments else ("layer_gradients",)
        totals = [row for row, how in part.reductions.items() if how == "total"]
        part.clear([*self.index.rows_of(frozenset(kinds)), *totals])
        if with_arguments:
            part.together = {}

    def renew_stamp(self) -> None:
        """Replace the stamp by an equal one; subscribers that keep values of a step notice the restart by its identity."""
        self.stamp = replace(self.stamp)

    def merge_part(self, source: int, target: int) -> None:
        """Add the measurements of a part to those of another one, and empty it."""
        if (part := self._parts.get(source)) is not None and source != target:
            self.part(target).merge(part)

    def split(self, parts: Iterable[int]) -> "Rows":
        """Move some parts to new rows of the same step, and return these."""
        other = Rows(self.stamp, self.plan, self.index, self._pool, self.selections)
        other._parts = {number: self._parts.pop(number) for number in parts if number in self._parts}
        return other

    def note_overflow(self, found_inf: Tensor) -> None:
        """Record the flag by which a gradient scaler tells a fused optimizer to leave the weights unchanged."""
        self._flags[len(self._flags)] = found_inf.detach().clone()

    def rename_total(self, site: Site, path: str, name: str, scale: Tensor | None = None) -> None:
        """Give a row that is a total another path; its parts are multiplied by `scale`, which is removed from the sum."""
        row = self.index.row(site, path)
        self._totals[row] = self.index.row(site, name)
        if scale is not None:
            self._scales[row] = scale.detach().clone()

    def drop_if_equal(self, site: Site, path: str, other: str) -> None:
        """Leave a row of one number out if it is that of another path, up to rounding."""
        self._repeated[self.index.row(site, path)] = self.index.row(site, other)

    def close(self, parts: Iterable[int] = ()) -> None:
        """Merge some parts into part 0, drop the others, and start one copy to the host per device."""
        for number in filter(self._parts.__contains__, parts):
            if 0 in self._parts:
                self.merge_part(number, 0)
            else:
                self._parts[0] = self._parts.pop(number)
        pending: list[_Place] = [
            (self.rates, key, rate) for key, rate in self.rates.items() if isinstance(rate, Tensor)
        ]
        if not (self._parts or pending or self._flags):
            return
        whole = self._parts.get(0) or self.part(0)
        self.measured, self.together = whole.measured, whole.together
        self.shards, self.reductions = whole.shards, whole.reductions
        self.values, self.codes = whole.host.take(len(self.index.keys))
        holders: list[dict[Any, Any]] = [self._flags, self._scales, self.together]
        holders += (*self.measured.values(), *self.codes.values())
        for device, statistics in whole.devices.items():
            try:
                taken, codes = statistics.take()
            except Exception as error:
                self._pool.error_guard.report_internal(f"merging the measurements of {device}", error)
                statistics.clear()
                continue
            self._device_codes.append(codes)
            self._taken.append((taken, taken.tensors))
            holders += (taken.tensors, *codes.values())
        whole.is_taken()
        for holder in holders:
            pending += zip(repeat(holder), holder, holder.values(), strict=False)
        if pending or self._taken or self._device_codes:
            self._is_pending = True
            self._start_copies(pending)
        self._pool.release(self._parts.values())
        self._parts = {}

    def _start_copies(self, pending: Iterable[_Place]) -> None:
        by_device: dict[torch.device, list[_Place]] = {}
        deferred: dict[torch.device, list[tuple[dict[Any, Any], Any, DeferredRow]]] = {}
        for holder, key, tensor in pending:
            if isinstance(tensor, DeferredRow):
                deferred.setdefault(tensor.tensor.device, []).append((holder, key, tensor))
            elif tensor.device.type == "cpu":
                holder[key] = tensor.numpy()
            else:
                by_device.setdefault(tensor.device, []).append((holder, key, tensor))
        for device, group in by_device.items():
            try:
                self._copies.append((group, HostCopy([tensor for *_, tensor in group])))
            except Exception as error:
                raise_users_exception(error)
                self._lose(group, f"copying the measurements of {device}", error)
        for device, group in deferred.items():
            rows = [row for *_, row in group]
            places, size = [(holder, key) for holder, key, _ in group], sum(row.tensor.nbytes for row in rows)
            computed = run_beside((device,), partial(DeferredRow.rows, rows), self._pool.error_guard, size)
            self._deferred.append((places, computed))

    def _lose(self, group: Iterable[_Place], what: str, error: Exception) -> None:
        """Forget the values of one device, which could not be copied, and report the error; those of others remain."""
        for holder, key, _ in group:
            holder.pop(key, None)
        self._taken = [(taken, arrays) for taken, arrays in self._taken if len(arrays) == taken.count]
        self._pool.error_guard.report_internal(what, error)

    # -- after the step -------------------------------------------------------------------------------------------

    def arrived(self) -> bool:
        """Return whether all copies have reached the host, and the measurements of other ranks are here."""
        if self._copies and not all(copy.arrived() for _, copy in self._copies):
            return False
        if self._deferred and not all(computed.arrived() for _, computed in self._deferred):
            return False
        return self.rank_merge is None or self.rank_merge.arrived(self)

    def load(self) -> None:
        """Complete the copies from devices, waiting if necessary; a second call does nothing."""
        for group, copy in self._copies:
            try:
                arrays = copy.arrays()
            except Exception as error:
                raise_users_exception(error)
                self._lose(group, "waiting for measurements on a device", error)
                continue
            for (holder, key, _), array in zip(group, arrays, strict=True):
                holder[key] = array
        for places, computed in self._deferred:
            self._load_deferred(places, computed)
        for name, rate in self.rates.items():
            if isinstance(rate, np.ndarray):
                self.rates[name] = float(rate)
        for taken, found in self._taken:
            numbers, values = taken.rows(found)
            with np.errstate(all="ignore"):
                self.values[numbers] = merge_rows(np.stack([self.values[numbers], values]))
            merge_codes(self.codes, taken.codes(found))
        for codes in self._device_codes:
            merge_codes(self.codes, codes)
        self.skipped = self.skipped or any(bool(flag.any()) for flag in self._flags.values())
        if self.reductions:
            self._sum_totals()
        self._copies, self._taken, self._device_codes, self._flags, self._deferred = [], [], [], {}, []

    def _load_deferred(self, places: list[tuple[dict[Any, Any], Any]], computed: Pending[list[Tensor]]) -> None:
        try:
            rows = computed.result()
        except Exception as error:  # such as a lack of memory
            for holder, key in places:
                del holder[key]
            self._pool.error_guard.report_internal("computing deferred rows", error)
            return
        for (holder, key), row in zip(places, rows, strict=True):
            holder[key] = row.numpy()

    def _sum_totals(self) -> None:
        """Replace the rows that are totals of this rank by their sums, under their own paths."""
        sums: dict[int, float] = {}
        for row in [row for row, reduction in self.reductions.items() if reduction == "total"]:
            del self.reductions[row]
            n, nans, infs, mean = self.values[row, [_N, _NANS, _INFS, _MEAN]].tolist()
            scale = float(np.ravel(self._scales.get(row, 1.0))[0])
            if n:
                sums[self._totals.get(row, row)] = np.nan if nans + infs else mean * n / scale
            self.values[row] = _EMPTY
        for row, value in sums.items():
            self.values[row] = row_of(value)
            self.reductions[row] = "mean"

    def complete(self) -> None:
        """Merge the measurements of all ranks, and the calls of a loss, waiting if necessary."""
        if self.rank_merge is not None:
            self.rank_merge.merge_into(self)
        if self._is_pending or self.reductions:
            self.load()
        for row, reduction in self.reductions.items():
            n, nans, infs, mean = self.values[row, [_N, _NANS, _INFS, _MEAN]].tolist()
            if n:
                value = np.nan if nans + infs else mean * n if reduction == "sum" else mean
                self.values[row] = row_of(value)
        for row, other in self._repeated.items():
            is_known = max(row, other) < len(self.values) and self.values[other, _N]
            if is_known and _are_close(*self.values[[row, other], _MEAN].tolist()):
                self.values[row] = _EMPTY

    def discard(self) -> int:
        """Forget all measurements; return how many there were."""
        numbers = {row for taken, _ in self._taken for row in taken.numbers}
        count = len(numbers.union(self.measured_rows())) + len(self.together)
        self.values, self.measured, self.together = self.values[:0], {}, {}
        self._copies, self._taken, self._device_codes, self._deferred, self.reductions = [], [], [], [], {}
        self.rates = {name: rate for name, rate in self.rates.items() if not isinstance(rate, Tensor)}
        return count

    def abandon(self) -> None:
        """Forget the step, which is not delivered."""
        if self.rank_merge is not None:
            self.rank_merge.abandon()

    def taken(self) -> list[tuple[Registered, Sequence[MessageBatch], MeasuredStep | None]]:
        """Return what each subscriber takes of the complete measurements: batches, one for each kind, or a `MeasuredStep`."""
        shared = self._make((self._measured_rows or self._find_measured()).shared(self.plan))
        found: list[tuple[Registered, Sequence[MessageBatch], MeasuredStep | None]] = []
        for registered in self.subscriptions:
            if registered.takes_steps:
                found.append((registered, (), self.step(registered)))
            elif (batches := shared.get(registered)) is not None:
                found.append((registered, batches, None))
            else:
                found.append((registered, self.batches(registered) if registered.reads_tensors else (), None))
        return found

    def step(self, registered: Registered) -> MeasuredStep:
        """Return what a subscriber takes, of which batches are made when it reads them."""
        found = (self._measured_rows or self._find_measured()).of(registered) if registered.fields else ()
        is_plain = self._is_finite and not registered.together and registered not in self._measurers
        return MeasuredStep(self.stamp, found, is_plain, partial(self.batches, registered))

    def batches(self, registered: Registered) -> list[MessageBatch]:
        """Return what a subscriber takes of the complete measurements, one batch for each kind."""
        if registered.together:
            if registered not in self.together:
                return []
            return [MessageBatch.of_network(self.stamp, registered.kinds, self.together[registered])]
        measured_rows = self._measured_rows or self._find_measured()
        if registered in self._measurers:
            made = (self._batch_with_data(registered, s, measured_rows) for s in self.selections.of(registered))
            return [batch for batch in made if batch is not None]
        return self._make(((registered, measured_rows.of(registered)),))[registered] if registered.fields else []

    def _find_measured(self) -> MeasuredRows:
        """Return which rows were measured."""
        found = self._measured_rows = self.selections.measured(self.values[:, _N] > 0)
        self._measurers = frozenset(chain.from_iterable(self.measured.values()))
        self._is_finite = not np.count_nonzero(self.values[:, _NANS : _INFS + 1])
        return found

    def _make(self, taken: Iterable[tuple[Registered, tuple[Selection, ...]]]) -> dict[Registered, list[MessageBatch]]:
        """Return the shared statistics of some rows for each subscriber; those that read the same ones share them."""
        made: dict[Registered, list[MessageBatch]] = {}
        for registered, selections in taken:
            fields, finite_only = registered.fields, registered.subscriber.finite_only
            batches = made[registered] = []
            for selection in selections:
                key = selection, fields, finite_only
                if (batch := self._batches.get(key)) is None:
                    if (values := self._tables.get(selection)) is None:
                        values = self._tables[selection] = self.values[selection.places]
                        values.flags.writeable = False
                    ranks = [self.ranks.get(row, ()) for row in selection.rows.tolist()] if self.ranks else ()
                    counts = None if fields.isdisjoint(HISTOGRAMS) else self._counts(selection, fields)
                    records = Records(values, fields, finite_only, counts, ranks, self._is_finite)
                    batch = self._batches[key] = MessageBatch(self.stamp, selection.kind, selection.names, records)
                batches.append(batch)
        return made

    def _batch_with_data(
        self, registered: Registered, selection: Selection, measured_rows: MeasuredRows
    ) -> MessageBatch | None:
        """Return the results of a subscriber's own ``measure``, and the statistics that it reads beside them."""
        own, rows = self.measured, dict[int, Any]()
        for row in selection.rows.tolist():
            if (results := own.get(row)) is not None and registered in results:
                rows[row] = results[registered]
        measured: Selection | None = selection
        if len(rows) < len(selection.rows):
            is_taken = np.zeros(len(self.index.keys), np.bool_)
            if registered.fields:
                is_taken[: len(measured_rows.is_measured)] = measured_rows.is_measured
            is_taken[list(rows)] = True
            measured = selection.measured(is_taken)
        if measured is None:
            return None
        data = [rows.get(row) for row in measured.rows.tolist()] if rows else None
        is_read = bool(registered.fields)
        statistics = self._make(((registered, (measured,)),))[registered][0].statistics if is_read else None
        return MessageBatch(self.stamp, measured.kind, measured.names, statistics, data)

    def measured_rows(self) -> list[int]:
        """Return the numbers of the rows that have measurements."""
        rows: list[int] = np.flatnonzero(self.values[:, _N]).tolist()
        return sorted({*rows, *self.measured}) if self.measured else rows

    def fields(self, row: int) -> frozenset[str]:
        """Return the statistics that a row has."""
        site = self.index.keys[row][0]
        task = self.plan.task(site.kind, site.module)
        return task.fields if task is not None else _NO_FIELDS

    def _counts(self, selection: Selection, fields: frozenset[str]) -> dict[str, list[NDArray[np.int64]]]:
        """Return the histograms of some rows, each ``(2K,)``; all zero where none was measured."""
        rows = [self.codes.get(row, {}) for row in selection.rows.tolist()]
        return {name: [np.asarray(codes.get(name, _NO_COUNTS)) for codes in rows] for name in fields & HISTOGRAMS}

    def message(self, row: int, data: Any = None) -> Message:
        """Return the message of a row."""
        site, path = self.index.keys[row]
        return site.message(self.stamp, path, data)


def _are_close(value: float, known: float) -> bool:
    """Return what ``np.isclose`` does with a relative tolerance of 1e-5 and equal NaN, which takes 40 µs."""
    are_nan = value != value and known != known
    return are_nan or value == known or abs(value - known) <= 1e-5 * abs(known) < math.inf
