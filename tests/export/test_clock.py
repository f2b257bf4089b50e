"""One optimizer step is one step, whatever the loop looks like."""

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber, TrainAccuracySubscriber
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop, mlp


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


class Watched:
    """A model under an exporter that notes every event and every sampled activation."""

    def __init__(self, bus, model, subsample=1):
        self.events = []
        self.seen = []
        self.exporter = Exporter(message_bus=bus, on_error="raise")
        self.exporter.add_modules(model)
        kinds = ["batch_started", "batch_finished", "epoch_started", "epoch_finished"]
        bus.register_subscriber(
            CallbackSubscriber(kinds, lambda m: self.events.append((m.kind, m.stamp)), backend="null")
        )
        see = CallbackSubscriber(
            "activations", lambda m: self.seen.append((m.global_step, m.name)), subsample=subsample, backend="null"
        )
        bus.register_subscriber(see)

    def steps(self, kind="batch_finished"):
        return [stamp.global_step for k, stamp in self.events if k == kind]


def train_step(model, *optimizers):
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def sgd(*modules):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


@pytest.mark.parametrize("name", CASES)
def test_every_loop_has_as_many_steps_as_optimizer_steps(name, bus):
    loop = Loop(CASES[name])
    watched = Watched(bus, loop.model)
    loop.run(4)
    watched.exporter.close()
    assert watched.steps() == [0, 1, 2, 3]
    assert watched.steps("batch_started") == [0, 1, 2, 3]


def test_a_step_is_over_right_after_the_optimizer_if_that_owns_everything(bus, model):
    watched = Watched(bus, model)
    train_step(model, sgd(model))
    assert watched.steps() == [0]
    watched.exporter.close()


def test_two_optimizers_make_one_step(bus, model):
    watched = Watched(bus, model)
    optimizers = sgd(model[0]), sgd(model[1])
    for _ in range(3):
        train_step(model, *optimizers)
    assert watched.steps() == [0, 1, 2]
    watched.exporter.close()


def test_an_optimizer_of_a_part_closes_its_first_step_at_the_next_forward(bus, model):
    watched = Watched(bus, model)
    optimizer = sgd(model[0])
    train_step(model, optimizer)
    assert watched.steps() == []
    train_step(model, optimizer)
    assert watched.steps() == [0, 1]
    watched.exporter.close()
    assert watched.steps() == [0, 1]


def test_the_last_step_is_delivered_by_close(bus, model):
    watched = Watched(bus, model)
    train_step(model, sgd(model[0]))
    watched.exporter.close()
    assert watched.steps() == [0]


def test_evaluation_in_between_is_not_looked_at(bus, model):
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(2):
        train_step(model, optimizer)
        model.eval()
        model(torch.ones(1, 2))
        model.train()
        with torch.no_grad():
            model(torch.ones(1, 2))
    watched.exporter.close()
    assert watched.seen == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]


def test_evaluation_inside_an_accumulated_step_is_not_looked_at(bus, model):
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
    optimizer.step()
    watched.exporter.close()
    assert watched.seen == [(0, "0"), (0, "1")] * 2


def test_loss_of_an_evaluation_is_not_the_loss_of_the_step(bus):
    loop = Loop(CASES["mlp-evaluated"])
    recording = RecordingBackend()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        bus.register_subscriber(NormSubscriber("loss", backend=recording))
        bus.register_subscriber(TrainAccuracySubscriber(backend=recording))
        losses = loop.run(3)
    assert [v for s, v, _ in recording.values if s.kind == "loss_norm2"] == pytest.approx(
        [x.item() for x in losses], rel=1e-6
    )


def test_subsampling_counts_steps_and_starts_at_0(bus, model):
    watched = Watched(bus, model, subsample=3)
    optimizer = sgd(model)
    for _ in range(7):
        train_step(model, optimizer)
    watched.exporter.close()
    assert sorted({step for step, _ in watched.seen}) == [0, 3, 6]


def test_epochs_restart_the_train_step(bus, model):
    watched = Watched(bus, model)
    optimizer = sgd(model)
    for _ in range(2):
        for _ in range(2):
            train_step(model, optimizer)
        watched.exporter.epoch_finished()
    watched.exporter.close()
    stamps = [(k, s.global_step, s.train_step, s.epoch) for k, s in watched.events if k != "batch_started"]
    assert stamps == [
        ("epoch_started", 0, 0, 0),
        ("batch_finished", 0, 0, 0),
        ("batch_finished", 1, 1, 0),
        ("epoch_finished", 1, 1, 0),
        ("epoch_started", 2, 0, 1),
        ("batch_finished", 2, 0, 1),
        ("batch_finished", 3, 1, 1),
        ("epoch_finished", 3, 1, 1),
    ]


def test_another_pass_is_one_row_under_its_own_name(bus, model):
    recording = RecordingBackend()
    optimizer = sgd(model)
    outputs = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(NormSubscriber("network_output", tag="testing", backend=recording))
        bus.register_subscriber(NormSubscriber("network_output", tag="training", subsample=100, backend=recording))
        for _ in range(3):
            train_step(model, optimizer)
        exporter.test()
        with torch.no_grad():
            outputs = [model(torch.full((1, 2), float(i))) for i in range(4)]
        exporter.train()
        train_step(model, optimizer)
    values = [(s.pass_name, step, v) for s, v, step in recording.values]
    expected = torch.cat(outputs).norm().item()
    assert values[0][:2] == ("training", 0)
    assert values[1:] == [("testing", 2, pytest.approx(expected, rel=1e-6))]


def test_a_pass_inside_an_accumulated_step_leaves_the_step_whole(bus, model):
    watched = Watched(bus, model)
    model(torch.ones(1, 2)).sum().backward()
    watched.exporter.test()
    model(torch.ones(1, 2))
    watched.exporter.train()
    train_step(model, sgd(model))
    watched.exporter.close()
    assert watched.seen == [(0, "0"), (0, "1")] * 2
    assert watched.steps() == [0]


def test_a_forward_that_raises_does_not_unbalance_the_clock(bus, model):
    watched = Watched(bus, model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    optimizer = sgd(model)
    for _ in range(2):
        train_step(model, optimizer)
    watched.exporter.close()
    assert watched.steps() == [0, 1]


def test_a_step_that_raises_does_not_stop_the_clock(bus, model):
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("no")
            return super().step(closure)

    watched = Watched(bus, model)
    optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no"):
        train_step(model, optimizer)
    optimizer.fails = False
    train_step(model, optimizer)
    train_step(model, optimizer)
    watched.exporter.close()
    assert watched.steps()[-1] == 1


def test_a_closure_that_raises_does_not_stop_the_clock(bus, model):
    watched = Watched(bus, model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    recording = RecordingBackend()
    bus.register_subscriber(NormSubscriber("weights", modules="0", backend=recording))
    expected = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        if fails:
            raise RuntimeError("no")
        loss.backward()
        return loss

    for fails in (False, True, False, False):
        norm = model[0].weight.norm().item()
        try:
            optimizer.step(closure)
            expected.append(norm)
        except RuntimeError:
            assert fails
    watched.exporter.close()
    assert watched.steps() == [0, 1, 1, 2]  # the second attempt discards the first
    assert [value for _, value, _ in recording.values] == pytest.approx(expected)


def test_a_subclass_that_calls_super_step_is_one_step(bus, model):
    class Wrapping(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    watched = Watched(bus, model)
    optimizer = Wrapping(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, optimizer)
    watched.exporter.close()
    assert watched.steps() == [0, 1, 2]


def test_optimizers_of_other_models_do_not_count(bus, model):
    watched = Watched(bus, model)
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    sgd(other).step()
    assert watched.events == []
    train_step(model, sgd(model))
    watched.exporter.close()
    assert watched.steps() == [0]


def test_step_tells_that_a_step_is_over_where_no_optimizer_does(bus, model):
    watched = Watched(bus, model)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        watched.exporter.step()
    watched.exporter.close()
    assert watched.steps() == [0, 1, 2]
    assert {step for step, _ in watched.seen} == {0, 1, 2}


def test_parts_added_in_a_constructor_get_their_names_from_the_model(bus):
    exporter = Exporter(message_bus=bus)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = exporter(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
            self.head = exporter(nn.Linear(2, 1))

        def forward(self, x):
            return self.head(self.features(x))

    exporter.set_model(Model())
    assert exporter.module_names == {"features.0", "features.1", "head"}
    exporter.close()


def test_depth_says_how_deep_to_look(bus):
    model = nn.Sequential(mlp(), nn.Linear(5, 5))
    names = {}
    for depth in (-1, 0, 1, 2):
        with Exporter(depth, message_bus=bus) as exporter:
            exporter.add_modules(model)
            names[depth] = exporter.module_names
    assert names == {0: {"sequential"}, 1: {"0", "1"}, 2: names[-1], -1: {"0.0", "0.1", "0.2", "0.3", "0.4", "1"}}


@pytest.mark.parametrize("forwards", [3, 30, 101])
def test_a_loop_without_a_step_is_told_what_is_missing(bus, model, caplog, forwards):
    watched = Watched(bus, model)
    for _ in range(forwards):
        model(torch.ones(1, 2)).sum().backward()
    watched.exporter.close()
    told = [record.getMessage() for record in caplog.records if "error: missing_step: " in record.getMessage()]
    assert [text.split()[2] for text in told] == [str(min(forwards, 100))] * (forwards > 3)


def test_a_loop_with_steps_is_told_nothing(bus, model, caplog):
    watched = Watched(bus, model)
    for _ in range(3):
        train_step(model, sgd(model))
    watched.exporter.close()
    assert not caplog.records
