"""Merges the measurements of all ranks."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikkuna.distributed import rendezvous
from ikkuna.distributed.block import OWN, Gather, Key, Layouts, RankBlock, RankRows, build
from ikkuna.distributed.dtensor import ShardPosition, data_parallel_size, is_run_together, model_parallel_group
from ikkuna.distributed.merge import Alignments, MergedRows, merge_blocks
from ikkuna.distributed.rendezvous import World
from ikkuna.distributed.replicas import FlatUnits, ParameterKey, Replicas
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.numerics.statistics.table import Values, empty_rows
from ikkuna.observation.model.parameters import TrackedParameters
from ikkuna.observation.model.watched_model import WatchedModel
from ikkuna.observation.rows.plan import Plan, Site
from ikkuna.observation.rows.rows import Rows
from ikkuna.support.failures import log, raise_users_exception, suppressed
from ikkuna.support.torch_internals import is_in_join

_PLAIN = (bool, int, float, str, type(None))
_SHOWN_ONLY = frozenset(("title", "ylims", "backends", "message_bus", "evaluate"))
_TOGETHER = "measured together: "
_NO_FIELDS = frozenset[str]()


def signature_of(subscriptions: Iterable[Registered]) -> list[str]:
    """Return a line per subscriber that names all its measurements depend on; equal on ranks that measure the same."""
    lines = [_describe(s) for s in subscriptions]
    seen: Counter[str] = Counter()
    for i, line in enumerate(lines):
        seen[line] += 1
        if seen[line] > 1:
            lines[i] = f"{line} (the {seen[line]}th)"
    return lines


def _describe(registered: Registered) -> str:
    subscriber = registered.subscriber
    known = {name: value for name, value in sorted(vars(subscriber).items()) if name not in _SHOWN_ONLY}
    arguments = {name: value for name, value in known.items() if not name.startswith("_") and _is_plain(value)}
    wish = registered.subscription
    arguments |= {
        "subsample": wish.subsample,
        "thinning": wish.thinning,
        "tag": wish.tag,
        "modules": _named(wish.modules),
    }
    limits = {"start": wish.start or None, "stop": wish.stop, "schedule": _named(wish.schedule)}
    arguments |= {name: value for name, value in limits.items() if value is not None}
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{type(subscriber).__name__}({', '.join(registered.kinds)}; {shown})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _named(modules: Any) -> Any:
    """Return a choice of modules as text; for a function its name, which is equal on all ranks."""
    return getattr(modules, "__qualname__", "a function") if callable(modules) else modules


class Translation:
    """Translates the measurements of a step to keys that are equal on all ranks, and back.

    Parameters
    ----------
    bus : MessageBus
        The bus of the subscribers.
    site : callable
        Returns the site of a kind and module.
    """

    def __init__(self, bus: MessageBus, site: Callable[[str, str | None], Site]) -> None:
        self._bus = bus
        self._site = site
        self._named: tuple[Registered, ...] = ()
        self._name_of: dict[Registered, str] = {}
        self._by_name: dict[str, Registered] = {}
        self._warned = set[Registered]()

    def _refresh(self) -> None:
        if self._bus.registered != self._named:
            self._named = self._bus.registered
            names = signature_of(self._named)
            self._name_of = dict(zip(self._named, names, strict=True))
            self._by_name = dict(zip(names, self._named, strict=True))

    def to_ranks(self, rows: Rows, replicas: "_ReplicaNumbers", positions: Mapping[ParameterKey, int]) -> RankRows:
        """Return the measurements of this rank; `positions` are the shards of parameters that are no DTensors."""
        self._refresh()
        numbers = rows.measured_rows()
        sites = [rows.index.keys[row] for row in numbers]
        flat = [positions.get(_parameter_key(*site)) if _is_of_parameter(site[0].kind) else None for site in sites]
        parts = [
            self._part(site.kind, rows.shards.get(row)) if position is None else position
            for row, (site, _), position in zip(numbers, sites, flat, strict=True)
        ]
        own = [
            (
                i,
                name,
                s.subscriber.merge,
                self._own_part(s, rows, row, parts[i], replicas),
                value if flat[i] is None or not s.subscriber.needs_whole else self._unknown(s, value),
            )
            for i, row in enumerate(numbers)
            for s, value in rows.measured.get(row, {}).items()
            if (name := self._name_of.get(s)) is not None
        ]
        together = [(s, name, value) for s, value in rows.together.items() if (name := self._name_of.get(s))]
        own += [(i, name, s.subscriber.merge, OWN, value) for i, (s, name, value) in enumerate(together, len(numbers))]
        return RankRows(
            [(site.kind, site.module, path) for site, path in sites]
            + [(s.kinds[0], None, _TOGETHER + name) for s, name, _ in together],
            parts + [OWN] * len(together),
            [rows.fields(row) for row in numbers] + [_NO_FIELDS] * len(together),
            np.concatenate([rows.values[numbers], empty_rows(len(together))]),
            {i: rows.codes[row] for i, row in enumerate(numbers) if row in rows.codes},
            {i: rows.reductions[row] for i, row in enumerate(numbers) if row in rows.reductions},
            own,
        )

    def _unknown(self, registered: Registered, value: Values) -> Values:
        """Return NaN in place of what was measured on a slice of a parameter of FSDP1, which has no shape."""
        if registered not in self._warned:
            self._warned.add(registered)
            text = (
                "%r needs full tensors, but FSDP1 gives each rank a slice of each parameter: it publishes NaN for them"
            )
            log.warning(text, registered.subscriber)
        return np.full_like(value, np.nan)

    @staticmethod
    def _own_part(registered: Registered, rows: Rows, row: int, part: int, replicas: "_ReplicaNumbers") -> int:
        """Return the part of the whole that a result of a subscriber's own ``measure`` is of."""
        if registered.subscriber.merge == "ranks":
            return replicas.of(*rows.index.keys[row])
        return 0 if row in rows.shards and registered.subscriber.needs_whole else part

    @staticmethod
    def _part(kind: str, shard: ShardPosition | None) -> int:
        """Return the part of the whole that this rank has: all ranks have the same parameters, but each has its own data."""
        if shard is None:
            return 0 if _is_of_parameter(kind) else OWN
        return shard.number if _is_of_parameter(kind) else shard.data_number

    def keys_per_rank(self, rows: Rows) -> frozenset[Key]:
        """Return the keys of which a subscriber needs the records of each rank."""
        return frozenset(
            (site.kind, site.module, path)
            for site, path in map(rows.index.keys.__getitem__, rows.measured_rows())
            if (task := rows.plan.task(site.kind, site.module)) is not None
            and any(s.subscriber.per_rank for s in task.subscriptions)
        )

    def from_ranks(self, rows: Rows, merged: MergedRows) -> None:
        """Replace the measurements of this rank by those of all ranks, such as modules of other stages of a pipeline."""
        self._refresh()
        row_of: dict[int, int] = {}
        together: dict[Registered, Any] = {}
        measured: dict[int, dict[Registered, Any]] = {}
        for i, (kind, module, path) in enumerate(merged.keys):
            named = ((self._by_name.get(name), value) for name, value in merged.own.get(i, {}).items())
            results = {s: value for s, value in named if s is not None}
            if path.startswith(_TOGETHER):
                together.update(results)
            elif rows.plan.task(kind, module) is not None:
                row = rows.index.row(self._site(kind, module), path)
                row_of[i] = row
                if results:
                    measured[row] = results
        rows.values = empty_rows(len(rows.index.keys))
        rows.values[list(row_of.values())] = merged.values[list(row_of)]
        rows.codes = {row_of[i]: codes for i, codes in merged.codes.items() if i in row_of}
        rows.reductions = {row_of[i]: reduction for i, reduction in merged.reductions.items() if i in row_of}
        rows.ranks = {row_of[i]: ranks for i, ranks in merged.ranks.items() if i in row_of}
        rows.measured, rows.together = measured, together


WAITING = 64
"""Number of steps that may wait for other ranks; the measurements of further steps are dropped."""

_CLOSING = 2.0
_LONG = 3600.0
_NOTHING = RankRows((), (), (), empty_rows(0))


class Exchange:
    """Gathers the rows of each sampled step from all ranks, one gather at a time.

    The ranks meet at the end of the first step, or before if a tensor needs a collective.
    They do not meet in the first forward, because the stages of a pipeline wait for each other there.
    After that every rank issues the same sequence of gathers, and no rank waits for another:
    at each step boundary it checks whether the oldest gather is complete, delivers it and begins the next one.
    If the oldest steps of the ranks differ (because one rank evaluates alone, for example), the gathered stamps show that:
    the ranks that are behind deliver first, and the others send theirs again.

    After any failure this rank continues with its own measurements, and logs one ERROR.

    Parameters
    ----------
    bus : MessageBus
        The bus of the subscribers.
    site : callable
        Returns the site of a kind and module.
    model : WatchedModel
        Its roots are the modules whose calls are forwards of the model.
    parameters : TrackedParameters
        Its parameters.

    Attributes
    ----------
    replicas : int
        Number of ranks over which gradients are averaged.
    dropped : int
        Number of measurements that were dropped because other ranks were too far behind.
    world : World or None
        The processes that train together; ``None`` before the ranks have met.
    gather : Gather or None
        Gathers the rows of all ranks; ``None`` if measurements are not merged.
    """

    def __init__(
        self,
        bus: MessageBus,
        site: Callable[[str, str | None], Site],
        model: WatchedModel,
        parameters: TrackedParameters,
    ) -> None:
        self._bus = bus
        self._model = model
        self._parameters = parameters
        self._replicas: tuple[object, Replicas] | None = None
        self._flat: tuple[object, FlatUnits] = None, FlatUnits(())
        self._translation = Translation(bus, site)
        self.world: World | None = None
        self._agreement: rendezvous.Agreement | None = None
        self.gather: Gather | None = None
        self._layouts = Layouts()
        self._alignments = Alignments()
        self._group = 0
        self._is_uneven = False
        self.first_step: int | None = None
        self._waiting: list[_WaitingStep] = []
        self._deadline: float | None = None
        self.replicas = 1
        self.dropped = 0

    @property
    def is_shared(self) -> bool:
        """Return whether measurements are merged with other ranks."""
        return self.gather is not None

    # -- when a step begins and ends ------------------------------------------------------------------------------

    def step_opened(self, stamp: Stamp) -> None:
        """Update `replicas`, and store the first step."""
        if self.first_step is None:
            self.first_step = stamp.global_step
        if (world := World.here()).size > 1:
            if self._flat[0] is not self._parameters.all:
                self._flat = self._parameters.all, FlatUnits(self._parameters.all)
            sizes = (data_parallel_size(root) for root in self._model.callable)
            self.replicas = max(self._flat[1].data_parallel_size, *sizes)
            if self.world is None:
                self._bus.is_silent = world.rank != 0
            self._is_uneven = self._is_uneven or is_in_join()

    def meet(self) -> bool:
        """Meet the other ranks, waiting for them, unless that was done; return whether measurements are shared."""
        if self._is_uneven and (self.world is None or self.gather is not None):
            self.world = World.here()
            self._end_gather()
            self._go_alone("in join() each rank counts its own batches, so that a step of one is not that of another")
        if self.world is None:
            self.world = World.here()
            if self.world.size > 1:
                self._meet(self.world)
        return self.gather is not None

    def take(self, rows: Rows, plan: Plan) -> None:
        """Schedule the merge of the rows of a step with those of other ranks, if there are any."""
        if not self.meet() or not plan.takes_data:
            return
        step = _WaitingStep(self, rows.stamp, self._replica_numbers(plan))
        if len(self._waiting) >= WAITING:
            self._drop(rows)
            step.lost = True
        rows.rank_merge = step
        self._waiting.append(step)

    def _replica_numbers(self, plan: Plan) -> "_ReplicaNumbers":
        """Return which ranks hold the same as this one; the gradients are those of the step that ends."""
        if not any(s.subscriber.merge == "ranks" for s in plan.subscriptions):
            return _UNKNOWN
        try:
            if self._replicas is None or self._replicas[0] is not self._parameters.all:
                self._replicas = self._parameters.all, Replicas(self._parameters.all)
            return _ReplicaNumbers(self._replicas[1].numbers, self._replicas[1].of_gradients())
        except Exception as error:  # such as of a process group that was destroyed
            self._bus.error_guard.report_internal("finding the replicas of parameters", error)
            return _UNKNOWN

    def _drop(self, rows: Rows) -> None:
        if not self.dropped:
            log.error(
                "other ranks are %d steps behind; from step %d on measurements are dropped until they catch up",
                *(WAITING, rows.stamp.global_step),
            )
        self.dropped += rows.discard()

    def _meet(self, world: World) -> None:
        self._bus.is_silent = world.rank != 0
        stages = self._model.names_by_stage()
        # rules are chosen for the modules of a stage, and measure some of these
        of_stage = (s for s in self._bus.registered if s.subscriber.derived or isinstance(s.subscription.modules, list))
        chosen = frozenset(of_stage if stages else ())
        compared = [s for s in self._bus.registered if s not in chosen]
        try:
            self._agreement, group = rendezvous.agree(world, signature_of(compared), stages, self.first_step or 0)
            self._group = min(
                (model_parallel_group(root, world.rank) for root in self._model.callable), default=world.rank
            )
        except Exception as error:
            raise_users_exception(error)
            self._go_alone(f"the rendezvous failed: {error}")
            return
        if group is None:
            self._bus.is_silent = world.rank != min(self._agreement.present)
            self._go_alone(self._agreement.reason)
        else:
            self.gather = Gather(group, world.size)

    def must_wait(self, stamp: Stamp | None) -> bool:
        """Return whether to wait for delivery now, because a subscriber calls the model, or may stop the training.

        All ranks must do so at the end of the same step, because the model and the training communicate with other ranks.

        Parameters
        ----------
        stamp : Stamp or None
            The finished step, or ``None`` for a finished epoch.
        """
        if self.gather is None:
            return False
        if stamp is not None and stamp.pass_name == TRAINING and any(s.subscriber.stops for s in self._bus.registered):
            return True
        calling = (s for s in self._bus.registered if s.subscriber.needs_model and not s.disabled)
        if stamp is None:
            return any("epoch_finished" in s.kinds for s in calling)
        return any(s.samples(stamp) and any(not kind.startswith("epoch") for kind in s.kinds) for s in calling)

    # -- while a step waits ---------------------------------------------------------------------------------------

    def poll(self, step: "_WaitingStep", rows: Rows, patience: float = 0.0) -> bool:
        """Return whether the rows of all ranks have arrived, or cannot arrive any more; wait for at most `patience` seconds."""
        try:
            while step.blocks is None and self.gather is not None:
                if self.gather.is_idle:
                    self.gather.begin(step.payload(rows))
                if (payloads := self.gather.poll(self._patience(patience))) is None:
                    if not patience:
                        return False
                    raise TimeoutError("the other ranks did not send their measurements in time")
                self._unpack(step, payloads)
        except Exception as error:
            raise_users_exception(error)
            self._disconnect(error)
        return True

    def _patience(self, patience: float) -> float:
        return patience if self._deadline is None else max(0.01, min(patience, self._deadline - time.monotonic()))

    def _unpack(self, step: "_WaitingStep", payloads: list[memoryview]) -> None:
        blocks = [RankBlock.unpack(rank, payload, self._layouts) for rank, payload in enumerate(payloads)]
        first = min(_order(block.stamp) for block in blocks)
        if _order(step.stamp) == first:
            step.blocks = [block for block in blocks if _order(block.stamp) == first]

    def merge_into(self, step: "_WaitingStep", rows: Rows) -> None:
        """Replace the measurements of this rank by those of all ranks, waiting if necessary."""
        rows.load()
        self.poll(step, rows, _LONG)
        self._waiting.remove(step)
        if step.blocks is None:
            return
        try:
            if any(block.lost for block in step.blocks):
                self.dropped += rows.discard()
                return
            per_rank = self._translation.keys_per_rank(rows)
            self._translation.from_ranks(rows, merge_blocks(step.blocks, self._alignments, per_rank))
            rows.skipped = any(block.skipped for block in step.blocks)
        except Exception as error:
            self._bus.error_guard.report_internal("merging the measurements of all ranks", error)

    def forget(self, step: "_WaitingStep") -> None:
        """Wait no longer for the rows of a step."""
        if step in self._waiting:
            self._waiting.remove(step)

    def pack(self, rows: Rows, is_lost: bool, replicas: "_ReplicaNumbers") -> bytes:
        """Return the measurements of this rank as bytes."""
        # Ranks may run another pass over the same data, or each over its own; replicas are found by their equal numbers.
        group = self._group if rows.stamp.pass_name == "training" else 0
        own = _NOTHING if is_lost else self._translation.to_ranks(rows, replicas, self._flat[1].positions)
        return build(_stamp(rows.stamp), own, group, self._layouts, rows.skipped, is_lost).pack(self._layouts)

    # -- without the other ranks -----------------------------------------------------------------------------------

    def _disconnect(self, error: Exception) -> None:
        self._end_gather()
        missing: list[int] = []
        if self._agreement is not None and self.world is not None and self._deadline is None:
            with suppressed(Exception):  # the rank that died may have kept the store
                missing = rendezvous.missing_ranks(self._agreement.store, self.world)
        who = f"rank {', '.join(map(str, missing))} does not answer; " if missing else ""
        self._go_alone(f"{who}{error}")

    def _go_alone(self, reason: str) -> None:
        rank = self.world.rank if self.world is not None else 0
        with suppressed(Exception):  # a logging handler may fail
            log.error("training on several ranks: %s. From here on values are those of rank %d alone", reason, rank)
        if any(map(is_run_together, self._model.callable)):
            for registered in self._bus.registered:
                if registered.subscriber.needs_model:
                    self._bus.error_guard.disable(registered, "the model cannot run without the ranks that were lost")

    def _end_gather(self) -> None:
        gather, self.gather = self.gather, None
        if gather is not None:
            gather.close()

    def prepare_close(self) -> None:
        """Limit the total time that remaining steps wait for other ranks to 2 seconds."""
        self._deadline = time.monotonic() + _CLOSING

    def close(self) -> None:
        """Close the connection to the other ranks."""
        self._end_gather()


@dataclass(frozen=True, slots=True)
class _ReplicaNumbers:
    """The lowest of the ranks that must hold the same as this one, by parameter: of weights and states, and of gradients."""

    weights: Mapping[ParameterKey, int]
    gradients: Mapping[ParameterKey, int]

    def of(self, site: Site, path: str) -> int:
        """Return the number for a kind of tensor of a parameter."""
        if not _is_of_parameter(site.kind):
            return OWN
        numbers = self.gradients if "_gradients" in site.kind else self.weights
        return numbers.get(_parameter_key(site, path), OWN)


def _is_of_parameter(kind: str) -> bool:
    return kind in PARAMETER_KINDS or kind.startswith(STATE_PREFIXES)


def _parameter_key(site: Site, path: str) -> ParameterKey:
    return site.module or "", path, site.kind.startswith("bias")


_UNKNOWN = _ReplicaNumbers({}, {})


class _WaitingStep:
    """A step that waits for the measurements of other ranks; see `RankMerge`."""

    def __init__(self, exchange: Exchange, stamp: Stamp, replicas: "_ReplicaNumbers") -> None:
        self._exchange = exchange
        self._replicas = replicas
        self._payload: bytes | None = None
        self.stamp = _stamp(stamp)
        self.lost = False
        self.blocks: list[RankBlock] | None = None

    def payload(self, rows: Rows) -> bytes:
        if self._payload is None:
            rows.load()
            self._payload = self._exchange.pack(rows, self.lost, self._replicas)
        return self._payload

    def arrived(self, rows: Rows) -> bool:
        return self._exchange.poll(self, rows)

    def merge_into(self, rows: Rows) -> None:
        self._exchange.merge_into(self, rows)

    def abandon(self) -> None:
        self._exchange.forget(self)


def _stamp(stamp: Stamp) -> tuple[int, int, int, str]:
    return stamp.global_step, stamp.train_step, stamp.epoch, stamp.pass_name


def _order(stamp: tuple[int, int, int, str]) -> tuple[bool, int, str]:
    """Return a key that orders steps.

    Other passes come first: a rank without them waits with a training step that the other ranks have yet to make.
    Epochs are ignored, because many scripts mark their end on rank 0 only.
    """
    return stamp[3] == "training", stamp[0], stamp[3]
