"""Steps of several optimizers: sampling never decides what a step is, and optimizers that take turns are each sampled."""

import contextlib
import pathlib
import random
import sys
import threading

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, Stamp
from ikkuna.export.subscriber import CallbackSubscriber, LossSubscriber, NormSubscriber
from ikkuna.observation.idle_steps import IdleSteps
from ikkuna.observation.steps.forwards import OptimizerTurns

PARTS = "abc"
WATCHED = {
    "nothing": (),
    "events": ("batch_finished",),
    "parameters": ("batch_finished", "weights", "weight_updates"),
    "modules": ("batch_finished", "loss", "activations", "layer_gradients"),
    "all": (
        "batch_finished",
        "loss",
        "activations",
        "layer_gradients",
        "weights",
        "weight_updates",
        "weight_gradients",
    ),
}
EVERY = 1, 2, 3, 7, 10


class Model(nn.Module):
    """Three parts, called one by one or through the model."""

    def __init__(self):
        super().__init__()
        for name in PARTS:
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x


class Descent(torch.optim.Optimizer):
    """Gradient descent that leaves graphs usable: it writes past the version counters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure=None):
        if closure is not None:
            closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.01)


def random_loop(random):
    """Return the owners of the parts, whether the model is called as a whole, and the events of a loop.

    Iterations are repeated, with changes, as in a training.
    """
    owners = [random.randrange(random.randint(1, 3)) for _ in PARTS]
    whole = random.choice([True, False, None])
    kinds = [
        "forward",
        "forward",
        "backward",
        "backward",
        "step",
        "step",
        "loss",
        "clear",
        "evaluation",
        "closure",
        "probe",
    ]
    weights = [6, 6, 6, 6, 6, 6, 1, 3, 1, random.random() < 0.2, random.random() < 0.2]

    def event():
        names = random.sample(PARTS, random.randint(1, 2))
        is_whole = random.random() < 0.5 if whole is None else whole
        return random.choices(kinds, weights)[0], random.randrange(8), names, is_whole

    iteration = [event() for _ in range(random.randint(3, 10))]
    events = []
    while len(events) < 45:
        events += [event() if random.random() < 0.05 else known for known in iteration]
    return owners, events


def steps_of(owners, events):
    """Return the optimizers of each step, by the definition.

    Each step of an optimizer is one, unless nothing was computed for a backward since the step of another one: they share one.
    """
    steps, computed = [], True
    for kind, choice, _, _ in events:
        if kind in ("forward", "loss", "probe"):
            computed = True
        elif kind in ("step", "closure"):
            optimizer = sorted(set(owners))[choice % len(set(owners))]
            if computed or kind == "closure" or optimizer in steps[-1]:
                steps.append([])
            steps[-1].append(optimizer)
            computed = False
    return steps


def play(model, optimizers, events):
    """Run a loop."""
    losses, outputs = [], []

    def forward(names, is_whole):
        x = torch.ones(1, 2)
        outputs.append(model(x, names) if is_whole else Model.forward(model, x, names))
        losses.append(outputs[-1].square().sum())

    for kind, choice, names, is_whole in events:
        if kind == "forward":
            forward(names, is_whole)
        elif kind == "loss" and outputs:
            losses.append(outputs[-1 - choice % min(len(outputs), 3)].sum())
        elif kind == "backward" and losses:
            losses[-1 - choice % min(len(losses), 3)].backward(retain_graph=True)
        elif kind == "clear":
            model.zero_grad(set_to_none=bool(choice % 2))
        elif kind in ("evaluation", "probe"):
            model.eval()
            with torch.no_grad() if kind == "evaluation" else contextlib.nullcontext():
                model(torch.ones(1, 2), names)
            model.train()
        elif kind in ("step", "closure"):

            def closure(names=names, is_whole=is_whole):
                forward(names, is_whole)
                losses[-1].backward(retain_graph=True)

            optimizer = optimizers[choice % len(optimizers)]
            optimizer.step(*([closure] if kind == "closure" else []))


def sampled_steps(owners, events, every, watched):
    """Run a loop with an exporter; return the number of steps, and the optimizers of each sampled step."""
    torch.manual_seed(0)
    model, bus, seen = Model(), MessageBus(), {}
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    for kind in WATCHED[watched]:
        if kind == "batch_finished":
            keep = CallbackSubscriber(
                kind, lambda m: m.skipped or seen.update({m.global_step: m.optimizers}), subsample=every
            )
            bus.register_subscriber(keep)
        else:
            made = LossSubscriber(subsample=every) if kind == "loss" else NormSubscriber(kind, subsample=every)
            made.show_with("null")
            bus.register_subscriber(made)
    parameters = {o: [] for o in sorted(set(owners))}
    for name, owner in zip(PARTS, owners, strict=True):
        parameters[owner] += getattr(model, name).parameters()
    play(model, [Descent(p) for p in parameters.values()], events)
    exporter.close()
    return exporter.health().steps, seen


def check_random_loops(seeds, combinations):
    for seed in seeds:
        choose = random.Random(seed)
        owners, events = random_loop(choose)
        if "loss" in [e[0] for e in events]:  # a loss needs an output
            events.insert(0, ("forward", 0, ["a"], False))
        expected = steps_of(owners, events)
        order = list(dict.fromkeys(o for step in expected for o in step))
        numbers = [tuple(sorted(order.index(o) for o in step)) for step in expected]
        for every, watched in choose.sample([(e, w) for e in EVERY for w in WATCHED], combinations):
            count, seen = sampled_steps(owners, events, every, watched)
            assert count == len(expected), (seed, every, watched)
            assert seen == {step: numbers[step] for step in seen}, (seed, every, watched)
            if watched != "nothing":
                assert set(range(0, count, every)) <= seen.keys(), (seed, every, watched)


# who steps in turn, and `every`: the sampled steps
SAMPLED = [
    ("a" * 30, 10, [0, 10, 20]),
    ("ab" * 12, 10, [0, 1, 10, 11, 20, 21]),
    ("ab" * 8, 7, [0, 1, 7, 8, 14, 15]),
    ("abc" * 7, 10, [0, 1, 2, 10, 11, 12, 20]),
    ("aaaaab" * 4, 10, [0, 1, 2, 3, 10, 11, 20, 21, 22, 23]),  # 2 to 4 steps in place of one
    (
        "aaaaab" * 5,
        12,
        [0, 1, 2, 3, 12, 17, 24, 29],
    ),  # 12 and 24 are too far from the other optimizer, but its rhythm is known
    ("b" + "a" * 99, 40, [0, 1, 40, 41, 42, 43, 80]),  # b is not expected any more
]


@pytest.mark.parametrize(("order", "every", "expected"), SAMPLED)
def test_optimizers_that_take_turns_are_each_sampled(order, every, expected):
    turns, found = OptimizerTurns(), []
    for step, optimizer in enumerate(order):
        if any(each % every == 0 for each in (step, *(s.global_step for s in turns.completed_by(step)))):
            found.append(step)
        turns.step_closed(Stamp(step, step, 0), {optimizer}, set(order))
    assert found == expected


def test_optimizers_that_step_together_are_sampled_once():
    turns = OptimizerTurns()
    for step in range(5):
        assert turns.completed_by(step) == ()
        turns.step_closed(Stamp(step, step, 0), {1, 2}, {1, 2})


def test_no_layer_is_missing_after_an_optimizer_has_taken_over(tmp_path):
    """The former optimizer still exists, and ``zero_grad()`` stands before the forward, while the step could be shared."""
    model, x = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)), torch.ones(1, 2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    with ikkuna.watch(model, NormSubscriber("activations"), every=1, log_dir=tmp_path, verbosity=0) as watched:
        for step in range(8):
            if step == 4:
                optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
            optimizers[-1].zero_grad()
            model(x).square().sum().backward()
            optimizers[-1].step()
    assert watched.history("activations_norm2", "0").steps.tolist() == list(range(8))


def test_an_optimizer_that_never_steps_is_waited_for_once():
    turns, found = OptimizerTurns(), []
    for step in range(12):
        found += [step] if turns.completed_by(step) else []
        turns.step_closed(Stamp(step, step, 0), {1}, {1, 2})
    assert found == [1, 2, 3]


def test_random_loops_have_the_same_steps_whatever_is_sampled():
    check_random_loops(range(300), 1)


@pytest.mark.slow
def test_ten_thousand_random_loops():
    check_random_loops(range(10_000, 20_000), 2)


def call_in_evaluation(model, x):
    model.eval()
    with torch.no_grad():
        model(x, PARTS)
    model.train()


def fail_in_call(model, x):
    with contextlib.suppress(AttributeError):
        model(x, "d")


def fail_in_step(model, x, optimizer):
    parameters = optimizer.param_groups[0]["params"]
    model(x, PARTS).sum().backward()
    parameters.append(None)
    with contextlib.suppress(AttributeError):
        optimizer.step()
    parameters.pop()


def call_in_thread(model, x):
    thread = threading.Thread(target=lambda: model(x, PARTS).sum().backward())
    thread.start()
    thread.join()


def step_paused(exporter, model, x, optimizer):
    with exporter.paused():
        model(x, PARTS).sum().backward()
        optimizer.step()


def other_pass(exporter, model, x):
    exporter.test()
    model(x, PARTS)
    exporter.train()


def replace_part(model, optimizer):
    model.c = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.c.parameters())})


def log_value(exporter, model, x, optimizers, number, seen):
    exporter.log("value", number)
    tracker = exporter._session.context.tracker
    seen.append((str(tracker.pass_stamp("training")), tracker.state, tracker.latest is None, len(tracker.calls.of(0))))


# exporter, model, input, optimizers, number, what was seen
DISTURBANCES = (
    lambda e, m, x, o, n, s: m(x, PARTS),
    lambda e, m, x, o, n, s: call_in_evaluation(m, x),
    lambda e, m, x, o, n, s: o[0].step(lambda: m(x, PARTS).sum().backward()),
    lambda e, m, x, o, n, s: fail_in_call(m, x),
    lambda e, m, x, o, n, s: fail_in_step(m, x, o[0]),
    lambda e, m, x, o, n, s: Descent(m.a.parameters()).step(),
    lambda e, m, x, o, n, s: o[-1].step(),
    lambda e, m, x, o, n, s: call_in_thread(m, x),
    lambda e, m, x, o, n, s: m.a(x).sum().backward(),
    lambda e, m, x, o, n, s: e.epoch_finished(),
    lambda e, m, x, o, n, s: setattr(e, "steps_per_epoch", n + 2),
    lambda e, m, x, o, n, s: e.step(),
    lambda e, m, x, o, n, s: step_paused(e, m, x, o[0]),
    lambda e, m, x, o, n, s: other_pass(e, m, x),
    lambda e, m, x, o, n, s: e.sample_every(n or None),
    lambda e, m, x, o, n, s: watch_norms(e.message_bus, "biases", 2 + n, s),
    lambda e, m, x, o, n, s: replace_part(m, o[0]),
)


def watch_norms(bus, kind, every, seen):
    def take(message):
        seen.append((every, kind, message.module, str(message.stamp), message.data.norm().item()))

    bus.register_subscriber(CallbackSubscriber(kind, take, subsample=every))


def run_disturbed(seed, every, directory):
    """Train with disturbances; return everything that was published, the number of steps, and of those that were counted only."""
    choose, seen = random.Random(seed), []
    torch.manual_seed(seed)
    model, bus = Model(), MessageBus()
    optimizers = [Descent(model.parameters())]
    if not seed % 6:
        optimizers.append(Descent(model.c.parameters()))
    chosen = [log_value, log_value, *choose.sample(DISTURBANCES, 3)]
    with Exporter(message_bus=bus, on_error="raise", log_dir=directory) as exporter:
        exporter.add_modules(model)
        for kind in ("weights", "activations", "weight_updates", "layer_gradients"):
            watch_norms(bus, kind, every, seen)
        for kind in ("batch_finished", "epoch_started", "epoch_finished"):
            event = CallbackSubscriber(kind, lambda m: seen.append((m.kind, str(m.stamp), m.skipped)), subsample=every)
            bus.register_subscriber(event)
        for _ in range(60):
            for place in ("before", "inside", "after"):
                if choose.random() < 0.05:
                    choose.choice(chosen)(exporter, model, torch.ones(1, 2), optimizers, choose.randrange(4), seen)
                if place == "before":
                    optimizers[0].zero_grad()
                    loss = model(torch.ones(1, 2), PARTS).square().sum()
                elif place == "inside":
                    loss.backward()
                    optimizers[0].step()
        steps, counted = exporter.health().steps, exporter._session.cycle._idle.steps
    return (seen, steps, [p.tolist() for p in model.parameters()]), counted


def test_steps_that_are_only_counted_change_nothing(monkeypatch, tmp_path):
    counted = 0
    for seed in range(30):
        for every in (7, 20):
            quick, number = run_disturbed(seed, every, tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(IdleSteps, "begin", lambda self, plans: None)
                slow, none = run_disturbed(seed, every, tmp_path)
            assert quick == slow, (seed, every)
            assert none == 0
            counted += number
    assert counted > 1000


def test_a_step_that_nobody_samples_makes_few_calls(tmp_path):
    model, bus, codes = Model(), MessageBus(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Exporter(message_bus=bus, log_dir=tmp_path) as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(NormSubscriber("weights", subsample=100))

        def step():
            optimizer.zero_grad()
            model(torch.ones(1, 2), PARTS).sum().backward()
            optimizer.step()

        for _ in range(4):
            step()
        home = str(pathlib.Path(ikkuna.__file__).parent)
        sys.setprofile(lambda frame, event, _: event == "call" and codes.append(frame.f_code))
        try:
            step()
        finally:
            sys.setprofile(None)
    assert 0 < len([code for code in codes if code.co_filename.startswith(home)]) <= 20
    assert exporter.health().steps == 5
