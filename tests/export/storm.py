"""A training whose steps are interrupted between two instructions, and an independent computation of its values."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import ikkuna_subscribers
import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import GlobalNormSubscriber, NormSubscriber, RatioSubscriber, Subscriber
from ikkuna.testing import RecordingBackend

OURS = tuple(str(Path(package.__file__).parent) for package in (ikkuna, ikkuna_subscribers))


class Storm:
    """Calls a function, and raises KeyboardInterrupt at one of the instructions that run in it.

    Parameters
    ----------
    everywhere : bool
        Whether the instructions of torch and of the training loop count as well.
    repeats : int, optional
        How often each instruction counts.
    """

    def __init__(self, everywhere=False, repeats=None):
        self.everywhere, self.repeats = everywhere, repeats

    def run(self, function, at=None):
        """Call `function` and raise at its instruction number `at`; return the number of instructions."""
        self._count, self._at, self.where, self._seen = 0, at, "", Counter()
        sys.settrace(self._called)
        try:
            function()
        finally:
            sys.settrace(None)
        return self._count

    def _called(self, frame, event, arg):
        if not (self.everywhere or frame.f_code.co_filename.startswith(OURS)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._reached

    def _reached(self, frame, event, arg):
        if event == "opcode" and self._counts((frame.f_code, frame.f_lasti)):
            self._count += 1
            if self._count - 1 == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_qualname}"
                raise KeyboardInterrupt
        return self._reached

    def _counts(self, instruction):
        if self.repeats is None:
            return True
        self._seen[instruction] += 1
        return self._seen[instruction] <= self.repeats


class Signals:
    """Calls a function, and sends this process SIGINT after a time in seconds, while it runs or just after it."""

    everywhere, where = True, "a signal"

    def run(self, function, at):
        timer = threading.Timer(at, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            function()
            timer.join()
            time.sleep(0.01)
        finally:
            timer.join()


class Measuring(Subscriber):
    """A norm with a ``measure`` of its own."""

    def __init__(self, **options):
        super().__init__("activations", publishes="own_norm", **options)

    def measure(self, message):
        return message.data.double().square().sum().reshape(1)

    def compute(self, message):
        self.emit(message, message.data.item() ** 0.5)


class Training:
    """A small training that records norms, a joined ratio and a norm of the whole network."""

    def __init__(self, backend=None, subsample=1):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, foreach=False)
        self.bus = MessageBus("storm")
        self.exporter = Exporter(message_bus=self.bus)
        self.exporter.add_modules(self.model)
        self.backend = backend or RecordingBackend()
        options = {"backend": self.backend, "subsample": subsample}
        for kind in ("weights", "activations", "layer_gradients", "weight_updates"):
            self.bus.register_subscriber(NormSubscriber(kind, **options))
        self.bus.register_subscriber(Measuring(**options))
        self.bus.register_subscriber(GlobalNormSubscriber(**options))
        self.bus.register_subscriber(RatioSubscriber(["weight_updates", "weights"], **options))
        self.batch = 0
        self.hooks = self.count_hooks()

    def inputs(self):
        return torch.arange(8.0).reshape(4, 2) / 8 + torch.sin(torch.tensor(float(self.batch)))

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.inputs()).square().sum().backward()
        self.optimizer.step()

    def state(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def count_hooks(self):
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self.model.modules()]

    def expected(self, state):
        """Return the values of a step that begins with `state`, and the state after it, from torch alone."""
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        outputs, x = {}, self.inputs()
        for name, layer in model.named_children():
            x = layer(x)
            x.retain_grad()
            outputs[name] = x
        x.square().sum().backward()
        gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        optimizer.step()
        after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        values = {("gradients_global_norm", None): float(gradients.norm())}
        for name, output in outputs.items():
            values["activations_norm2", name] = values["own_norm", name] = _norm(output)
            values["layer_gradients_norm2", name] = _norm(output.grad)
        weight, updated = state["0.weight"], after["0.weight"]
        values["weights_norm2", "0"] = _norm(weight)
        values["weight_updates_norm2", "0"] = _norm(updated.double() - weight.double())
        values["weight_updates_weights_ratio", "0"] = values["weight_updates_norm2", "0"] / _norm(weight)
        return values, after

    def take(self):
        """Return and forget the recorded values: by step, pairs of a series and a value."""
        taken, self.backend.values = self.backend.values, []
        steps = defaultdict(list)
        for series, value, step in taken:
            steps[step].append(((series.kind, series.name), value))
        return dict(sorted(steps.items()))


def _norm(tensor):
    return float(tensor.detach().double().norm())


def equal(state, other):
    return all(torch.equal(state[name], other[name]) for name in state)


def faults_of(items, expected, is_complete):
    """Return what is wrong with the recorded values of one step."""
    series = [key for key, _ in items]
    found = [f"{key} twice" for key, count in Counter(series).items() if count > 1]
    if is_complete:
        found += [f"{key} is missing" for key in expected.keys() - set(series)]
    for key, value in items:
        if abs(value - expected[key]) > 1e-5 * abs(expected[key]):
            found.append(f"{key} is {value} instead of {expected[key]}")
    return found


def interrupt(training, storm, at, function=None, following=2):
    """Interrupt a step, make two more, and return what is wrong then: with the training, with the values, with the hooks."""
    before = training.state()
    of_interrupted, after = training.expected(before)
    with contextlib.suppress(KeyboardInterrupt):
        storm.run(function or training.step, at)
    found, now = [], training.state()
    if storm.everywhere:
        torch.set_grad_enabled(True)  # torch does not restore it if it is interrupted at the end of no_grad()
    elif not (equal(now, before) or equal(now, after)):
        found.append("the weights are torn")
    if not torch.is_grad_enabled():
        found.append("gradients are off")
        torch.set_grad_enabled(True)
    if not all(module.training for module in training.model.modules()):
        found.append("the model does not train")
        training.model.train()
    complete = []
    for _ in range(following):
        training.batch += 1
        expected, now = training.expected(now)
        complete.append(expected)
        training.step()
        if not equal(training.state(), now):
            found.append("the training differs")
    training.batch += 1
    return found + _faults_of_steps(training, of_interrupted, complete)


def _faults_of_steps(training, of_interrupted, complete):
    steps = training.take()
    numbers = list(steps)
    recorded, rest = numbers[-len(complete) :], numbers[: -len(complete)]
    if len(recorded) < len(complete) or recorded[-1] - recorded[0] != len(complete) - 1 or len(rest) > 1:
        return [f"recorded steps {numbers}"]
    found = []
    for number, expected in zip(recorded, complete, strict=True):
        found += faults_of(steps[number], expected, is_complete=True)
    for number in rest:
        found += faults_of(steps[number], of_interrupted, is_complete=False)
    if training.count_hooks() != training.hooks:
        found.append("hooks are lost or left")
    health = training.exporter.health()
    if health.errors or health.disabled:
        found.append("errors are counted")
    return found
