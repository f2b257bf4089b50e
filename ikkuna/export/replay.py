"""Runs the step of a dump again, from the state before it, and compares what is measured."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.diagnosis.rule import Rule, get_rules
from ikkuna.errors import ConfigTypeError, DumpError, IkkunaError
from ikkuna.export.exporter import Exporter
from ikkuna.flight_recorder.dump_reading import Dump, read_dump
from ikkuna.flight_recorder.recorded_steps import feed_history
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import StepObserver
from ikkuna.metrics.messages.kinds import is_built_in, is_of_module
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values
from ikkuna.observation.rows.rows import Rows
from ikkuna.printable import listed, printable
from ikkuna.store.finding import Finding
from ikkuna.support.random_states import RandomStates
from ikkuna.support.torch_internals import pytree


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay; ``print()`` shows it.

    Parameters
    ----------
    step : int
        The step of the dump.
    first_step : int
        The step whose state the replay began with.
    expected : tuple of Finding
        The findings in the dump.
    findings : tuple of Finding
        The findings at this step of the replay.
    compared, equal : int
        Number of measured values in the dump's last step, and of those that the replay has measured with equal bits.
    loss : tuple of float
        The loss of the step in the dump and in the replay.
    differences : tuple of str
        The first values that differ.

    Examples
    --------
    >>> print(Replay(12, 12, (), (), 40, 40, (0.5, 0.5)))
    step 12, replayed from step 12
      loss 0.5, in the dump 0.5
      40 of 40 values are equal
      the dump has no finding
    """

    step: int
    first_step: int
    expected: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    compared: int
    equal: int
    loss: tuple[float, float]
    differences: tuple[str, ...] = field(default=())

    @property
    def is_reproduced(self) -> bool:
        """Whether all values are equal, bit for bit, and the findings have the same rules, modules and figures."""
        return not self.missing and self.compared == self.equal and _same(*self.loss)

    @property
    def missing(self) -> tuple[Finding, ...]:
        """The findings in the dump that the replay did not find."""
        return tuple(finding for finding in self.expected if not any(_agree(finding, other) for other in self.findings))

    def __str__(self) -> str:
        lines = [f"step {self.step}, replayed from step {self.first_step}"]
        lines.append(f"  loss {self.loss[1]:.9g}, in the dump {self.loss[0]:.9g}")
        lines.append(f"  {self.equal} of {self.compared} values are equal")
        lines += [f"  different: {text}" for text in self.differences]
        for finding in self.expected:
            state = "missing" if finding in self.missing else "reproduced"
            lines.append(f"  {state}: {finding}")
        lines += [] if self.expected else ["  the dump has no finding"]
        return "\n".join(map(printable, lines))


def _agree(one: Finding, other: Finding) -> bool:
    return (one.rule, one.module) == (other.rule, other.module) and _same(one.value, other.value)


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one != one and other != other)


_SHOWN = 3
_OF_NETWORK = ("loss", "network_output", "input_data", "input_labels")

Step = Callable[[list[Any], list[Any]], object]
"""Runs one step: receives the arguments of the model's calls and those of the loss module's calls."""


class _RowsSubscriber(Subscriber):
    """Requests statistics of one kind; the rows are read as a whole."""

    def __init__(self, kind: str, fields: tuple[str, ...]) -> None:
        super().__init__(kind, backend="null")
        self.fields = fields

    def compute(self, message: Message) -> None:
        """Do nothing."""


class _LastRows(StepObserver):
    """Keeps the rows of the latest step, as an observer of steps."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, str], Any] = {}

    def rows_complete(self, rows: Rows, event: object) -> None:
        """Keep the rows that have elements."""
        self.values = {
            (site.kind, site.module or "", path): rows.values[i].copy()
            for i, (site, path) in enumerate(rows.index.keys[: len(rows.values)])
            if rows.values[i, 0]
        }


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise `DumpError` for any error inside, because the values of a dump can be of another training, or damaged."""
    try:
        yield
    except IkkunaError:
        raise
    except Exception as error:
        raise DumpError(f"{what}: {type(error).__name__}: {error}") from error


class _Calls(list[Any]):
    """The calls of the model in a step; before each of them the states of the random generators are restored."""

    def __init__(self, calls: list[Any], restore: Callable[[int], None]) -> None:
        super().__init__(calls)
        self._restore = restore

    def __iter__(self) -> Iterator[Any]:
        for number, call in enumerate(super().__iter__()):
            self._restore(number)
            yield call


class ReplayRun:
    """Runs steps under an exporter that measures what the dump holds.

    Parameters
    ----------
    dump : Dump
        The dump.
    model : nn.Module
        A model in the state before the first step.
    loss : nn.Module, optional
        The loss module.
    optimizers : list of Optimizer
        The optimizers, in the state before the first step.
    step : callable, optional
        Runs a step; by default a forward, a backward pass for each micro-batch, and a step of each optimizer.
    """

    def __init__(
        self, dump: Dump, model: nn.Module, loss: nn.Module | None, optimizers: list[Optimizer], step: Step | None
    ) -> None:
        self.dump, self.model, self.loss, self.optimizers, self.step = dump, model, loss, optimizers, step
        self._random = dump.arrays("random_calls.npz") if dump.has("random_calls.npz") else {}
        self._first, self._factor = -1, 1.0
        if dump.rows["columns"].tolist() != list(COLUMNS):
            raise DumpError(f"'columns' of '{dump.path / 'rows.npz'}' are not those of this version of ikkuna")
        row = int(np.flatnonzero(dump.steps == dump.step)[-1]) if (dump.steps == dump.step).any() else None
        self._expected: Values = np.zeros((0, len(COLUMNS))) if row is None else dump.rows["values"][row]

    def compare(self, steps: list[dict[str, Any]], rules: tuple[Rule, ...], factor: float = 1.0) -> Replay:
        """Run steps, and compare the findings of `rules` and the values of the last step with the dump.

        Parameters
        ----------
        steps : list of dict
            What ``batches.pt`` holds of each step.
        rules : tuple of Rule
            The rules.
        factor : float
            The learning rates are multiplied by it.
        """
        self._first, self._factor = steps[0]["step"], factor
        exporter = Exporter(message_bus=MessageBus("replay"), on_error="raise")
        last, new = _LastRows(), list[Finding]()
        try:
            exporter.add_modules(self.model)
            if self.loss is not None:
                exporter.set_loss(self.loss)
            self._request_rows(exporter)
            if rules:
                exporter.apply_rules(
                    rules, every=self.dump.facts["options"]["every"], backend="null", on_finding=new.append
                )
                self._feed(exporter, steps[0]["step"])
            counters = {name: steps[0][name] for name in ("train_step", "epoch")}
            exporter.load_state_dict({"global_step": steps[0]["step"], **counters})
            exporter._session.context.observe(last)
            for batch in steps:
                new.clear()
                self.run(batch)
        finally:
            exporter._session.context.observe(None)
            exporter.close()
        return self._result(steps[0]["step"], last, tuple(new))

    def _request_rows(self, exporter: Exporter) -> None:
        """Register what measures the statistics that the dump has of its last step."""
        fields: dict[str, set[str]] = {"loss": {"mean"}}
        for row, values in zip(self.dump.names, self._expected, strict=False):
            measured = {name for name, value in zip(COLUMNS, values, strict=True) if not np.isnan(value)}
            fields.setdefault(row.kind, set()).update(measured - {"n"})
        for kind, names in fields.items():
            needs_loss = kind == "input_labels" and self.loss is None
            if names and not needs_loss and is_built_in(kind) and (is_of_module(kind) or kind in _OF_NETWORK):
                exporter.message_bus.register_subscriber(_RowsSubscriber(kind, tuple(sorted(names))))

    def _feed(self, exporter: Exporter, before: int) -> None:
        rules = exporter._attachment.rules
        if rules is not None and self.dump.has("history.npz"):
            arrays = self.dump.arrays("history.npz")
            if len(arrays["series"]) and not 0 <= arrays["series"].min() <= arrays["series"].max() < len(
                arrays["kinds"]
            ):
                raise DumpError(
                    f"'series' of '{self.dump.path / 'history.npz'}' has other numbers than 'kinds' has names"
                )
            with explained(f"'{self.dump.path / 'history.npz'}' cannot be judged"):
                feed_history(rules.judge, arrays, before)

    def run(self, batch: dict[str, Any]) -> None:
        """Run one step: what ``batches.pt`` holds of it."""
        step = batch["step"]
        calls = [[on_device(call, self.device) for call in batch[name]] for name in ("model_calls", "loss_calls")]
        self._set_rates(step)
        with explained(f"step {step} cannot run again"):
            self._restore_random(step, 0)
            (self.step or self._default_step)(
                _Calls(calls[0], lambda number: self._restore_random(step, number)), calls[1]
            )

    def _restore_random(self, step: int, number: int) -> None:
        """Restore the states of the random generators before a call of the model."""
        prefix = f"{step} {number} "
        own = {name.removeprefix(prefix): array for name, array in self._random.items() if name.startswith(prefix)}
        if not own:
            raise DumpError(f"the dump lacks the random states of step {step}")
        with explained(f"'random_calls.npz' has no random states of step {step}"):
            RandomStates.of_arrays(own).restore()

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _set_rates(self, step: int) -> None:
        """Set the learning rates of the step, which a scheduler may have changed since the state was copied."""
        rows = self.dump.rows
        at = np.flatnonzero(rows["log_steps"] == step)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        logged = [np.nan] * len(groups)
        if len(at) and len(groups) == rows["learning_rates"].shape[1]:
            logged = rows["learning_rates"][at[-1]].tolist()
        for group, rate in zip(groups, logged, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                continue
            if not np.isnan(rate):
                group["lr"] = rate * self._factor
            elif step == self._first:
                group["lr"] *= self._factor

    def _default_step(self, model_calls: list[Any], loss_calls: list[Any]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for number, (args, kwargs) in enumerate(model_calls):
            output = self.model(*args, **kwargs)
            value_of(output, self.loss, loss_calls[number] if self.loss is not None else None).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def _result(self, first: int, last: _LastRows, new: tuple[Finding, ...]) -> Replay:
        compared = equal = 0
        differences = []
        for row, values in zip(self.dump.names, self._expected, strict=False):
            known = ~np.isnan(values)
            if not known.any():
                continue
            got = last.values.get((row.kind, row.module, row.path), np.full(len(COLUMNS), np.nan))
            same = values == got
            compared += int(known.sum())
            equal += int((same & known).sum())
            for i in np.flatnonzero(known & ~same):
                differences.append(f"{COLUMNS[i]} of {row}: {got[i]:.9g}, in the dump {values[i]:.9g}")
        row = last.values.get(("loss", "", ""), np.full(len(COLUMNS), np.nan))
        is_finite = not (row[COLUMN["nans"]] or row[COLUMN["infs"]])
        losses = self.dump.losses.get(self.dump.step, float("nan")), float(row[COLUMN["mean"]] if is_finite else np.nan)
        return Replay(
            self.dump.step,
            first,
            tuple(self.dump.findings),
            new,
            compared,
            equal,
            losses,
            tuple(differences[:_SHOWN]),
        )


def on_device(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def value_of(output: Any, loss: nn.Module | None, loss_call: Any) -> Tensor:
    """Return the loss of an output: that of the loss module, or the output itself, or what it contains as ``loss``."""
    if loss is not None:
        rest, named = loss_call
        output = loss(output, *rest, **named)
    found: Tensor = (
        output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output.loss
    )
    return found


def check_fits(dump: Dump, model: nn.Module, state: dict[str, Any], optimizers: list[Optimizer]) -> None:
    """Raise `DumpError` if the state of a dump is not that of such a model and such optimizers."""
    parameters = dict(model.named_parameters())
    with_gradients = {name: parameters[name] for name in state["gradients"].keys() & parameters.keys()}
    for what, own in (
        ("parameters", parameters),
        ("buffers", dict(model.named_buffers())),
        ("gradients", with_gradients),
    ):
        stored = state[what]
        missing, unknown = sorted(stored.keys() - own.keys()), sorted(own.keys() - stored.keys())
        if missing or unknown:
            names = listed([repr(name) for name in missing or unknown], 3)
            lacks = f"it lacks {names}" if missing else f"the dump lacks {names}"
            raise DumpError(f"the dump '{dump.path}' is of another model: among the {what} {lacks}")
        for name, value in stored.items():
            if value.shape != own[name].shape or value.dtype != own[name].dtype:
                raise DumpError(
                    f"the dump '{dump.path}' is of another model: {name} is {_described(value)} there, and {_described(own[name])} here"
                )
    stored_optimizers = state["optimizers"]
    if stored_optimizers and len(stored_optimizers) != len(optimizers):
        raise DumpError(f"the dump has the states of {len(stored_optimizers)} optimizers, got {len(optimizers)}")
    for stored, optimizer in zip(stored_optimizers, optimizers, strict=False):
        own_class = type(optimizer).__name__
        if (known := stored.get("class", own_class)) != own_class:
            raise DumpError(f"the optimizer of the dump is of the class {known}, got {own_class}")
        sizes = [len(group["params"]) for group in stored["param_groups"]]
        own_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own_sizes:
            raise DumpError(f"the optimizer of the dump has groups of {sizes} parameters, got groups of {own_sizes}")


def restore_state(model: nn.Module, state: dict[str, Any], optimizers: list[Optimizer]) -> None:
    """Overwrite parameters, buffers, gradients, modes, which parameters are frozen, and optimizer states."""
    with torch.no_grad(), explained("the state of the model cannot be restored"):
        for name, parameter in model.named_parameters():
            parameter.copy_(state["parameters"][name])
            if "frozen" in state:
                parameter.requires_grad_(name not in state["frozen"])
            gradient = state["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffers"][name])
    for name, module in model.named_modules():
        module.training = name not in state["evaluated"]
    for stored, optimizer in zip(state["optimizers"], optimizers, strict=False):
        kept = optimizer.state_dict()["param_groups"]  # what a dump cannot hold stays as the script has set it
        groups = [own | new for own, new in zip(kept, stored["param_groups"], strict=True)]
        with explained(f"the state of the {type(optimizer).__name__} cannot be restored"):
            optimizer.load_state_dict({"state": stored["state"], "param_groups": groups})


def _renamed(state: dict[str, Any], model: nn.Module, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of a dump under the names of a model, which are aligned by their order.

    What belongs to the program stays the program's own: modes, frozen parameters, buffers that are not persistent, and the classes and
    options of optimizers (a replay sets their learning rates for each step).
    """
    stored: dict[str, str] = {}  # the name in the dump by the own name
    found, given = dict(state), set(names.values())
    for what, tensors in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        own = [name for name, _ in tensors]
        rest = iter([name for name in state[what] if name not in given])
        kept = {name: names.get(name) or next(rest, name) for name in own}
        if set(kept.values()) != state[what].keys():
            raise DumpError(f"the dump has {len(state[what])} {what}, the model has {len(own)}; they cannot be aligned")
        found[what] = {name: state[what][source] for name, source in kept.items()}
        stored |= kept
    gradients = state["gradients"]
    found["gradients"] = {name: gradients[source] for name, source in stored.items() if source in gradients}
    persistent = model.state_dict().keys()
    found["buffers"] |= {name: own for name, own in model.named_buffers() if name not in persistent}
    found["evaluated"] = [name for name, module in model.named_modules() if not module.training]
    found["frozen"] = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    kept_groups = [[{"params": group["params"]} for group in one["param_groups"]] for one in state["optimizers"]]
    found["optimizers"] = [
        {"state": one["state"], "param_groups": groups}
        for one, groups in zip(state["optimizers"], kept_groups, strict=True)
    ]
    return found


def _described(value: Tensor) -> str:
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def replay(
    dump: str | os.PathLike[str] | Dump,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    *,
    step: Step | None = None,
    rules: Iterable[str | Rule] | None = None,
) -> Replay:
    """Run the step of a dump again, with the same state, batch and random numbers, and compare what is measured.

    The dump must hold the state of the training, see ``state_every`` of `ikkuna.diagnosis.RecorderOptions`.
    The steps from the state before the dump's step up to that step are run one after another.

    Parameters
    ----------
    dump : path or Dump
        The dump.
    model : nn.Module
        A model of the same structure; its parameters and buffers are overwritten.
    loss : nn.Module, optional
        The loss module; without it the model must return its loss, or an object with the attribute ``loss``.
    optimizer : Optimizer or iterable of them
        Optimizers of the same parameters; their states are overwritten.
    step : callable, optional
        ``step(model_calls, loss_calls)`` runs a step, for loops that do more than a forward, a backward and an optimizer's step
        for each micro-batch, such as clipping.  Each call is a pair of positional and named arguments.
    rules : iterable of str or Rule, optional
        The rules; by default those of the training, with their thresholds.

    Returns
    -------
    Replay
        Whether the findings and values are the same.

    Raises
    ------
    DumpError
        If the dump is damaged, lacks the state or the batches, or does not fit the model or the optimizer.
    ConfigTypeError
        If an argument has the wrong type.
    """
    run, steps = prepare(dump, model, loss, optimizer, step)
    return run.compare(steps, _rules(run.dump, rules))


def prepare(
    dump: str | os.PathLike[str] | Dump,
    model: nn.Module,
    loss: nn.Module | None = None,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    step: Step | None = None,
    names: Mapping[str, str] | None = None,
) -> tuple[ReplayRun, list[dict[str, Any]]]:
    """Restore the state of a dump; return what runs steps from there, and the steps.

    Parameters
    ----------
    dump : path or Dump
        The dump.
    model : nn.Module
        A model; its parameters and buffers are overwritten.
    loss : nn.Module, optional
        The loss module.
    optimizer : Optimizer or iterable of them
        Optimizers; their states are overwritten.
    step : callable, optional
        Runs a step, see `replay`.
    names : dict, optional
        If given, the model may have other names: its parameters and buffers are those of the dump in their order, except
        for these, which are given by their name in the dump.

    Raises
    ------
    DumpError, ConfigTypeError
        As for `replay`.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = dump if isinstance(dump, Dump) else read_dump(dump)
    if not (found.has("state.pt") and found.has("batches.pt")):
        left_out = found.facts["left_out"]
        why = left_out.get("state.pt") or left_out.get("batches.pt") or "RecorderOptions(state_every=10) records them"
        raise DumpError(f"the dump '{found.path}' has no state and batches to replay: {why}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    state, batches = found.tensors("state.pt"), found.tensors("batches.pt")
    steps = [batch for batch in batches if state["step"] <= batch["step"] <= found.step]
    is_whole = len(steps) == found.step - state["step"] + 1
    if not steps or not is_whole or any(batch["step"] != state["step"] + i for i, batch in enumerate(steps)):
        raise DumpError(f"the dump lacks batches of the steps {state['step']} to {found.step}")
    if names is not None:
        state = _renamed(state, model, names)
    check_fits(found, model, state, optimizers)
    restore_state(model, state, optimizers)
    return ReplayRun(found, model, loss, optimizers, step), steps


def _rules(dump: Dump, given: Iterable[str | Rule] | None) -> tuple[Rule, ...]:
    """Return the rules of the training, with their thresholds."""
    if given is not None:
        return get_rules(given)
    rules = []
    for facts in dump.facts["rules"]:
        try:
            [rule] = get_rules([facts["name"]])
        except ImportError as error:
            raise DumpError(f"the rule {facts['name']!r} is not installed; pass it in rules=") from error
        for name in ("patience", *rule.thresholds):
            setattr(rule, name, facts.get(name, getattr(rule, name)))
        rules.append(rule)
    return tuple(rules)
