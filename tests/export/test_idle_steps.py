"""Steps that a few hooks only count: what is measured and known of their losses does not change."""

import contextlib
import math
import pathlib
import random
import sys
import threading
from itertools import count, pairwise

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis.check import check
from ikkuna.diagnosis.history import GRADIENTS
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.metrics.live_rules import RuleSubscriber
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.hook_functions import hook_functions
from ikkuna.observation.hooks.gradients import GradientNorm
from ikkuna.observation.hooks.hook import Hook
from ikkuna.observation.idle_steps import IdleSteps
from ikkuna.observation.model.parameters import TrackedParameters
from ikkuna.observation.step_cycle import StepCycle
from ikkuna.store import read_run
from ikkuna.support.modules import NamedModule
from tests.diagnosis.test_right_programs import PROGRAMS
from tests.export.test_turns import PARTS, Descent, Model

KINDS_OF_LOOPS = (
    *(
        "actor_critic",
        "wasserstein_gan",
        "forward_forward",
        "heads_that_take_turns",
        "closures",
        "sharpness_aware_minimisation",
    ),
    *(
        "a_gradient_scaler",
        "accumulation_with_a_scaler_and_clipping",
        "scaled_and_unscaled_by_hand",
        "a_graph_in_each_step",
    ),
    *(
        "target_network_by_polyak_averaging",
        "an_average_is_evaluated_in_place_of_the_weights",
        "batches_of_one",
        "cyclic",
    ),
)


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


def train_another(x, another, optimizer):
    another(x).sum().backward()
    optimizer.step()


def compute_another_twice(model, x, another):
    """Another network has the watched one as its input, and the gradients of the latter are not added up."""
    torch.autograd.grad(another(model(x, PARTS)).sum(), another.parameters(), retain_graph=True)


def transform(model, x):
    """The gradient by torch.func, whose tensors cannot be read."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (x, PARTS)).sum())(weights)


def repeat_backward(model, x):
    value = model(x, PARTS).square().sum()
    for is_kept in (True, False):
        value.backward(retain_graph=is_kept)


def log_value(exporter, model, x, optimizers, number, seen):
    exporter.log("value", number)
    tracker = exporter._session.context.tracker
    seen.append(
        (
            str(tracker.pass_stamp("training")),
            tracker.state,
            tracker.forwards.latest is None,
            len(tracker.calls[0].running),
        )
    )


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
    lambda e, m, x, o, n, s: train_another(x, other := nn.Linear(2, 2), Descent(other.parameters())),
    lambda e, m, x, o, n, s: compute_another_twice(m, x, nn.Linear(2, 2)),
    lambda e, m, x, o, n, s: repeat_backward(m, x),
    lambda e, m, x, o, n, s: transform(m, x),
)


def watch_norms(bus, kind, every, seen):
    def take(message):
        seen.append((every, kind, message.module, str(message.stamp), message.data.norm().item()))

    bus.register_subscriber(CallbackSubscriber(kind, take, subsample=every))


def run_disturbed(seed, every, directory, is_judged=False):
    """Train with disturbances; return everything that was published, the number of steps, and of those that were counted only.

    If it is judged, the losses and learning rates that rules and the flight recorder have of every step are returned as well.
    """
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
            bus.register_subscriber(event) if not is_judged else None
        if is_judged:
            rules_every = every if seed % 4 else 1  # which is thinned after 30 steps
            exporter.apply_rules(["loss_spike", "diverges", "lr_too_high"], every=rules_every, backend="null")
            exporter.record_steps()
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
    return (seen, steps, [p.tolist() for p in model.parameters()], judged_values(exporter)), counted


def judged_values(exporter):
    """Return the series of the rules and their findings, and what the flight recorder keeps of every step but its duration."""
    if exporter._attachment.rules is None:
        return None
    exporter.message_bus.drain(wait=True)
    history = exporter._attachment.rules.judge.history
    curves = {(kind, name): (list(c.steps), list(c.values)) for kind, _, name, c in history.all_curves()}
    log = exporter._attachment.recorder._steps._log.arrays()
    kept = {name: log[name].tolist() for name in ("log_steps", "loss", "learning_rates", "skipped")}
    return str(curves), str(history.scored["loss"].latest), [str(finding) for finding in exporter.findings], str(kept)


@pytest.mark.parametrize("is_judged", [False, True])
def test_steps_that_are_only_counted_change_nothing(monkeypatch, tmp_path, is_judged):
    measure_no_step_by_itself(monkeypatch)
    counted = 0
    for seed in range(24):
        every = (7, 20)[seed % 2]
        with monkeypatch.context() as patch:
            if not seed % 3:  # without the native functions
                patch.setattr(Hook, "counted", lambda self: self)
            quick, number = run_disturbed(seed, every, tmp_path, is_judged)
        with monkeypatch.context() as patch:
            patch.setattr(IdleSteps, "begin", lambda self, plans: None)
            slow, none = run_disturbed(seed, every, tmp_path, is_judged)
        assert quick == slow, (seed, every)
        assert none == 0
        counted += number
    assert counted > 400


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


@pytest.mark.parametrize("with_module", [False, True])
def test_a_step_between_samples_of_a_default_watch_makes_few_calls(with_module, tmp_path):
    model, loss, counts = Model(), nn.MSELoss(), []
    optimizer, home = torch.optim.SGD(model.parameters(), 0.01), str(pathlib.Path(ikkuna.__file__).parent)
    with ikkuna.watch(model, *([loss] if with_module else []), log_dir=tmp_path, verbosity=0) as watched:
        for step in range(29):
            codes = []
            if step in (23, 27):
                sys.setprofile(lambda frame, event, _, codes=codes: event == "call" and codes.append(frame.f_code))
            optimizer.zero_grad()
            value = loss(model(torch.ones(4, 2), PARTS), torch.zeros(4, 2))
            value.backward()  # its graph lives until the next loss, as in most loops
            optimizer.step()
            sys.setprofile(None)
            counts += [len([code for code in codes if code.co_filename.startswith(home)])] if codes else []
    is_native = with_module and hook_functions(library(), wait=True) is not None
    assert 0 < min(counts) <= max(counts) <= (2 if is_native else 30)
    assert watched.health().steps == 29


def test_steps_are_counted_until_facts_are_read_and_their_losses_are_delivered_in_blocks(monkeypatch, tmp_path):
    model, loss, opened, blocks = Model(), nn.MSELoss(), [], []
    optimizer, compute, record = (
        torch.optim.SGD(model.parameters(), 0.01),
        RuleSubscriber.compute_losses,
        StepCycle.record,
    )

    def compute_losses(rules, block):
        blocks.append((block.first.global_step, len(block.losses)))
        compute(rules, block)

    monkeypatch.setattr(RuleSubscriber, "compute_losses", compute_losses)
    monkeypatch.setattr(
        StepCycle, "record", lambda self, stamp: (opened.append(stamp.global_step), record(self, stamp))
    )
    own = NormSubscriber("weights", subsample=1000)
    with ikkuna.watch(model, own, loss=loss, rules=["loss_spike"], preflight=False, log_dir=tmp_path, verbosity=0):
        for _ in range(402):
            optimizer.zero_grad()
            loss(model(torch.ones(4, 2), PARTS), torch.zeros(4, 2)).backward()
            optimizer.step()
    late = [step for step in opened if step >= 300]
    assert late == [320, 360, 400]
    assert blocks[-3:] == [(321, 39), (361, 39), (401, 1)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS_OF_LOOPS)
def test_a_program_has_the_same_values_whether_its_steps_are_only_counted(name, monkeypatch, tmp_path):
    measure_no_step_by_itself(monkeypatch)
    quick = run_program(name, tmp_path)
    monkeypatch.setattr(IdleSteps, "begin", lambda self, plans: None)
    assert quick == run_program(name, tmp_path)


def measure_no_step_by_itself(monkeypatch):
    monkeypatch.setattr(RuleSubscriber, "loss_threshold", lambda self: math.inf)
    monkeypatch.setattr(RuleSubscriber, "gradient_threshold", lambda self: None)


def run_program(name, directory):
    torch.manual_seed(1)
    model, loss, step = PROGRAMS[name][0]()
    with ikkuna.watch(model, loss=loss, log_dir=directory, backend="null", verbosity=0) as exporter:
        for _ in range(45):
            step()
    return judged_values(exporter), exporter.health().steps, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("place", ["before", "after the forward", "after the backward"])
@pytest.mark.parametrize("depth", [1, 40, 1500])
def test_the_training_of_another_model_ends_nothing(place, depth, tmp_path):
    model, another = Model(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))
    optimizer, another_optimizer = (torch.optim.SGD(each.parameters(), 0.01) for each in (model, another))
    x, losses = torch.ones(4, 2), []

    def train_here(now):
        if now == place:
            train_another(x, another, another_optimizer)

    with ikkuna.watch(model, log_dir=tmp_path, verbosity=0) as watched:
        for _ in range(60 if depth < 1500 else 25):
            optimizer.zero_grad()
            train_here("before")
            loss = model(x, PARTS).square().sum()
            train_here("after the forward")
            loss.backward()
            train_here("after the backward")
            optimizer.step()
            losses.append(loss.item())
        counted = watched._session.cycle._idle.steps
        found = watched._attachment.rules.judge.history.scored["loss"].latest
    assert [loss for _, loss, _ in found] == losses
    assert counted >= 45 or depth == 1500  # rows are read in the first 8 steps; a graph too large to tell whose it is


def add_in_place(model, optimizer, loss, x, y):
    value = loss(model(x, PARTS), y)
    value += 0.1 * model.a.weight.square().sum()
    value.backward()
    optimizer.step()


def divide_in_place_before_another_call(model, optimizer, loss, x, y):
    value = loss(model(x, PARTS), y)
    value /= 4
    loss(torch.zeros(4, 2), y)
    value.backward()
    optimizer.step()


def keep_only_a_sum(model, optimizer, loss, x, y):
    (loss(model(x, PARTS), y) + model.a.weight.square().sum()).backward()
    optimizer.step()


def step_without_backward(model, optimizer, loss, x, y):
    loss(model(x, PARTS), y)
    optimizer.step()


def train_another_inside(model, optimizer, loss, x, y):
    output = model(x, PARTS)
    loss(nn.Linear(2, 2)(x), y).backward()
    loss(output, y).backward()
    optimizer.step()


def ask_a_teacher(model, optimizer, loss, x, y):
    output, teacher = model(x, PARTS), nn.Linear(2, 2)
    with torch.no_grad():
        loss(teacher(x), y)
    value = loss(output, y)
    with torch.no_grad():
        loss(teacher(x), y)
    value.backward()
    with torch.no_grad():
        loss(teacher(x), y)
    optimizer.step()


def show_again(model, optimizer, loss, x, y):
    output = model(x, PARTS)
    loss(output.flatten(), y.flatten()).backward()
    with torch.no_grad():
        loss(output, y)
        loss(output.detach().flatten(), y.flatten())
    optimizer.step()


def fail_without_gradients(model, optimizer, loss, x, y):
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss(model(x, PARTS), y).backward()
    model.requires_grad_(True)


UNUSUAL_LOSSES = (
    *(add_in_place, divide_in_place_before_another_call, keep_only_a_sum),
    *(step_without_backward, train_another_inside, fail_without_gradients, ask_a_teacher, show_again),
)


def run_with_unusual_losses(unusual, directory):
    """Train with a loss module, and do something else with its result in four steps of which only the loss is wanted."""
    torch.manual_seed(0)
    model, loss = Model(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ikkuna.watch(model, loss, log_dir=directory, backend="null", verbosity=0) as watched:
        for number in range(45):
            x = torch.randn(4, 2)
            if number in (11, 14, 23, 37):
                unusual(model, optimizer, loss, x, x.flip(1))
            optimizer.zero_grad()
            loss(model(x, PARTS), x.flip(1)).backward()
            optimizer.step()
        counted = watched._session.cycle._idle.steps
    health = watched.health()
    assert health.errors == 0
    return (judged_values(watched), health.steps, [p.tolist() for p in model.parameters()]), counted


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("unusual", UNUSUAL_LOSSES)
def test_a_loss_is_what_its_module_returned_whatever_becomes_of_the_result(unusual, is_native, monkeypatch, tmp_path):
    measure_no_step_by_itself(monkeypatch)
    if not is_native:
        monkeypatch.setattr(Hook, "counted", lambda self: self)
    quick, counted = run_with_unusual_losses(unusual, tmp_path)
    monkeypatch.setattr(IdleSteps, "begin", lambda self, plans: None)
    slow, none = run_with_unusual_losses(unusual, tmp_path)
    assert quick == slow
    assert counted > none == 0


def add_a_penalty(loss, model, number):
    return loss + 0.1 * model.a.weight.square().sum()


def divide(loss, model, number):
    return loss / 2


def change_nothing(loss, model, number):
    return loss / 1


def add_a_penalty_at_times(loss, model, number):
    return add_a_penalty(loss, model, number) if number % 3 else loss


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("objective", [add_a_penalty, divide, change_nothing, add_a_penalty_at_times])
def test_steps_whose_backward_begins_at_a_function_of_the_loss_are_counted(
    objective, asks, is_native, monkeypatch, tmp_path
):
    """The same is recorded if a call behind the backward of some steps lets the tracker have their events."""
    measure_no_step_by_itself(monkeypatch)
    if not is_native:
        monkeypatch.setattr(Hook, "counted", lambda self: self)
    taken = []

    def run(directory):
        torch.manual_seed(0)
        model, loss, teacher = Model(), nn.MSELoss(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with ikkuna.watch(model, loss, log_dir=directory, verbosity=0) as watched:
            for number in range(65):
                x = torch.randn(4, 2)
                optimizer.zero_grad()
                objective(loss(model(x, PARTS), x.flip(1)), model, number).backward()
                if asks and number in (13, 22, 34, 47):
                    watched.log("teacher", teacher(x).mean().item())
                optimizer.step()
            taken.append(watched._session.cycle._idle.steps)
        stored = read_run(directory / "run0001")
        shown = [
            (name, stored.series("loss", name).steps.tolist(), stored.series("loss", name).values.tolist())
            for name in stored.names("loss")
        ]
        return judged_values(watched), shown, [p.tolist() for p in model.parameters()]

    quick = run(tmp_path / "quick")
    monkeypatch.setattr(IdleSteps, "begin", lambda self, plans: None)
    assert quick == run(tmp_path / "slow")
    assert taken[0] > 25 > taken[1] == 0


class LossAndParts(nn.Module):
    def forward(self, outputs, labels):
        loss = (outputs - labels).square().mean()
        return loss, {"total": loss.item()}


def test_a_loss_module_may_return_more_than_a_loss(tmp_path):
    model, loss = Model(), LossAndParts()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ikkuna.watch(model, loss, log_dir=tmp_path, backend="null", verbosity=0) as watched:
        for _ in range(45):
            x = torch.randn(4, 2)
            optimizer.zero_grad()
            loss(model(x, PARTS).flatten(), x.flatten())[0].backward()
            optimizer.step()
    assert watched.health().errors == 0
    assert watched.health().steps == 45


def train_with_norms(exporter, model, loss, steps, clip=None, rate=0.01):
    """Train, and return the norm of the gradients that the optimizer receives in each step, in float64."""
    optimizer, norms = torch.optim.SGD(model.parameters(), rate), []
    torch.manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(torch.randn(4, 2), PARTS), torch.randn(4, 2)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
        norms.append(torch.cat(gradients).norm().item())
        optimizer.step()
    exporter.message_bus.drain(wait=True)
    return norms


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("is_native", [True, False])
def test_norms_of_gradients_are_read_between_samples(is_native, clip, monkeypatch, tmp_path):
    """Each of them is right, and it is the same kind as that of the sampled steps."""
    monkeypatch.setattr("ikkuna.observation.hooks.gradients._SHARE", 1e9)  # in each step
    if not is_native:
        monkeypatch.setattr(Hook, "counted", lambda self: self)
    model, loss = Model(), nn.MSELoss()
    with ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0) as watched:
        norms = train_with_norms(watched, model, loss, 95, clip=clip)
        curve = watched._attachment.rules.judge.history.curve(GRADIENTS)
        counted = watched._session.cycle._idle.steps
    steps, values = list(curve.steps), list(curve.values)
    assert steps == sorted(set(steps))
    assert len(steps) >= counted + 10 > 70
    assert values == pytest.approx([norms[step] for step in steps], rel=1e-6)


def test_norms_are_read_as_often_as_their_cost_permits(monkeypatch, tmp_path):
    model, loss, read, steps = Model(), nn.MSELoss(), GradientNorm.read, []
    monkeypatch.setattr("ikkuna.observation.hooks.gradients._SHARE", 0.15)
    clock = count(step=1.0)  # a reading takes one second, and so does a step
    monkeypatch.setattr("ikkuna.observation.hooks.gradients.perf_counter", lambda: next(clock))
    with ikkuna.watch(model, loss, every=1000, log_dir=tmp_path, verbosity=0) as watched:

        def read_now(norm, step, seconds):
            steps.append(step)
            return read(norm, step, 1.0)

        monkeypatch.setattr(GradientNorm, "read", read_now)
        train_with_norms(watched, model, loss, 900)
    distances = [b - a for a, b in pairwise(steps)]
    assert set(distances) <= {7, 8, 9}  # steps that are measured are not read
    assert distances.count(7) > 0.8 * len(distances) > 80


@pytest.mark.parametrize("factor", [1e4, math.inf])
@pytest.mark.parametrize("at", [203, 204])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_step_whose_gradients_jump_is_measured_itself(is_native, at, factor, monkeypatch, tmp_path):
    """The loss of the step is usual: only its gradients are large, as after an error in a backward function."""
    monkeypatch.setattr("ikkuna.observation.hooks.gradients._SHARE", 1e9)
    if not is_native:
        monkeypatch.setattr(Hook, "counted", lambda self: self)
    model, loss, steps = Model(), nn.MSELoss(), []
    model.a.weight.register_hook(lambda gradient: gradient * (factor if len(steps) == at else 1))
    model.b.register_forward_pre_hook(lambda module, inputs: steps.append(1) if module.training else None)
    with ikkuna.watch(model, loss, every=100, log_dir=tmp_path, verbosity=0) as watched:
        train_with_norms(watched, model, loss, 240, rate=1e-5)
        history, found = watched._attachment.rules.judge.history, {each.rule: each for each in watched.findings}
        norms = history.curves("weight_gradients_norm2")
    jumped = at - 1
    assert all(jumped in curve.steps for curve in norms.values())
    if math.isfinite(factor):
        jump = found["gradient_jump"]
        assert (jump.step, jump.severity) == (jumped, "info")
        assert "in the gradient of a." in jump.message
        assert [f.step for f in check(tmp_path / "run0001", rules="default") if f.rule == "gradient_jump"] == [jumped]
    else:
        assert (found["nonfinite"].step, found["nonfinite"].module) == (jumped, "a")


@pytest.mark.parametrize("at", [203, 204])
def test_a_jump_that_the_batch_made_is_an_info_at_every_step(at, tmp_path):
    """The step is measured itself, so it is known what the movement of the weights explains of the jump."""
    torch.manual_seed(0)
    model, loss = Model(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0) as watched:
        for step in range(240):
            x = torch.randn(4, 2)
            optimizer.zero_grad()
            loss(model(x, PARTS), x + (100 if step == at else 0)).backward()
            optimizer.step()
    (found,) = (each for each in watched.findings if each.rule == "loss_spike")
    assert (found.step, found.severity) == (at, "info")
    assert "the batch or its labels made it" in found.message


def test_no_norm_is_read_of_a_replaced_weight_before_it_is_observed(monkeypatch, tmp_path):
    """The optimizer steps the new weight, while the old one still has its last gradient."""
    monkeypatch.setattr("ikkuna.observation.hooks.gradients._SHARE", 1e9)
    model, loss, norms = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.MSELoss(), []
    with ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0) as watched:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        owned = optimizer.param_groups[0]["params"]
        for step in range(60):
            if step == 33:
                owned[0] = model[0].weight = nn.Parameter(torch.ones(2, 2))
            if step == 43:
                model[1] = nn.Linear(2, 2)
                owned[:] = model.parameters()
            optimizer.zero_grad()
            loss(model(torch.randn(4, 2)), torch.randn(4, 2)).backward()
            norms.append(torch.cat([p.grad.double().flatten() for p in owned]).norm().item())
            optimizer.step()
        watched.message_bus.drain(wait=True)
        curve = watched._attachment.rules.judge.history.curve(GRADIENTS)
    steps, values = list(curve.steps), list(curve.values)
    assert {32, 40, 42, 50, 59} <= set(steps)
    assert values == pytest.approx([norms[step] for step in steps], rel=1e-6)


def test_gradients_that_cannot_be_read_take_no_larger_share_of_the_time(monkeypatch):
    monkeypatch.setattr("ikkuna.observation.hooks.gradients._SHARE", 0.15)
    clock = count(step=1.0)
    monkeypatch.setattr("ikkuna.observation.hooks.gradients.perf_counter", lambda: next(clock))
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    parameters = TrackedParameters()
    parameters.track([NamedModule("0", model[0]), NamedModule("1", model[1])], [model])
    model(torch.tensor([1])).sum().backward()
    norm = GradientNorm(parameters)
    assert norm.expect(0) == 0
    assert norm.read(5, 1.0) is None
    assert norm.due == 12
    assert [norm.expect(step) for step in (1, 6, 12)] == [7, 6, 0]
