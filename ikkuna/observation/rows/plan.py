"""Which tensors are measured at a step, how, and in which row; and the rows that each subscriber takes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from threading import RLock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ikkuna.metrics.messages.batch import BatchNames, message_name
from ikkuna.metrics.messages.kinds import (
    EVENT_KINDS,
    FORWARD_KINDS,
    MICRO_KINDS,
    PARAMETER_KINDS,
    STATE_PREFIXES,
    UNCLIPPED_KINDS,
    is_built_in,
)
from ikkuna.metrics.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.metrics.subscriber.subscription import Sampling
from ikkuna.numerics.statistics import EXACT_COUNTS, HISTOGRAMS, needed_fields
from ikkuna.numerics.statistics.native.kernels import NOTHING as NOT_MEASURED
from ikkuna.numerics.statistics.native.kernels import PYTHON, flags_of
from ikkuna.store.quantity import LOGGED


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A kind of tensor, and the module it belongs to.

    A site equals only itself, which makes it a cheap key; each exporter creates each site once.

    Parameters
    ----------
    kind : str
        The kind.
    module : str or None
        Name of the module; ``None`` for the network.
    """

    kind: str
    module: str | None = None

    def message(self, stamp: Stamp, path: str = "", data: Any = None) -> Message:
        """Return the message of one output or parameter of this site."""
        if self.module is None:
            return NetworkMessage(stamp, self.kind, data, None, path)
        name = message_name(self.kind, self.module, path)
        return ModuleMessage(stamp, self.kind, data, None, self.module, path, name)

    def __str__(self) -> str:
        return self.kind if self.module is None else f"{self.kind} of {self.module}"


Key = tuple[Site, str]
"""A site, and the name of a parameter or the path of an output."""


class RowIndex:
    """The number of the row of each site and path, the same in all steps of a recorder.

    Attributes
    ----------
    keys : list
        The site and path of each row.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._rows: dict[Key, int] = {}
        self._by_kind: tuple[int, dict[str, list[int]]] = 0, {}  # of the first rows
        self._lock = RLock()  # reentrant, because an exception can interrupt the release

    def row(self, site: Site, path: str) -> int:
        """Return the number of a row."""
        key = site, path
        row = self._rows.get(key)
        return self._new_row(key) if row is None else row

    def _new_row(self, key: Key) -> int:
        with self._lock:
            if key not in self._rows:
                self.keys.append(key)
                self._rows[key] = len(self.keys) - 1
            return self._rows[key]

    def rows_of_kind(self, kind: str) -> list[int]:
        """Return the rows of one kind in the order of their first measurement."""
        with self._lock:
            count, by_kind = len(self.keys), self._by_kind[1]
            if count > self._by_kind[0]:
                by_kind = {name: [*rows] for name, rows in by_kind.items()}
                for row in range(self._by_kind[0], count):
                    by_kind.setdefault(self.keys[row][0].kind, []).append(row)
                self._by_kind = count, by_kind  # at once, because an exception can interrupt the loop
            return by_kind.get(kind, [])

    def rows_of(self, kinds: frozenset[str]) -> Iterator[int]:
        """Yield the rows of some kinds."""
        return (row for row, (site, _) in enumerate(self.keys) if site.kind in kinds)


@dataclass(frozen=True, slots=True)
class Task:
    """Measurements of the tensors of one kind and module.

    Parameters
    ----------
    fields : frozenset of str
        The shared statistics that any subscriber needs.
    subscriptions : tuple of Registered
        The subscribers, in the order of registration.
    measurers : tuple of Registered
        Those of them that have a ``measure`` of their own; the others read the shared statistics.

    Attributes
    ----------
    is_plain : bool
        Whether only counts, sums and moments are needed, which one native kernel computes in one pass.
    """

    fields: frozenset[str]
    subscriptions: tuple[Registered, ...]
    measurers: tuple[Registered, ...]
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", not self.measurers and self.fields.isdisjoint(HISTOGRAMS))


class Plan:
    """Everything that is measured at one step; it depends only on the subscribers that sample the step.

    Parameters
    ----------
    subscriptions : tuple of Registered
        The subscribers that sample the step.
    results : frozenset of str
        The kinds that subscribers publish: ``weight_state_step_mean`` is no state of an optimizer.
    measuring : frozenset of Registered
        The subscribers that decide for each step whether they measure, and do at this one.
    sampled : frozenset of Registered, optional
        The subscribers that take events and results of the step; by default those that sample it.

    Attributes
    ----------
    takes_data : bool
        Whether any tensor is measured, rather than events and results alone.
    reports_parameters : bool
        Whether parameters are measured, and a subscriber takes ``batch_finished``, which has facts about them.
    counts_forwards : bool
        Whether it matters which forwards belong to the step: something is measured, or a subscriber wants to know whether it is skipped.
    of_loss : frozenset of str
        Which of ``loss`` and ``input_labels`` are wanted, alone or together with others.
    is_in_graph : bool
        Whether anything is measured inside the model, which a compiled graph has to do.
    forward_sites : tuple
        Equal for plans that measure what the same modules receive and return, and the same gradients of that.
    needs_losses_alone : bool
        Whether the loss is enough for all subscribers, see `Subscriber.compute_losses`, unless the step is one of their own.
    """

    def __init__(
        self,
        subscriptions: tuple[Registered, ...],
        results: frozenset[str] = frozenset(),
        measuring: frozenset[Registered] = frozenset(),
        sampled: frozenset[Registered] | None = None,
    ) -> None:
        self.subscriptions, self.measuring = subscriptions, measuring
        self.sampled = frozenset(subscriptions) if sampled is None else sampled
        self._tasks: dict[tuple[str, str | None], Task | None] = {}
        self._of_all_modules: dict[str, Task | None] = {}
        self._candidates: dict[str, list[Registered]] = {}
        self._shared: dict[tuple[str, tuple[Registered, ...]], Task] = {}
        kinds = {kind for s in subscriptions if not s.together for kind in s.kinds}
        self.kinds = frozenset(kinds)
        self.together = tuple(s for s in subscriptions if s.together)
        every = {kind for s in subscriptions for kind in s.kinds}
        self.of_loss = frozenset(every & {"loss", "input_labels"})
        self.forward = bool(kinds & set(FORWARD_KINDS))
        self.is_in_graph = self.forward or not kinds.isdisjoint(("input_data", "network_output"))
        self.forward_sites = tuple(map(self._modules_of, FORWARD_KINDS))
        self.states = tuple(sorted(kind for kind in kinds - results if kind.startswith(STATE_PREFIXES)))
        self.parameters = bool(kinds & set(PARAMETER_KINDS) or self.states)
        self.reports_parameters = self.parameters and "batch_finished" in kinds
        is_data = (is_built_in(kind) and kind not in (*EVENT_KINDS, LOGGED) for kind in kinds)
        self.takes_data = bool(self.together) or any(is_data)
        self.counts_forwards = self.takes_data or not kinds.isdisjoint(EVENT_KINDS)
        self.micro_gradients = bool(kinds & set(MICRO_KINDS))
        self.unclipped_gradients = bool(kinds & set(UNCLIPPED_KINDS))
        self.needs_losses_alone = all(s.takes_losses for s in subscriptions)

    def _modules_of(self, kind: str) -> frozenset[int] | None:
        """Return something that identifies the modules whose tensors of a kind are measured; ``None`` for all."""
        taking = [s for s in self.subscriptions if kind in s.kinds and _takes_data(s)]
        return None if any(s.subscription.modules is None for s in taking) else frozenset(map(id, taking))

    def task(self, kind: str, module: str | None) -> Task | None:
        """Return what to measure of the tensors of a kind and module; ``None`` for nothing."""
        if kind in self._of_all_modules:
            return self._of_all_modules[kind]
        try:
            return self._tasks[kind, module]
        except KeyError:
            task = self._make(kind, module)
            if all(s.subscription.modules is None for s in self._candidates.get(kind, ())):
                self._of_all_modules[kind] = task
            else:
                self._tasks[kind, module] = task
            return task

    def _make(self, kind: str, module: str | None) -> Task | None:
        """Return the task of a kind and module; modules with the same subscribers share one."""
        if kind not in self.kinds:
            return None
        if kind not in self._candidates:
            self._candidates[kind] = [s for s in self.subscriptions if kind in s.kinds and _takes_data(s)]
        wanting = tuple(s for s in self._candidates[kind] if module is None or s.matches(module))
        if not wanting:
            return None
        if (kind, wanting) not in self._shared:
            self._shared[kind, wanting] = _task(kind, wanting)
        return self._shared[kind, wanting]


def _takes_data(registered: Registered) -> bool:
    subscriber = registered.subscriber
    return not registered.together and bool(subscriber.measures or subscriber.fields)


def _task(kind: str, wanting: tuple[Registered, ...]) -> Task:
    asked = {field for s in wanting for field in s.subscriber.fields}
    if asked and kind == "loss":
        asked.add("mean")  # the losses of micro-batches are merged by their means
    fields = needed_fields(asked) if asked else frozenset[str]()
    if not asked.isdisjoint(("nans", "infs")):
        fields |= {EXACT_COUNTS}
    return Task(fields, wanting, tuple(s for s in wanting if _measures(s, kind)))


def _measures(registered: Registered, kind: str) -> bool:
    """Return whether a subscriber measures tensors of a kind itself."""
    kinds = registered.subscriber.measured_kinds
    return registered.subscriber.measures and (kinds is None or kind in kinds)


NOTHING = Plan(())
"""The plan while no step is open."""


_DISABLED = attrgetter("disabled")
_MOST_KEPT = 64


class _Bus(Protocol):
    """The bus of the subscribers."""

    registered: tuple[Registered, ...]
    sampling: Sampling


class Demand:
    """Caches the plan of each set of subscribers that sample a step together, and of what they measure.

    Parameters
    ----------
    bus : MessageBus
        The bus of the subscribers.
    """

    def __init__(self, bus: _Bus) -> None:
        self._bus = bus
        self.reset()

    def reset(self) -> None:
        """Forget all plans, because what is sampled has changed."""
        self._plans: dict[tuple[tuple[int, ...], frozenset[Registered]], Plan] = {}
        self._known: tuple[Registered, ...] = ()
        self._results: frozenset[str] = frozenset()
        self._last: tuple[Stamp, Plan] | None = None
        self._distance = self._first = 0
        self._varying = False
        self._regular_from: float = 0
        self._irregular: list[Registered] = []
        self._rhythms: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
        self._sampling: dict[tuple[bool, ...], tuple[Registered, ...]] = {}

    def steps_until_sample(self, step: int) -> float:
        """Return the least number of training steps from `step` on before one of which a subscriber may need more than the loss."""
        if step < self._first:
            return 0
        return min((s.steps_until_more(step) for s in self._known if not s.disabled), default=math.inf)

    def of(self, stamp: Stamp) -> Plan:
        """Return the plan of a step or of another pass."""
        subscriptions = self._bus.registered
        if subscriptions is not self._known and subscriptions != self._known:
            self._known, self._plans, self._last = subscriptions, {}, None
            self._results = frozenset(kind for s in subscriptions for kind in s.subscriber.publishes)
            self._distance = math.gcd(*(s.distance for s in subscriptions))
            self._first = max((s.subscription.first for s in subscriptions), default=0)
            self._varying = any(s.varies for s in subscriptions)
            self._regular_from = max((s.regular_from for s in subscriptions if s.regular_from < math.inf), default=0)
            self._irregular = [s for s in subscriptions if s.regular_from == math.inf]
            self._rhythms = tuple({(s.subscription.subsample, s.subscription.thinning) for s in subscriptions})
            self._sampling.clear()
        if (
            self._last is not None and self._last[0] == stamp and self._last[0].completes == stamp.completes
        ):  # a step is planned when the one before ends, and when it begins
            return self._last[1]
        steps = stamp.global_step, *(map(attrgetter("global_step"), stamp.completes))
        is_between = (
            stamp.pass_name == TRAINING
            and min(steps) >= self._first
            and self._distance
            and all(map(self._distance.__rmod__, steps))
        )
        sampling = self._bus.sampling  # the user, and unusual losses, may have changed what is sampled
        is_usual = not (sampling.is_changed or stamp.global_step in sampling.extra)
        is_regular = is_usual and stamp.pass_name == TRAINING and not stamp.completes
        chosen = () if is_between and is_usual else self._sampling_of(stamp, is_regular)
        varying = self._varying and [s for s in chosen if s.varies and s.subscriber.measures]
        measuring = frozenset(varying or ())
        key = tuple(map(id, chosen)), measuring
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = Plan(chosen, self._results, measuring)
        self._last = stamp, plan
        return plan

    def _sampling_of(self, stamp: Stamp, is_regular: bool) -> tuple[Registered, ...]:
        """Return the subscribers that sample a step; in a regular one, steps with the same divisors have the same."""
        step = stamp.global_step
        if not is_regular or step < self._regular_from:
            return tuple([registered for registered in self._known if registered.samples(stamp)])
        bits: list[bool] = [*map(_DISABLED, self._known)]
        for registered in self._irregular:
            bits.append(registered.samples(stamp))
        for subsample, stages in self._rhythms:
            bits.append(not step % subsample)
            for begin, factor in stages:
                bits += step < begin, not step % (subsample * factor)
        key = tuple(bits)
        if (found := self._sampling.get(key)) is None:
            if len(self._sampling) >= _MOST_KEPT:
                self._sampling.clear()
            found = self._sampling[key] = tuple([each for each in self._known if each.samples(stamp)])
        return found


_FEW = 16


class Selection:
    """Some rows of one kind, and the names of their messages.

    Parameters
    ----------
    kind : str
        The kind.
    rows : array of int
        The numbers of the rows, in increasing order.
    names : BatchNames
        The modules and paths of the rows.

    Attributes
    ----------
    places : slice or array of int
        The same rows as an index of a table; a slice copies nothing.
    """

    def __init__(self, kind: str, rows: NDArray[np.intp], names: BatchNames) -> None:
        self.kind, self.rows, self.names = kind, rows, names
        first, last = (int(rows[0]), int(rows[-1])) if len(rows) else (0, -1)
        step = int(rows[1]) - first if len(rows) > 1 else 1
        is_regular = np.array_equal(rows, np.arange(first, last + 1, step))
        self.places: slice | NDArray[np.intp] = slice(first, last + 1, step) if is_regular else rows
        self._parts: dict[bytes, Selection] = {}

    def measured(self, is_measured: NDArray[np.bool_]) -> "Selection | None":
        """Return those of the rows that were measured in a step; ``None`` if there are none."""
        if len(is_measured) <= self.rows[-1]:  # another thread has met new modules since the step
            is_measured = np.append(is_measured, np.zeros(int(self.rows[-1]) + 1 - len(is_measured), np.bool_))
        mask = is_measured[self.rows]
        if mask.all():
            return self
        if not mask.any():
            return None
        key = mask.tobytes()
        if key not in self._parts:
            if len(self._parts) >= _FEW:  # the modules that are called change from step to step
                self._parts.clear()
            positions = np.flatnonzero(mask)
            self._parts[key] = Selection(self.kind, self.rows[positions], self.names.select(positions))
        return self._parts[key]


class MeasuredRows:
    """The rows that were measured in a step; steps that measure the same rows share what is computed here.

    Parameters
    ----------
    selections : Selections
        The rows that each subscriber takes.
    is_measured : array of bool
        Whether each row was measured.
    """

    def __init__(self, selections: "Selections", is_measured: NDArray[np.bool_]) -> None:
        self.is_measured = is_measured
        self._selections = selections
        self._shared: WeakKeyDictionary[Plan, list[tuple[Registered, tuple[Selection, ...]]]] = WeakKeyDictionary()

    def shared(self, plan: Plan) -> "list[tuple[Registered, tuple[Selection, ...]]]":
        """Return those of the rows that each subscriber takes, if it reads shared statistics alone, and one kind after the other."""
        if (found := self._shared.get(plan)) is None:
            plain = (r for r in plan.subscriptions if r.fields and not (r.together or r.takes_steps or r.measures))
            found = self._shared[plan] = [(registered, self.of(registered)) for registered in plain]
        return found

    def of(self, registered: Registered) -> tuple[Selection, ...]:
        """Return those of the rows that a subscriber takes, those of each of its kinds together."""
        known, found = registered.measured
        if known is not self:
            some = (selection.measured(self.is_measured) for selection in self._selections.of(registered))
            found = tuple(selection for selection in some if selection is not None)
            registered.measured = self, found
        return found


class Selections:
    """The rows that each subscriber takes; equal ones are one object, so that what is computed of them is shared.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._count = 0
        self._of: WeakKeyDictionary[Registered, tuple[Selection, ...]] = WeakKeyDictionary()
        self._equal: dict[tuple[str, bytes], Selection] = {}
        self._measured = MeasuredRows(self, np.zeros(0, np.bool_))

    def measured(self, is_measured: NDArray[np.bool_]) -> MeasuredRows:
        """Return the measured rows of a step, the same object as for the last step if they are the same."""
        if is_measured.tobytes() != self._measured.is_measured.tobytes():
            self._measured = MeasuredRows(self, is_measured)
        return self._measured

    def of(self, registered: Registered) -> tuple[Selection, ...]:
        """Return the rows that a subscriber takes, those of each of its kinds together."""
        if self._count != len(self._index.keys):
            self._count = len(self._index.keys)
            self._of.clear()
            self._equal.clear()
        if (found := self._of.get(registered)) is None:
            made = (self._make(registered, kind) for kind in registered.kinds)
            found = self._of[registered] = tuple(selection for selection in made if len(selection.rows))
        return found

    def _make(self, registered: Registered, kind: str) -> Selection:
        keys, matches = self._index.keys, registered.matches
        rows = np.array(
            [
                row
                for row in self._index.rows_of_kind(kind)
                if (module := keys[row][0].module) is None or matches(module)
            ],
            np.intp,
        )
        key = kind, rows.tobytes()
        if key not in self._equal:
            self._equal[key] = Selection(kind, rows, self._names(kind, rows.tolist()))
        return self._equal[key]

    def _names(self, kind: str, rows: list[int]) -> BatchNames:
        places = [(site.module, path) for site, path in (self._index.keys[row] for row in rows)]
        names = (path or None if module is None else message_name(kind, module, path) for module, path in places)
        return BatchNames(tuple(module for module, _ in places), tuple(path for _, path in places), tuple(names))


class WantedRows:
    """For each plan an array with one number for each row: what the kernels measure of it, `NOTHING` or `PYTHON`.

    Native functions measure the first tensors of what modules receive and return, their gradients, and the gradients of parameters
    of one micro-batch, if a plan wants shared statistics alone.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._of: WeakKeyDictionary[Plan, NDArray[np.int32]] = WeakKeyDictionary()

    def of(self, plan: Plan) -> NDArray[np.int32]:
        """Return the array of a plan; it is another one after the index has grown."""
        known, keys = self._of.get(plan), self._index.keys
        if known is None or len(known) != len(keys):
            known = np.zeros(0, np.int32) if known is None else known
            more = [_wanted(plan, key) for key in keys[len(known) :]]
            known = self._of[plan] = np.concatenate([known, np.array(more, np.int32)])
        return known


def _wanted(plan: Plan, key: Key) -> int:
    site, path = key
    if site.kind not in MICRO_KINDS and (path or site.kind not in FORWARD_KINDS):
        return PYTHON
    task = plan.task(site.kind, site.module)
    if task is None:
        return NOT_MEASURED
    return flags_of(task.fields) if task.is_plain else PYTHON
