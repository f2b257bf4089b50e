"""Keeps the last steps of an exporter, and writes them to a dump when something goes wrong."""

import copy
import math
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.diagnosis.judge import Judge
from ikkuna.distributed.rendezvous import World
from ikkuna.flight_recorder.dump_writing import DumpContent, DumpJob, DumpWriter
from ikkuna.flight_recorder.options import MemoryBudget, RecorderOptions
from ikkuna.flight_recorder.recorded_steps import RecordedSteps, measured_columns, names_of, rule_facts, worst_row
from ikkuna.metrics.bus.bus import Handle, MessageBus
from ikkuna.metrics.bus.delivery import StepObserver
from ikkuna.metrics.messages.batch import StepLosses
from ikkuna.metrics.messages.kinds import FORWARD_KINDS
from ikkuna.metrics.messages.message import Message, NetworkMessage
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.spike_score import LIMIT, SpikeScore
from ikkuna.numerics.statistics import FIELDS
from ikkuna.numerics.statistics.record import HISTOGRAMS
from ikkuna.numerics.statistics.table import COLUMN, Values
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.rows import Rows
from ikkuna.printable import listed
from ikkuna.store.finding import SEVERITIES, Finding
from ikkuna.support.failures import error_text, log, suppressed

OF_RULE, OF_JUMP, NOT_FINITE, AT_END = range(4)
"""The importance of a dump: because of a finding, a jump of the loss, the first NaN or Inf, or the end of the process."""

_NANS, _INFS = COLUMN["nans"], COLUMN["infs"]  # these columns are neighbours
_NONE = np.zeros(0, np.int64)


class NonFiniteTrigger:
    """Finds rows that contain NaN or Inf, and did not when they were measured before.

    Infinities that a network uses from its first step on, such as those of an attention mask, raise no alarm.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.table import row_of
    >>> trigger = NonFiniteTrigger()
    >>> good, bad = np.stack([row_of(1.0), row_of(2.0)]), np.stack([row_of(1.0), row_of(np.nan)])
    >>> [trigger.update(table).tolist() for table in (good, good, bad, bad)]
    [[], [], [1], []]
    """

    def __init__(self) -> None:
        self._was_bad = np.zeros(0, np.bool_)
        self._is_known = np.zeros(0, np.bool_)
        self._any_was_bad = False

    def update(self, values: Values) -> NDArray[np.int64]:
        """Return the numbers of the rows that have become non-finite.

        Parameters
        ----------
        values : array
            ``(rows, columns)``
        """
        count = len(values)
        if count > len(self._is_known):
            more = np.zeros(count - len(self._is_known), np.bool_)
            self._was_bad, self._is_known = np.append(self._was_bad, more), np.append(self._is_known, more)
        measured = values[:, 0] > 0
        if not self._any_was_bad and not np.count_nonzero(values[:, _NANS : _INFS + 1]):
            self._is_known[:count] |= measured
            return _NONE
        bad = (values[:, _NANS] + values[:, _INFS]) > 0
        is_new = bad & self._is_known[:count] & ~self._was_bad[:count]
        self._is_known[:count] |= measured
        self._was_bad[:count] = np.where(measured, bad, self._was_bad[:count])
        self._any_was_bad = bool(self._was_bad.any())
        return np.flatnonzero(is_new)


class CoolDown:
    """Decides whether an automatic dump is written, so that a run that is broken does not write dumps for ever.

    A dump that could not be written does not count.  One more dump than `limit` is kept for the end of the process.
    Dumps of findings and of jumps of the loss do not delay each other, and neither delays that of NaN or Inf, which end most trainings.

    Parameters
    ----------
    steps : int
        Number of steps after a dump without another one; a tenth of it after a failure.
    limit : int
        Number of dumps of a run.

    Examples
    --------
    >>> def written(cool_down, *events):
    ...     return [step for step, *reasons in events if cool_down.allows(step, reasons) and not cool_down.add(step, reasons)]
    >>> written(CoolDown(steps=100, limit=2), (10, 0), (50, 0), (150, 0), (300, 0), (301, AT_END), (500, AT_END))
    [10, 150, 301]
    >>> written(CoolDown(steps=100, limit=2), (10, 0), (11, 1), (12, 1))
    [10, 11]
    >>> written(CoolDown(steps=100, limit=3), (10, OF_RULE), (11, OF_JUMP, OF_RULE), (12, OF_RULE), (13, OF_JUMP))
    [10, 11]
    >>> written(CoolDown(steps=100, limit=3), (10, OF_RULE), (11, NOT_FINITE), (12, OF_RULE), (13, NOT_FINITE), (111, NOT_FINITE))
    [10, 11, 111]
    """

    def __init__(self, steps: int, limit: int) -> None:
        self._steps, self._limit = steps, limit
        self._dumps: list[tuple[int, Collection[int], Callable[[], bool]]] = []
        self._retry = 0

    @property
    def is_used_up(self) -> bool:
        """Whether as many dumps are written as a run may have."""
        return len(self._dumps) >= self._limit

    def allows(self, step: int, importances: Collection[int] = (OF_RULE,)) -> bool:
        """Return whether a dump may be written now.

        Parameters
        ----------
        step : int
            The step.
        importances : collection of int
            Those of its reasons, of which one must be allowed.  It is not if a recent dump has the same importance, or one that is
            higher than this and than that of a jump.  `AT_END` may use the dump that is kept.
        """
        failed = [dump for dump in self._dumps if dump[2]()]
        if failed:
            self._dumps = [dump for dump in self._dumps if dump not in failed]
            self._retry = failed[-1][0] + self._steps // 10
        is_end = AT_END in importances
        if len(self._dumps) >= self._limit + (is_end and self._limit > 0):
            return False
        recent = {each for last, its, _ in self._dumps if 0 <= step - last < self._steps for each in its}
        highest = max(recent, default=OF_RULE)
        if not any(each not in recent and highest <= max(each, OF_JUMP) for each in importances):
            return False
        return is_end or step >= self._retry

    def add(
        self, step: int, importances: Collection[int] = (OF_RULE,), has_failed: Callable[[], bool] = lambda: False
    ) -> None:
        """Count a dump; `has_failed` returns whether it could not be written."""
        self._dumps.append((step, importances, has_failed))


_OF_PARAMETERS = tuple(
    f"{kind}{what}" for kind in ("weight", "bias") for what in (("s", "es")[kind == "bias"], "_gradients", "_updates")
)


class BurstSubscriber(Subscriber):
    """Requests statistics at every step; it shows nothing.

    Takes the kinds of modules; publishes nothing.

    Parameters
    ----------
    in_modules : bool
        Whether also activations, inputs and gradients of modules are measured.
    sees_loss : bool
        Whether the module that computes the loss is known.
    histograms_of : sequence of str, optional
        Request exact histograms of these modules, and nothing else.
    """

    fields = tuple(name for name in FIELDS if name not in HISTOGRAMS)

    def __init__(
        self, in_modules: bool = True, sees_loss: bool = False, histograms_of: Sequence[str] | None = None
    ) -> None:
        kinds = [*_OF_PARAMETERS, *(FORWARD_KINDS if in_modules else ()), *(("loss",) if sees_loss else ())]
        chosen = None if histograms_of is None else frozenset(histograms_of).__contains__
        super().__init__(kinds, backend="null", modules=chosen)
        if histograms_of is not None:
            self.fields = ("codes",)

    def compute(self, message: Message) -> None:
        """Do nothing: the rows are kept as a whole."""


class Burst:
    """Collects the rows of the next steps, then passes them on.

    Parameters
    ----------
    bus : MessageBus
        The bus, on which the subscribers are registered until the burst is over.
    subscribers : sequence of BurstSubscriber
        Request what is measured; the first one is registered at each step of the burst.
    steps : int
        Number of steps.
    max_bytes : int
        The largest size of what is kept; later histograms are left out, and the burst ends earlier.
    finish : callable
        Called once with the arrays of ``burst.npz``.
    """

    def __init__(
        self,
        bus: MessageBus,
        subscribers: Sequence[BurstSubscriber],
        steps: int,
        max_bytes: int,
        finish: Callable[[dict[str, NDArray[Any]]], None],
    ) -> None:
        self._steps, self._left = steps, max_bytes
        self._finish = finish
        self._kept: list[tuple[int, Any, NDArray[np.float64], dict[int, Any]]] = []
        self._keys: Any = ()
        self._handles: list[Handle] = []
        self._subscriber = subscribers[0]
        try:
            for subscriber in subscribers:
                self._handles.append(bus.register_subscriber(subscriber))
        except BaseException:
            for handle in self._handles:
                handle.remove()
            raise

    @property
    def is_over(self) -> bool:
        """Whether all steps were collected."""
        return not self._handles

    def add(self, rows: Rows) -> None:
        """Keep the rows of a step that was measured for the burst."""
        if not self._handles or not any(r.subscriber is self._subscriber for r in rows.plan.subscriptions):
            return
        codes = {}
        for row, found in rows.codes.items():
            if "codes" in found and self._left > 0:
                codes[row] = _sparse(found["codes"])
                self._left -= sum(array.nbytes for array in codes[row])
        self._left -= rows.values.nbytes
        self._kept.append((rows.stamp.global_step, rows.plan, rows.values, codes))
        self._keys = rows.index.keys
        if len(self._kept) >= self._steps or self._left <= rows.values.nbytes:
            self.end()

    def end(self) -> None:
        """Remove the subscriber, and pass on what was collected; a second call does nothing."""
        handles, self._handles = self._handles, []
        if not handles:
            return
        for handle in handles:
            handle.remove()
        kept, self._kept = self._kept, []
        if kept:
            self._finish(_arrays(kept, list(self._keys)))


def _sparse(counts: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    used = np.flatnonzero(counts)
    largest = int(counts.max(initial=0))
    return used.astype(np.int32), counts[used].astype(np.int32 if largest < 1 << 31 else np.int64)


def _arrays(
    kept: list[tuple[int, Any, NDArray[np.float64], dict[int, Any]]], keys: list[Any]
) -> dict[str, NDArray[Any]]:
    rows = max(len(values) for _, _, values, _ in kept)
    table = np.full((len(kept), rows, kept[0][2].shape[1]), np.nan)
    histograms: list[NDArray[Any]] = []
    for i, (_, plan, values, codes) in enumerate(kept):
        is_known = measured_columns(plan, keys[: len(values)]) & (values[:, :1] > 0)
        table[i, : len(values)] = np.where(is_known, values, np.nan)
        for row, (used, counts) in codes.items():
            place = np.broadcast_to(np.array([i, row], np.int32), (len(used), 2))
            histograms.append(np.column_stack([place, used, counts]))
    return {
        "steps": np.array([step for step, *_ in kept], np.int64),
        "values": table,
        "histograms": np.concatenate(histograms) if histograms else np.zeros((0, 4), np.int64),
        **names_of(keys[:rows]),
    }


_LAST_WORDS = 5.0  # seconds for a dump of a process that ends
_HISTOGRAM_BYTES = 1 << 19
_SMALL_BURST = 1 << 20
_QUIET = frozenset(("activations", "layer_inputs", "input_data", "network_output"))  # may contain Inf on purpose


def software() -> dict[str, Any]:
    """Return what decides which bits an operation computes, beside its inputs."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


class FlightRecorder(StepObserver):
    """Keeps the last steps of an exporter, and writes them to a dump when something goes wrong.

    `RecordedSteps` keeps the steps.  A thread writes dumps.

    Parameters
    ----------
    context : HookContext
        Of the exporter.
    bus : MessageBus
        Its bus.
    options : RecorderOptions
        The settings.
    """

    def __init__(self, context: HookContext, bus: MessageBus, options: RecorderOptions) -> None:
        self._context, self._bus, self.options = context, bus, options
        self._writer = DumpWriter()
        self._budget = MemoryBudget(options.max_memory)
        self._steps = RecordedSteps(context, options, self._budget)
        self._nonfinite, self._spike, self._has_spiked = NonFiniteTrigger(), SpikeScore(), False
        self._cool_down = CoolDown(options.cool_down, options.max_dumps)
        self._reasons: list[str] = []
        self._importances: set[int] = set()
        self._findings: list[Finding] = []
        self._burst: Burst | None = None
        self._process = os.getpid()
        self._is_cleaned = self._has_said = False
        self.judge: Judge | None = None
        context.observe(self)

    # -- as the observer of steps ---------------------------------------------------------------------------------

    def step_opened(self, stamp: Stamp, plan: Plan) -> None:
        """Begin to keep a step, see `RecordedSteps.open`."""
        try:
            self._steps.open(stamp, plan)
        except Exception as error:
            self._context.error_guard.report_internal("recording the state before a step", error)

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the model is called with."""
        try:
            self._steps.add_model_call(args, kwargs)
        except Exception as error:
            self._context.error_guard.report_internal("keeping a batch", error)

    def loss_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the loss module is called with."""
        try:
            self._steps.add_loss_call(args, kwargs)
        except Exception as error:
            self._context.error_guard.report_internal("keeping labels", error)

    @property
    def needs_every_step(self) -> bool:  # type: ignore[override]  # it depends on the options
        """Whether the user has asked for the batches, or the state, of steps that no subscriber samples."""
        return self.options.state_every > 0 or bool(self.options.record_batches)

    def steps_passed(self, block: StepLosses) -> None:
        """Keep the losses of steps in a row."""
        try:
            self._follow(block.last.global_step + 1 - len(block.losses))
            self._steps.add_losses(block)
            for loss in block.losses:
                self._score(loss)
        except Exception as error:
            self._context.error_guard.report_internal("recording the losses of steps", error)

    def step_passed(self, stamp: Stamp) -> None:
        """Store the number of a step that no subscriber samples."""
        self._steps.last = stamp

    def rows_complete(self, rows: Rows, event: NetworkMessage) -> None:
        """Keep the rows of a step, and look for numbers that are not finite and for a loss that jumps."""
        try:
            self._keep(rows, event)
        except Exception as error:
            self._context.error_guard.report_internal("recording a step", error)

    def _follow(self, step: int) -> None:
        """Begin the score of the loss anew, as rules do, if the training was resumed at an earlier step."""
        if step < self._steps.step:
            self._spike.clear()

    def _score(self, loss: float) -> None:
        was_spike, self._has_spiked = self._has_spiked, self._spike.add(loss) > LIMIT
        if self._has_spiked and not was_spike:
            self._add_reason(f"the loss jumped to {loss:.6g}", OF_JUMP if math.isfinite(loss) else NOT_FINITE)

    def _add_reason(self, reason: str, importance: int) -> None:
        self._reasons.append(reason)
        self._importances.add(importance)

    def _keep(self, rows: Rows, event: NetworkMessage) -> None:
        self._follow(rows.stamp.global_step)
        loss = self._steps.add(rows, event)
        if rows.skipped:
            return
        if loss is not None:
            self._score(loss)
        if self._steps.is_sampled(rows.plan) and len(bad := self._nonfinite.update(rows.values)):
            self._note_nonfinite(bad, rows)
        if self._burst is not None:
            self._burst.add(rows)

    def _note_nonfinite(self, bad: Iterable[int], rows: Rows) -> None:
        nans = rows.values[:, COLUMN["nans"]]
        named = [str(rows.index.keys[row][0]) for row in bad if nans[row] or rows.index.keys[row][0].kind not in _QUIET]
        if named:
            self._add_reason(f"NaN or Inf in {listed(named, 3)}", NOT_FINITE)

    def step_delivered(self, stamp: Stamp) -> None:
        """Write a dump if something went wrong in this step."""
        if self._burst is not None and self._burst.is_over:
            self._burst = None
        if not self._reasons or stamp.pass_name != TRAINING:
            return
        try:
            reasons, self._reasons = self._reasons, []
            importances, self._importances = self._importances, set()
            self._write_if_allowed(reasons, importances, has_burst=True)
            self._findings = []
        except Exception as error:
            self._context.error_guard.report_internal("writing a dump", error)

    def set_ids(self, ids: Any) -> None:
        """Set the ids of the rows of the next call of the model."""
        self._steps.set_ids(ids.detach().clone() if isinstance(ids, torch.Tensor) else copy.copy(ids))

    # -- triggers -------------------------------------------------------------------------------------------------

    def action(self) -> Callable[[Finding], None]:
        """Return a function that calls :meth:`found`, without a reference to the recorder: a bus may outlive the exporter."""
        reference = weakref.ref(self)

        def act(finding: Finding) -> None:
            if (recorder := reference()) is not None:
                recorder.found(finding)

        return act

    def found(self, finding: Finding) -> None:
        """Write a dump at the end of the step if a finding is severe enough."""
        if SEVERITIES.index(finding.severity) >= SEVERITIES.index(self.options.severity):
            self._add_reason(str(finding), OF_RULE)
            self._findings.append(finding)

    def dump(self, reason: str, timeout: float) -> Path | None:
        """Write a dump now; return its directory, or ``None`` if it was not written within `timeout` seconds."""
        job = self._write([reason], has_burst=True)
        return None if job is None else self._writer.wait(job, timeout)

    def process_fails(self, error: BaseException) -> None:
        """Write a dump before the process ends."""
        with suppressed(Exception):
            job = self._write_if_allowed([error_text(error)], {AT_END})
            if job is not None:
                self._writer.wait(job, _LAST_WORDS)

    def signal_arrived(self, name: str, is_end: bool) -> None:
        """Write a dump, and wait for it, because the signal may end the process; `is_end` is whether it usually does."""
        job = self._write_if_allowed([f"signal {name}"], {AT_END if is_end else OF_RULE})
        if job is not None:
            self._writer.wait(job, _LAST_WORDS)

    # -- dumps ----------------------------------------------------------------------------------------------------

    @property
    def dumps(self) -> tuple[Path, ...]:
        """The dumps that are on the disk."""
        return tuple(self._writer.written)

    @property
    def failed(self) -> int:
        """Number of dumps that could not be written."""
        return self._writer.failed

    def _write_if_allowed(self, reasons: list[str], importances: set[int], has_burst: bool = False) -> DumpJob | None:
        """Write an automatic dump, unless another one was written shortly before, or too many in this run."""
        step = self._steps.step
        if not self._cool_down.allows(step, importances):
            if self._cool_down.is_used_up and not self._has_said and self.options.max_dumps:
                self._has_said = True
                log.warning(
                    "%d dumps of this run are written (RecorderOptions(max_dumps=…)); further ones are left out, "
                    "except one at the end of the process",
                    self.options.max_dumps,
                )
            return None
        job = self._write(reasons, has_burst)
        if job is not None:
            self._cool_down.add(step, importances, job.has_failed)
        return job

    def _write(self, reasons: list[str], has_burst: bool) -> DumpJob | None:
        """Copy what is kept, and pass it to the writer."""
        if self._process != os.getpid():
            return None
        self._context.tracker.stamp  # noqa: B018  # losses that are counted only are passed on
        self._remove_unfinished()
        job = DumpJob(self._content(reasons), self._directory(), self._bus.settings.verbosity)
        self._writer.write(job)
        if has_burst and self.options.burst and self._burst is None and World.here().size == 1:
            self._begin_burst(job)
        return job

    def _begin_burst(self, job: DumpJob) -> None:
        model, steps = self._context.model, self.options.burst
        if not self._budget.has_room(self._budget.histograms + 4 * self._budget.burst):
            return
        in_modules = not model.is_compiled  # the graph would have to be compiled again to measure inside it
        subscribers = [BurstSubscriber(in_modules, model.loss is not None)]
        if names := self._modules_with_histograms(in_modules):
            subscribers.append(BurstSubscriber(in_modules, histograms_of=names))

        def finish(arrays: dict[str, NDArray[Any]]) -> None:
            facts = {"burst_steps": arrays["steps"].tolist()}
            self._writer.extend(job, "burst.npz", arrays, facts, self._size_with_burst)

        self._burst = Burst(self._bus, subscribers, steps, self._budget.burst, finish)

    def _modules_with_histograms(self, in_modules: bool) -> list[str]:
        """Return the modules whose histograms fit into memory, those with findings first."""
        named = [finding.module for finding in self._findings]
        left, chosen = self._budget.histograms, []
        for entry in sorted(self._bus.network, key=lambda entry: entry.name not in named):
            left -= (3 * in_modules + 3 * len(entry.parameters)) * _HISTOGRAM_BYTES
            if left < 0:
                break
            chosen.append(entry.name)
        return chosen

    def _size_with_burst(self, dump: Path) -> int:
        """Return the largest size of a dump with its burst: a burst is not larger than the other files of the run, or 1 MiB."""
        run = dump.parent.parent
        of_run = sum(file.stat().st_size for file in run.iterdir() if file.is_file())
        own = sum(file.stat().st_size for file in dump.iterdir())
        return min(
            self.options.max_bytes,
            own + max(of_run // self.options.max_dumps if self.options.max_dumps else 0, _SMALL_BURST),
        )

    def _remove_unfinished(self) -> None:
        """Let the writer remove what killed processes have left, once."""
        log_dir = Path(self._bus.log_dir or "run")
        if not self._is_cleaned and log_dir.is_dir():
            self._is_cleaned = True
            self._writer.remove_unfinished(log_dir.absolute())

    def _directory(self) -> Callable[[], Path]:
        """Return a function that returns the directory of the dumps: that of the run, or one of this rank."""
        run = self._bus.open_run()
        if run is not None:
            return lambda: run.make_directory() / "dumps"
        rank, log_dir = World.here().rank, Path(self._bus.log_dir or "run").absolute()
        return lambda: log_dir / f"dumps_rank{rank}"

    def _content(self, reasons: list[str]) -> DumpContent:
        step = self._steps.step
        begin = min((f.step for f in self._findings if f.step is not None), default=step)
        arrays = self._steps.arrays()
        tensors, further, left_out = self._steps.captured(begin, self.judge.history if self.judge is not None else None)
        if "batch_rows.npz" in further and (text := worst_row(further["batch_rows.npz"], step)):
            reasons = [*reasons[:1], text, *reasons[1:]]
        facts = self._facts(reasons) | {"left_out": left_out}
        return DumpContent(f"step_{step:06d}", facts, {**arrays, **further}, tensors, self.options.max_bytes)

    def _facts(self, reasons: list[str]) -> dict[str, Any]:
        last, world = self._steps.last, World.here()
        return {
            "step": self._steps.step,
            "train_step": last.train_step if last else 0,
            "epoch": last.epoch if last else 0,
            "reasons": reasons,
            "findings": [finding.as_dict() for finding in self._findings],
            "rules": rule_facts(self.judge.rules) if self.judge is not None else [],
            "time": time.time(),
            "rank": world.rank,
            "ranks": world.size,
            "modules": [
                [entry.name, entry.class_name, [list(p) for p in entry.parameters]] for entry in self._bus.network
            ],
            "options": asdict(self.options),
            "versions": {"ikkuna": sys.modules["ikkuna"].__version__, **software()},
        }

    def close(self) -> None:
        """End a burst, and wait for the thread at most 2 seconds."""
        try:
            self._context.observe(None)
            if self._burst is not None:
                self._burst.end()
            self._remove_unfinished()
            self._writer.close(2.0)
        except Exception as error:
            self._context.error_guard.report_internal("closing the flight recorder", error)
