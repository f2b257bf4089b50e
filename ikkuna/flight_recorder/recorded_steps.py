"""Keeps what a dump contains of the last steps of an exporter."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.diagnosis.history import History
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.rule import Rule
from ikkuna.flight_recorder.batch_rows import BatchRows, losses_of_rows
from ikkuna.flight_recorder.capture import CapturedStep, StepCapture
from ikkuna.flight_recorder.options import MemoryBudget, RecorderOptions
from ikkuna.metrics.messages.batch import StepLosses
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.rows import Rows
from ikkuna.store.finding import Finding
from ikkuna.support.failures import suppressed
from ikkuna.support.random_states import RandomReader, RandomStates

_FIRST_CAPACITY = 64


class Tasks(Protocol):
    """The plan of a step, which names the statistics that were measured."""

    def task(self, kind: str, module: str | None) -> Any:
        """Return an object with the attribute `fields`; ``None`` if nothing was measured."""


class StepRows(NamedTuple):
    """The rows of some steps.

    Parameters
    ----------
    steps : array
        ``(steps,)``, int64, in the order of time.
    values : array
        ``(steps, rows, columns)``, float64; NaN for what was not measured.
    """

    steps: NDArray[np.int64]
    values: Values


class RowRing:
    """Keeps the tables of the last steps; memory is reused, and grows only if a step has more rows than any before.

    A slot is marked as empty while it is written, so that a snapshot in a signal handler or in another thread never has half a step.

    Parameters
    ----------
    length : int
        Number of steps.
    max_bytes : int
        The largest size of the tables of all steps; the last rows of larger ones are not kept.
    """

    def __init__(self, length: int, max_bytes: int) -> None:
        self._max_rows = max(max_bytes // (length * len(COLUMNS) * 8), 1)
        self._steps = np.full(length, -1, np.int64)
        self._counts = np.zeros(length, np.int64)
        self._values = np.empty((length, min(_FIRST_CAPACITY, self._max_rows), len(COLUMNS)))
        self._tasks: list[Tasks | None] = [None] * length
        self._next = 0

    def add(self, step: int, values: Values, tasks: Tasks) -> None:
        """Copy the table of a step over that of the oldest one."""
        slot, count = self._next, min(len(values), self._max_rows)
        if count > self._values.shape[1]:
            self._grow(count)
        self._steps[slot] = -1
        self._values[slot, :count] = values[:count]
        self._counts[slot], self._tasks[slot] = count, tasks
        self._steps[slot] = step
        self._next = (slot + 1) % len(self._steps)

    def _grow(self, count: int) -> None:
        wider = np.empty((len(self._steps), min(2 * count, self._max_rows), len(COLUMNS)))
        wider[:, : self._values.shape[1]] = self._values
        self._values = wider

    @property
    def last_step(self) -> int:
        """The step that was added last; -1 before the first."""
        return int(self._steps[self._next - 1])

    def snapshot(self, keys: Sequence[tuple[Any, str]]) -> StepRows:
        """Return a copy of all steps, with NaN for what was not measured.

        Parameters
        ----------
        keys : sequence of tuple
            For each row an object with the attributes `kind` and `module`, and the path.
        """
        length = len(self._steps)
        order = [i for i in ((self._next + i) % length for i in range(length)) if self._steps[i] >= 0]
        rows = int(self._counts[order].max()) if order else 0
        found = np.full((len(order), rows, len(COLUMNS)), np.nan)
        masks: dict[int, NDArray[np.bool_]] = {}
        for i, slot in enumerate(order):
            tasks, count = self._tasks[slot], int(self._counts[slot])
            if id(tasks) not in masks:
                masks[id(tasks)] = measured_columns(tasks, keys[:rows])
            values = self._values[slot, :count]
            is_known = masks[id(tasks)][:count] & (values[:, :1] > 0)
            found[i, :count] = np.where(is_known, values, np.nan)
        return StepRows(self._steps[order].copy(), found)


def measured_columns(tasks: Tasks | None, keys: Sequence[tuple[Any, str]]) -> NDArray[np.bool_]:
    """Return which columns ``(rows, columns)`` were measured."""
    mask = np.zeros((len(keys), len(COLUMNS)), np.bool_)
    for row, (site, _) in enumerate(keys):
        if tasks is not None and (task := tasks.task(site.kind, site.module)) is not None:
            mask[row, [COLUMN[name] for name in task.fields if name in COLUMN]] = True
    return mask


def names_of(keys: list[Any]) -> dict[str, NDArray[Any]]:
    """Return kind, module and path of each row as arrays of texts."""
    return {
        "kinds": np.array([site.kind for site, _ in keys], np.str_),
        "modules": np.array([site.module or "" for site, _ in keys], np.str_),
        "paths": np.array([path for _, path in keys], np.str_),
    }


_LENGTH = 512


class StepLog:
    """Keeps a few numbers of each of the last 512 steps.

    Examples
    --------
    >>> log = StepLog()
    >>> for step in range(600):
    ...     log.add(step, 1.0, {"0": 0.1}, 0.5, False)
    >>> arrays = log.arrays()
    >>> len(arrays["log_steps"]), int(arrays["log_steps"][0]), arrays["learning_rates"].shape
    (512, 88, (512, 1))
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, float, bool, Sequence[str], Sequence[Any]]] = deque(maxlen=_LENGTH)

    def add(self, step: int, loss: float, rates: Mapping[str, Any], seconds: float, skipped: bool) -> None:
        """Add a step; `loss` and `seconds` are NaN if they are unknown."""
        numbers = [rate if isinstance(rate, float | int) else np.nan for rate in rates.values()]
        self._steps.append((step, loss, seconds, skipped, tuple(rates), numbers))

    def add_losses(self, block: StepLosses) -> None:
        """Add steps in a row of which only the losses are known; without numpy, because caches are cold."""
        step, began, add = block.last.global_step + 1 - len(block.losses), block.began, self._steps.append
        for i, loss in enumerate(block.losses):
            ended = block.ends[i]
            add((step + i, loss, ended - began, False, block.names, block.rates[i]))
            began = ended

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return arrays of all steps in the order of time."""
        steps = list(self._steps)
        groups = {name: i for i, name in enumerate(dict.fromkeys(name for step in steps for name in step[4]))}
        rates = np.full((len(steps), max(len(groups), 1)), np.nan)
        for row, (*_, names, numbers) in zip(rates, steps, strict=True):
            row[[groups[name] for name in names]] = np.array(numbers, np.float64)
        return {
            "log_steps": np.array([step[0] for step in steps], np.int64),
            "loss": np.array([step[1] for step in steps], np.float64),
            "seconds": np.array([step[2] for step in steps], np.float64),
            "skipped": np.array([step[3] for step in steps], np.bool_),
            "learning_rates": rates,
            "groups": np.array(list(groups), dtype=np.str_),
        }


def history_arrays(history: History) -> dict[str, NDArray[Any]]:
    """Return the values of all series that are kept: the first 20 and the last 400 of each."""
    kinds, names, passes = [], [], []
    series, steps, values = [], [], []
    for number, (kind, pass_name, name, curve) in enumerate(history.all_curves()):
        kinds.append(kind)
        names.append("" if name is None else f"={name}")
        passes.append(pass_name)
        early = max(min(len(curve.first), curve.count - len(curve.values)), 0)
        points = [
            *zip(curve.first_steps[:early], curve.first[:early], strict=True),
            *zip(curve.steps, curve.values, strict=True),
        ]
        series += [number] * len(points)
        steps += [step for step, _ in points]
        values += [value for _, value in points]
    return {
        "kinds": np.array(kinds, np.str_),
        "names": np.array(names, np.str_),
        "passes": np.array(passes, np.str_),
        "series": np.array(series, np.int64),
        "steps": np.array(steps, np.int64),
        "values": np.array(values, np.float64),
    }


def feed_history(judge: Judge, arrays: Mapping[str, NDArray[Any]], before: int) -> list[Finding]:
    """Judge the values of the steps before `before` again, in the order of steps; return the findings."""
    keys = [arrays[name].tolist() for name in ("kinds", "names", "passes")]
    order = np.argsort(arrays["steps"], kind="stable")
    found: list[Finding] = []
    present: int | None = None
    for i in order[arrays["steps"][order] < before].tolist():
        step, number = int(arrays["steps"][i]), int(arrays["series"][i])
        if present is not None and step != present:
            found += judge.finish_step(present)
        present = step
        kind, name, pass_name = (column[number] for column in keys)
        judge.add(kind, name[1:] if name else None, step, float(arrays["values"][i]), pass_name)
    if present is not None:
        found += judge.finish_step(present)
    return found


def rule_facts(rules: tuple[Rule, ...]) -> list[dict[str, Any]]:
    """Return the names, the thresholds and the patience of rules as plain values."""
    return [
        {"name": rule.name, "patience": rule.patience} | {name: float(getattr(rule, name)) for name in rule.thresholds}
        for rule in rules
    ]


ROW_COLUMNS = ("steps", "parts", "numbers", "hashes", "ids", "losses")
"""The arrays of ``batch_rows.npz``."""

_NO_RATES: dict[str, Any] = {}
_MEAN, _N = COLUMN["mean"], COLUMN["n"]


class RecordedSteps:
    """The last steps of an exporter, as a dump contains them.

    It copies the table of each sampled step into memory of a fixed size, with the states of the random generators,
    and the loss and the learning rates of every step.  It keeps the last batches, and copies the state of the training if the options
    ask for it, see `StepCapture`.

    Parameters
    ----------
    context : HookContext
        Of the exporter.
    options : RecorderOptions
        The settings.
    budget : MemoryBudget
        How much memory may be used.

    Attributes
    ----------
    last : Stamp or None
        The last step.
    """

    def __init__(self, context: HookContext, options: RecorderOptions, budget: MemoryBudget) -> None:
        self._context, self._options = context, options
        self._ring, self._log = RowRing(options.length, budget.ring), StepLog()
        self._random: deque[tuple[int, RandomStates]] = deque(maxlen=options.length)
        self._reader: RandomReader | None = None
        self._captures = options.record_batches is not False
        self._capture = StepCapture(options, budget)
        self._plans: dict[int, tuple[Plan, bool]] = {}
        self._keys: Any = ()
        self._loss_row: int | None = None
        self._unsampled: tuple[Any, Plan] | None = None
        self.last: Stamp | None = None

    @property
    def step(self) -> int:
        """The last step."""
        return self.last.global_step if self.last is not None else 0

    def open(self, stamp: Stamp, plan: Plan) -> None:
        """Begin to keep a step, and read the states of the random generators if it is sampled or may run again."""
        random = []
        if self._reader is None:
            self._reader = RandomReader({named.parameter.device for named in self._context.parameters.all})
        if self.is_sampled(plan) or self._options.state_every:
            random.append(self._reader.read())
            self._random.append((stamp.global_step, random[0]))
        if self._captures:
            step = CapturedStep(stamp.global_step, stamp.train_step, stamp.epoch, random)
            self._capture.begin(step, self._context.model.roots.whole, self._context.parameters.optimizers)

    def is_sampled(self, plan: Plan) -> bool:
        """Return whether a plan measures modules."""
        known = self._plans.get(id(plan))
        if known is None:  # the plan is kept, so that its id stays unique
            is_sampled = not plan.kinds.isdisjoint(MODULE_KINDS)
            if len(self._plans) > 64:
                self._plans.clear()
            known = self._plans[id(plan)] = plan, is_sampled
        return known[1]

    def add_model_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the model is called with, unless the options forbid it."""
        if self._captures and self._reader is not None:
            self._capture.add_model_call(args, kwargs, self._reader.read)

    def add_loss_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the loss module is called with, unless the options forbid it."""
        if self._captures:
            self._capture.add_loss_call(args, kwargs)

    def add_losses(self, block: StepLosses) -> None:
        """Keep the losses, learning rates and durations of steps in a row."""
        self._log.add_losses(block)
        self.last, self._unsampled = block.last, None

    def add(self, rows: Rows, event: NetworkMessage) -> float | None:
        """Keep the rows of a step; return its loss, or ``None`` if it was not measured."""
        step, data = rows.stamp.global_step, event.data or {}
        self.last, self._keys = rows.stamp, rows.index.keys
        loss = self._loss_of(rows)
        self._log.add(
            step,
            np.nan if loss is None else loss,
            data.get("learning_rates", _NO_RATES),
            data.get("seconds", np.nan),
            rows.skipped,
        )
        is_sampled = self.is_sampled(rows.plan)
        self._unsampled = None if is_sampled else (rows.values, rows.plan)
        if is_sampled:
            self._ring.add(step, rows.values, rows.plan)
        return loss

    def _loss_of(self, rows: Rows) -> float | None:
        """Return the loss of a step; ``None`` if it was not measured."""
        row = self._loss_row
        if row is None:
            row = self._loss_row = next((i for i, (site, _) in enumerate(rows.index.keys) if site.kind == "loss"), None)
        if row is None or row >= len(rows.values) or not rows.values[row, _N]:
            return None
        _, nans, infs = rows.values[row, :3].tolist()
        return float("nan") if nans or infs else float(rows.values[row, _MEAN])

    # -- contents of a dump

    def arrays(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the arrays of ``rows.npz`` and ``random.npz``."""
        if self._unsampled is not None and self._ring.last_step != self.step:
            self._ring.add(self.step, *self._unsampled)
        rows = self._ring.snapshot(keys := list(self._keys))
        names = names_of(keys[: rows.values.shape[1]])
        found: dict[str, dict[str, NDArray[Any]]] = {
            "rows.npz": {"steps": rows.steps, "values": rows.values, "columns": np.array(COLUMNS, np.str_)}
            | names
            | self._log.arrays()
        }
        random = list(self._random)
        if random:
            found["random.npz"] = {"steps": np.array([step for step, _ in random])} | {
                f"{step} {name}": array for step, states in random for name, array in states.arrays().items()
            }
        return found

    def set_ids(self, ids: Any) -> None:
        """Set the ids of the rows of the next call of the model."""
        self._capture.set_ids(ids)

    def captured(
        self, begin: int, history: History | None
    ) -> tuple[dict[str, Any], dict[str, dict[str, NDArray[Any]]], dict[str, str]]:
        """Return the tensors and the further arrays of the steps that are kept, and why some are missing.

        Parameters
        ----------
        begin : int
            The step at which the mistake began: the state of the training is that of a step before it, if there is one.
        history : History, optional
            What the rules have read.
        """
        left_out = {"batches.pt": self._capture.refusal} if self._capture.refusal else {}
        if self._captures and self._context.model.is_compiled:
            left_out = {"batches.pt": "the arguments of a compiled model are not seen"}
        self._capture.wait()
        steps, contents = list[CapturedStep](), list[dict[str, Any]]()
        for step in self._capture.steps:
            if not step.model_calls or step.step > self.step:
                continue
            if (content := step.content()) is None:
                steps, contents = [], []
                left_out["batches.pt"] = (
                    f"the batch of step {step.step} was changed in place after the model had received it; "
                    "the batches of later steps are copied"
                )
                continue
            steps.append(step)
            contents.append(content)
        if not steps:
            return {}, {}, left_out
        tensors: dict[str, Any] = {"batches.pt": contents}
        arrays = {"batch_rows.npz": self._arrays_of_rows(steps, contents, left_out)}
        with_state = [step for step in steps if step.state is not None]
        if (first := _first_to_replay(with_state, begin)) is not None:
            tensors = {"state.pt": {"step": first.step, **(first.state or {})}, **tensors}
            if with_state[0] is not first:
                tensors = {"state_before.pt": {"step": with_state[0].step, **(with_state[0].state or {})}, **tensors}
            if history is not None:
                arrays["history.npz"] = history_arrays(history)
        if random := {
            f"{step.step} {number} {name}": array
            for step in steps
            for number, states in enumerate(step.random)
            for name, array in states.arrays().items()
        }:
            arrays["random_calls.npz"] = random
        return tensors, arrays, left_out

    def _arrays_of_rows(
        self, steps: list[CapturedStep], contents: list[dict[str, Any]], left_out: dict[str, str]
    ) -> dict[str, NDArray[Any]]:
        """Return for each row of the batches its step, its micro-batch, its number there, its hash, its id, and its loss or NaN."""
        loss_module = self._context.model.loss
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ROW_COLUMNS}
        for step, content in zip(steps, contents, strict=True):
            for part, call in enumerate(content["model_calls"]):
                has_losses = len(content["loss_calls"]) == len(content["model_calls"])
                loss_call = content["loss_calls"][part] if has_losses else None
                ids = _texts(step.ids[part] if part < len(step.ids) else None)
                batch = BatchRows(call, loss_call, None if ids is None else len(ids))
                count = batch.count
                losses = None
                output = step.outputs[part] if has_losses and part < len(step.outputs) else None
                if count and loss_module is not None and output is not None and loss_call is not None:
                    with suppressed(Exception):
                        losses = losses_of_rows(loss_module, output.tensor, loss_call, count)
                if ids is not None and len(ids) != count:
                    left_out["ids"] = f"{len(ids)} ids were given for the {count} rows of step {step.step}"
                    ids = None
                found = {
                    "steps": np.full(count, step.step, np.int64),
                    "parts": np.full(count, part, np.int64),
                    "numbers": np.arange(count),
                    "hashes": batch.hashes(),
                    "ids": np.full(count, "", np.str_) if ids is None else np.array(ids, np.str_),
                    "losses": np.full(count, np.nan) if losses is None else losses,
                }
                for name, array in found.items():
                    columns[name].append(array)
        return {name: np.concatenate(arrays) for name, arrays in columns.items()}


def _texts(ids: Any) -> list[str] | None:
    if isinstance(ids, Tensor | np.ndarray):
        ids = ids.reshape(-1).tolist()
    return None if ids is None else [str(each.tolist() if hasattr(each, "tolist") else each) for each in ids]


_SHARE = 0.5  # of the sum of the losses of all rows


def worst_row(arrays: Mapping[str, NDArray[Any]], step: int) -> str:
    """Return a text that names the only row of a step with half of the loss, or a loss that is not finite; empty without one.

    Parameters
    ----------
    arrays : mapping of str to array
        The content of ``batch_rows.npz``.
    step : int
        The step.

    Examples
    --------
    >>> names = {"steps": np.zeros(3, np.int64), "parts": np.zeros(3, np.int64), "numbers": np.arange(3), "ids": np.array(["", "", "b"])}
    >>> worst_row({**names, "losses": np.array([0.5, 0.5, 9.0])}, 0)
    "row 2 of the batch (id 'b') has 90 % of its loss"
    """
    own = np.flatnonzero(arrays["steps"] == step)
    losses = np.abs(arrays["losses"][own])
    bad = ~np.isfinite(losses)
    if len(own) < 2 or bad.all() or not losses.any():
        return ""
    at = int(np.argmax(np.where(bad, np.inf, losses)))
    share = float(losses[at] / losses[~bad].sum()) if not bad.any() else np.nan
    if share < _SHARE or bad.sum() > 1:
        return ""
    part = f" in micro-batch {arrays['parts'][own[at]]}" if arrays["parts"][own].any() else ""
    name = f" (id {str(arrays['ids'][own[at]])!r})" if arrays["ids"][own[at]] else ""
    figure = "a loss that is not finite" if bad.any() else f"{share:.0%} of its loss".replace("%", " %")
    return f"row {arrays['numbers'][own[at]]} of the batch{part}{name} has {figure}"


def _first_to_replay(with_state: list[CapturedStep], begin: int) -> CapturedStep | None:
    """Return the latest step with a copy of the state that is not after `begin`; otherwise the first with a copy."""
    before = [step for step in with_state if step.step <= begin]
    return before[-1] if before else next(iter(with_state), None)
