"""Runs recorded steps again, and compares what is measured with a dump."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ikkuna.diagnosis import Dump, Finding, Rule
from ikkuna.diagnosis.flight_recorder.random_states import RandomStates
from ikkuna.diagnosis.flight_recorder.stored_history import feed_history
from ikkuna.errors import DumpError
from ikkuna.export.exporter import Exporter
from ikkuna.export.replay.result import Replay
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.messages.kinds import is_built_in, is_of_module
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values
from ikkuna.observation.rows.observer import StepObserver
from ikkuna.observation.rows.rows import Rows

__all__ = ["ReplayRun", "Step"]

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
            for i, (site, path) in enumerate(rows.keys[: len(rows.values)])
            if rows.values[i, 0]
        }


class _Calls(list[Any]):
    """The calls of the model in a step; before each of them the states of the random generators are restored."""

    def __init__(self, calls: list[Any], states: Callable[[int], RandomStates]) -> None:
        super().__init__(calls)
        self._states = states

    def __iter__(self) -> Iterator[Any]:
        for number, call in enumerate(super().__iter__()):
            self._states(number).restore()
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
        self._dump, self._model, self._loss, self._optimizers = dump, model, loss, optimizers
        self._step = step or self._default_step
        self._random = dump.arrays("random_calls.npz")
        row = int(np.flatnonzero(dump.steps == dump.step)[-1]) if (dump.steps == dump.step).any() else None
        self._expected: Values = np.zeros((0, len(COLUMNS))) if row is None else dump.rows["values"][row]

    def compare(self, steps: list[dict[str, Any]], rules: tuple[Rule, ...]) -> Replay:
        """Run steps, and compare the findings of `rules` and the values of the last step with the dump.

        Parameters
        ----------
        steps : list of dict
            What ``batches.pt`` holds of each step.
        rules : tuple of Rule
            The rules.
        """
        exporter = Exporter(message_bus=MessageBus("replay"), on_error="raise")
        last, new = _LastRows(), list[Finding]()
        try:
            exporter.add_modules(self._model)
            if self._loss is not None:
                exporter.set_loss(self._loss)
            self._request_rows(exporter)
            if rules:
                exporter.apply_rules(
                    rules, every=self._dump.facts["options"]["every"], backend="null", on_finding=new.append
                )
                self._feed(exporter, steps[0]["step"])
            counters = {name: steps[0][name] for name in ("train_step", "epoch")}
            exporter.load_state_dict({"global_step": steps[0]["step"], **counters})
            exporter._session.context.observer = last
            for batch in steps:
                new.clear()
                self._run(batch)
        finally:
            exporter._session.context.observer = None
            exporter.close()
        return self._result(steps[0]["step"], last, tuple(new))

    def _request_rows(self, exporter: Exporter) -> None:
        """Register what measures the statistics that the dump has of its last step."""
        fields: dict[str, set[str]] = {}
        for row, values in zip(self._dump.names, self._expected, strict=False):
            measured = {name for name, value in zip(COLUMNS, values, strict=True) if not np.isnan(value)}
            fields.setdefault(row.kind, set()).update(measured - {"n"})
        for kind, names in fields.items():
            needs_loss = kind in ("loss", "input_labels") and self._loss is None
            if names and not needs_loss and is_built_in(kind) and (is_of_module(kind) or kind in _OF_NETWORK):
                exporter.message_bus.register_subscriber(_RowsSubscriber(kind, tuple(sorted(names))))

    def _feed(self, exporter: Exporter, before: int) -> None:
        rules = exporter._rules
        if rules is not None and self._dump.has("history.npz"):
            feed_history(rules.judge, self._dump.arrays("history.npz"), before)

    def _run(self, batch: dict[str, Any]) -> None:
        step = batch["step"]
        calls = [[_to(call, self._device) for call in batch[name]] for name in ("model_calls", "loss_calls")]
        self._set_rates(step)
        self._random_states(step, 0).restore()
        self._step(_Calls(calls[0], lambda number: self._random_states(step, number)), calls[1])

    def _random_states(self, step: int, number: int) -> RandomStates:
        """Return the states of the random generators before a call of the model."""
        prefix = f"{step} {number} "
        own = {name.removeprefix(prefix): array for name, array in self._random.items() if name.startswith(prefix)}
        if not own:
            raise DumpError(f"the dump lacks the random states of step {step}")
        return RandomStates.of_arrays(own)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._model.parameters()), torch.device("cpu"))

    def _set_rates(self, step: int) -> None:
        """Set the learning rates of the step, which a scheduler may have changed since the state was copied."""
        rows = self._dump.rows
        at = np.flatnonzero(rows["log_steps"] == step)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if not len(at) or len(groups) != rows["learning_rates"].shape[1]:
            return
        for group, rate in zip(groups, rows["learning_rates"][at[-1]].tolist(), strict=True):
            if not np.isnan(rate) and not isinstance(group["lr"], torch.Tensor):
                group["lr"] = rate

    def _default_step(self, model_calls: list[Any], loss_calls: list[Any]) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for number, (args, kwargs) in enumerate(model_calls):
            output = self._model(*args, **kwargs)
            if self._loss is not None:
                rest, named = loss_calls[number]
                output = self._loss(output, *rest, **named)
            value = (
                output
                if isinstance(output, torch.Tensor)
                else output["loss"]
                if isinstance(output, dict)
                else output.loss
            )
            value.backward()
        for optimizer in self._optimizers:
            optimizer.step()

    def _result(self, first: int, last: _LastRows, new: tuple[Finding, ...]) -> Replay:
        compared = equal = 0
        differences = []
        for row, values in zip(self._dump.names, self._expected, strict=False):
            known = ~np.isnan(values)
            if not known.any():
                continue
            got = last.values.get((row.kind, row.module, row.path), np.full(len(COLUMNS), np.nan))
            same = values == got
            compared += int(known.sum())
            equal += int((same & known).sum())
            for i in np.flatnonzero(known & ~same):
                differences.append(f"{COLUMNS[i]} of {row}: {got[i]:.9g}, in the dump {values[i]:.9g}")
        mean = last.values.get(("loss", "", ""), np.full(len(COLUMNS), np.nan))[COLUMN["mean"]]
        losses = self._dump.losses.get(self._dump.step, float("nan")), float(mean)
        return Replay(
            self._dump.step,
            first,
            tuple(self._dump.findings),
            new,
            compared,
            equal,
            losses,
            tuple(differences[:_SHOWN]),
        )


def _to(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value
