"""Steps of several optimizers: sampling never decides what a step is, and optimizers that take turns are each sampled."""

import contextlib
import random

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, Stamp
from ikkuna.export.subscriber import CallbackSubscriber, LossSubscriber, NormSubscriber
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


@pytest.mark.parametrize(("order", "every", "expected"), SAMPLED[1:3])
def test_a_training_in_turns_samples_these_steps(order, every, expected):
    events = [(kind, "ab".index(name), [name], True) for name in order for kind in ("forward", "backward", "step")]
    for watched in ("events", "parameters", "modules"):
        assert list(sampled_steps([0, 1, 1], events, every, watched)[1]) == expected


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


class Rescaled(torch.optim.SGD):
    """An optimizer of the user's, with torch's step."""


class Wrapper(torch.optim.Optimizer):
    """Has the groups of another optimizer, and does not initialize its base, as some wrappers do."""

    def __init__(self, wrapped):
        self.param_groups = wrapped.param_groups

    def step(self, closure=None):
        raise AssertionError


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adamax, Descent, Rescaled])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_optimizers_are_found_before_their_first_step(kind, is_wrapped):
    model = nn.Linear(2, 2)
    exporter = Exporter(message_bus=MessageBus("found"))
    exporter.add_modules(model)
    optimizer = kind(model.parameters())
    wrapper = Wrapper(optimizer) if is_wrapped else None
    found = exporter._session.context.parameters.optimizers()
    exporter.close()
    assert found in ([optimizer], [wrapper])  # they share their groups


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_are_those_behind_the_hooks_of_the_optimizer_itself(every, tmp_path):
    torch.manual_seed(0)
    model, used, fails = nn.Linear(3, 2), {}, [False]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def clip(*_):
        if fails[0]:
            raise KeyError("of the user")
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    optimizer.register_step_pre_hook(clip)
    with ikkuna.watch(model, log_dir=tmp_path, every=every, verbosity=0) as handle:
        for step in range(9):
            if step == 6:  # a step that fails leaves nothing that is called twice
                model(torch.randn(4, 3)).square().sum().backward()
                fails[0] = True
                with pytest.raises(KeyError):
                    optimizer.step()
                optimizer.zero_grad()
                fails[0] = False
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            used[step] = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            optimizer.zero_grad()
            assert list(optimizer._optimizer_step_pre_hooks.values()) == [clip]
    series = handle.read().series("gradients_global_norm")
    assert dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) == pytest.approx(
        {step: norm for step, norm in used.items() if step % every == 0 or step < 1}, rel=1e-5
    )
