"""Metrics of the network as a whole: over modules, of the optimizer, of data that is not trained on."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    ClippingSubscriber,
    GlobalNormSubscriber,
    LearningRateSubscriber,
    LossChangeBoundSubscriber,
    MeanSubscriber,
    MessageMeanSubscriber,
    NonFiniteSubscriber,
    NormSubscriber,
    OptimizerStateSubscriber,
    TestAccuracySubscriber,
    TrainAccuracySubscriber,
)
from ikkuna.observation.rows.rows import Rows
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves, trained
from tests.zoo import CASES, Loop


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2, bias=False))


def test_the_message_mean_is_over_modules_and_once_a_step():
    makers = [
        lambda **o: NormSubscriber("weights", p=1, **o),
        lambda **o: MessageMeanSubscriber("weights_norm1", **o),
        lambda **o: MessageMeanSubscriber("weights", subsample=2, **o),
    ]
    found, before = trained(makers, layers())
    weights = [[w.double() for name, w in step.items() if "weight" in name] for step in before]
    norms = [sum(w.abs().sum().item() for w in step) / 3 for step in weights]
    means = [sum(w.mean().item() for w in step) / 3 for step in weights[::2]]
    assert found["weights_norm1_message_mean", None] == pytest.approx(norms, rel=1e-6)
    assert found["weights_message_mean", None] == pytest.approx(means, rel=1e-5)


def test_one_nan_makes_the_message_mean_nan():
    model = layers()
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    found, _ = trained([lambda **o: MessageMeanSubscriber("weights", **o)], model, steps=1)
    assert math.isnan(found["weights_message_mean", None][0])


def test_the_global_norm_is_the_one_clipping_goes_by():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(nn.utils.get_total_norm([p.grad.double() for p in model.parameters()]).item())
    )
    found, before = trained(
        [lambda **o: GlobalNormSubscriber(**o), lambda **o: GlobalNormSubscriber("weights", **o)], model, 3, optimizer
    )
    assert found["gradients_global_norm", None] == pytest.approx(norms, rel=1e-6)
    weights = [torch.cat([w.flatten() for n, w in s.items() if "weight" in n]).double().norm() for s in before]
    assert found["weights_global_norm", None] == pytest.approx([w.item() for w in weights], rel=1e-6)


def test_a_global_norm_of_norms_is_that_of_the_tensors():
    makers = [
        lambda **o: NormSubscriber("weights", **o),
        lambda **o: GlobalNormSubscriber("weights_norm2", **o),
        lambda **o: GlobalNormSubscriber("weights", **o),
    ]
    found, _ = trained(makers, layers())
    assert found["weights_norm2_global_norm", None] == pytest.approx(found["weights_global_norm", None])


def test_learning_rates_are_one_series_a_group():
    model = layers()
    groups = [{"params": model[0].parameters(), "name": "stem"}, {"params": [*model[2:].parameters()], "lr": 0.5}]
    found, _ = trained([lambda **o: LearningRateSubscriber(**o)], model, 2, torch.optim.SGD(groups, lr=0.25))
    assert found == {("learning_rate", "stem"): [0.25, 0.25], ("learning_rate", "group 1"): [0.5, 0.5]}


def test_the_rate_of_a_single_group_is_the_networks_and_that_of_the_step():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def batch(step):
        scheduler.step() if step else None
        return torch.ones(2, 3)

    found, _ = trained([lambda **o: LearningRateSubscriber(**o)], model, 3, optimizer, batch)
    assert found == {("learning_rate", None): [1.0, 0.5, 0.25]}


def test_what_an_optimizer_keeps_is_shown():
    loop = Loop(CASES["mlp"])
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(OptimizerStateSubscriber("exp_avg", backend=recording))
        bus.register_subscriber(OptimizerStateSubscriber("step", "mean", modules="0", backend=recording))
        bus.register_subscriber(OptimizerStateSubscriber("nothing", backend=recording))
        loop.run(2)
    found = curves(recording)
    for kind, parameter in (("weight", loop.model[2].weight), ("bias", loop.model[2].bias)):
        expected = loop.optimizer.state[parameter]["exp_avg"].double().norm().item()
        assert found[f"{kind}_state_exp_avg_norm2", "2"][-1] == pytest.approx(expected, rel=1e-6)
    assert found["weight_state_step_mean", "0"] == [1.0, 2.0]
    assert not [kind for kind, _ in found if "nothing" in kind]


def test_counts_of_non_finite_gradients_are_published_for_skipped_steps_too():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(NonFiniteSubscriber("layer_gradients", backend=recording))
        bus.register_subscriber(MeanSubscriber("layer_gradients", backend=recording))
        bus.register_subscriber(LearningRateSubscriber(backend=recording))
        for factor in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(3, 2)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    found = curves(recording)
    assert [v for v in found["layer_gradients_nonfinite", "linear"] if v] == [3.0]
    assert len(found["learning_rate", None]) == 2
    assert len(found["layer_gradients_mean", "linear"]) == 1, "in the first step the scale is unknown"


def test_a_step_that_a_fused_optimizer_skips_has_no_learning_rate():
    """The optimizer is called then, and learns from the scaler that it must do nothing."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(LearningRateSubscriber(backend=recording))
        for found_inf in (0.0, 1.0, 0.0):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.found_inf = torch.tensor(found_inf)  # as GradScaler.step does
            optimizer.step()
    assert len(recording.values) == 2


def classification(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 8, generator=generator), torch.randint(5, (n,), generator=generator))


def accuracy(model, data, k=1):
    was = model.training
    model.eval()
    with torch.no_grad():
        top = model(data.tensors[0]).topk(k, 1).indices
    model.train(was)
    return (top == data.tensors[1][:, None]).any(1).double().mean().item()


def test_test_accuracy_is_that_of_all_data_whatever_the_batches():
    """Seven labels in batches of four: the mean of the batches' accuracies would be another number."""
    loop, data = Loop(CASES["mlp"]), classification(7)
    recording, bus = RecordingBackend(), MessageBus()
    expected = []
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        for make in (
            lambda **o: TestAccuracySubscriber(data, batch_size=4, every=2, **o),
            lambda **o: TestAccuracySubscriber(data, batch_size=4, k=3, **o),
        ):
            bus.register_subscriber(make(backend=recording))
        for step in range(5):
            loop.run(1)
            expected += [accuracy(loop.model, data)] if step % 2 == 0 else []
        exporter.epoch_finished()
        top3 = accuracy(loop.model, data, 3)
    found = curves(recording)
    assert found["test_accuracy", None] == pytest.approx(expected)
    assert found["test_accuracy_top3", None] == pytest.approx([top3])
    steps = [step for series, _, step in recording.values if series.kind == "test_accuracy"]
    assert steps == [0, 2, 4]


def test_a_test_that_is_due_when_rows_arrive_late_is_made_by_close(monkeypatch):
    """On a device the last step's rows may reach the host only when the exporter closes."""
    monkeypatch.setattr(Rows, "arrived", lambda self: False)
    loop, data = Loop(CASES["mlp"]), classification(7)
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(TestAccuracySubscriber(data, every=1, backend=recording))
        loop.run(1)
        assert not recording.values
    assert curves(recording)["test_accuracy", None] == [accuracy(loop.model, data)]


class Augmented(Dataset):
    """Items that change at random, from all three generators."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.randn(8) + random.random() + np.random.rand(), 1


def test_making_a_test_accuracy_draws_no_randomness():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    TestAccuracySubscriber(Augmented())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]


@pytest.mark.parametrize("ignored", [-100, 1])
def test_ignored_labels_do_not_count_and_none_at_all_is_nan(ignored):
    data = TensorDataset(torch.randn(4, 8), torch.full((4,), ignored))
    loop = Loop(CASES["mlp"])
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(nn.CrossEntropyLoss(ignore_index=ignored))
        bus.register_subscriber(TestAccuracySubscriber(data, every=1, backend=recording))
        loop.run(1)
    assert math.isnan(curves(recording)["test_accuracy", None][0])


@pytest.mark.parametrize("k", [1, 2])
def test_train_accuracy_over_micro_batches(k):
    loop = Loop(CASES["mlp-accumulated"])
    recording, bus = RecordingBackend(), MessageBus()
    hits = []

    def note(module, args, output):
        top = args[0].topk(k, 1).indices
        hits.append((top == args[1][:, None]).any(1))

    loop.loss.register_forward_hook(note)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        exporter.set_loss(loop.loss)
        bus.register_subscriber(TrainAccuracySubscriber(k=k, backend=recording))
        loop.run(1)
    assert len(hits) == 3
    share, broken = curves(recording).values()
    assert share == pytest.approx([torch.cat(hits).double().mean().item()])
    assert broken == [0.0]


class Told(nn.Module):
    """Returns the logits it is called with, and has a weight for the optimizer to step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, logits):
        return logits + 0 * self.layer.weight.sum()


def classified(make, *batches):
    """Show a metric of accuracy the logits and labels of each step."""
    recording, bus, model = RecordingBackend(), MessageBus(), Told()
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.0)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        bus.register_subscriber(make(backend=recording))
        for logits, labels in batches:
            loss(model(logits), labels).backward()
            optimizer.step()
    return {kind: values for (kind, _), values in curves(recording).items()}


def test_the_running_accuracy_averages_counts():
    """Uneven batches and ignored labels: the mean of shares would be another."""
    generator = torch.Generator().manual_seed(0)
    sizes, beta = [40, 3, 17, 1], 0.7
    batches = [(torch.randn(n, 4, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]
    batches[0][1][:20] = -100
    found = classified(lambda **o: TrainAccuracySubscriber(beta=beta, **o), *batches)
    right = valid = 0.0
    for value, (logits, labels) in zip(found["running_accuracy"], batches, strict=True):
        right = beta * right + (logits.argmax(1) == labels).sum().item()
        valid = beta * valid + (labels != -100).sum().item()
        assert value == pytest.approx(right / valid)


@pytest.mark.parametrize("options", [{}, {"beta": 0.9}, {"k": 3}])
def test_rows_that_are_not_finite_are_wrong_and_counted(options):
    logits = torch.zeros(6, 3)
    logits[:, 0] = 1.0
    logits[1, 0], logits[2, 2], logits[3, 1], logits[4] = math.nan, math.inf, -math.inf, math.nan
    labels = torch.tensor([0, 0, 0, 0, -100, 0])
    share, broken = classified(lambda **o: TrainAccuracySubscriber(**options, **o), (logits, labels)).values()
    assert share == [3 / 5]
    assert broken == [2]


def test_the_test_accuracy_counts_rows_that_are_not_finite():
    loop, recording = Loop(CASES["mlp"]), RecordingBackend()
    inputs = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    inputs[[2, 5]] = math.nan
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        data = TensorDataset(inputs, torch.zeros(9, dtype=torch.long))
        exporter.message_bus.register_subscriber(TestAccuracySubscriber(data, every=1, k=5, backend=recording))
        loop.run(1)
    found = curves(recording)
    assert found["test_accuracy_top5", None] == [7 / 9]
    assert found["test_nonfinite_rows_top5", None] == [2]


def test_one_name_is_that_of_the_accuracy():
    [(kind, values)] = classified(
        lambda **o: TrainAccuracySubscriber(publishes="share", **o), (torch.eye(3), torch.tensor([0, 1, 0]))
    ).items()
    assert (kind, values) == ("share", [2 / 3])


class Unlabelled(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(3)


@pytest.mark.fault(6, 15)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TestAccuracySubscriber([]), ConfigError, "at least one item, got an empty one"),
        (
            lambda: TestAccuracySubscriber(Unlabelled()),
            ConfigError,
            "pairs \\(input, label\\), the first item is Tensor",
        ),
        (lambda: TestAccuracySubscriber(TensorDataset(torch.ones(2))), ConfigError, "the first item is 1 values"),
        (lambda: TestAccuracySubscriber(iter([])), ConfigTypeError, "map-style data set, .* got list_iterator"),
        (
            lambda: TestAccuracySubscriber(torch.utils.data.DataLoader(classification(3))),
            ConfigTypeError,
            "got DataLoader",
        ),
        (lambda: TestAccuracySubscriber(classification(3), batch_size=0), ConfigError, "batch_size >= 1, got 0"),
        (lambda: TestAccuracySubscriber(classification(3), every=0), ConfigError, "every >= 1, got 0"),
        (lambda: TestAccuracySubscriber(classification(3), k=True), ConfigError, "k >= 1, got True"),
        (lambda: TestAccuracySubscriber(classification(3), every=2, subsample=2), ConfigError, "got both"),
        (lambda: TrainAccuracySubscriber(k=0), ConfigError, "k >= 1, got 0"),
        (lambda: TrainAccuracySubscriber(beta=1.0), ConfigError, r"in \[0, 1\), got 1.0"),
        (lambda: OptimizerStateSubscriber(""), ConfigError, "a field such as 'exp_avg', got ''"),
        (
            lambda: OptimizerStateSubscriber("step", "median"),
            ConfigError,
            "needs a statistic 'norm' or 'mean', got 'median'",
        ),
        (lambda: GlobalNormSubscriber([]), ConfigError, "at least one kind, got an empty list"),
        (lambda: ClippingSubscriber(window=0), ConfigError, "ClippingSubscriber needs window >= 1, got 0"),
        (lambda: GlobalNormSubscriber(["a", "a"]), ConfigError, "kinds must differ"),
    ],
)
def test_bad_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_step_with_a_nan_does_not_count_as_clipped_or_not():
    model = torch.nn.Linear(4, 2)
    optimizer, recording = torch.optim.SGD(model.parameters(), lr=0.0), RecordingBackend()
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(ClippingSubscriber(backend=recording))
        for factor in (100.0, math.nan, 1e-3):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)).sum() * factor).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    values = curves(recording)
    assert [math.isnan(value) for value in values["gradient_norm_unclipped", None]] == [False, True, False]
    assert values["clipped_share", None] == [1.0, 0.5]


def test_clipping_shows_the_norm_before_and_the_share_of_clipped_steps():
    """Gradients of known norm, clipped at 1: every second step is clipped."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recording, expected = RecordingBackend(), []
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(ClippingSubscriber(window=3, backend=recording))
        for step in range(4):
            optimizer.zero_grad()
            (model(torch.ones(3, 4)).sum() * (100.0 if step % 2 else 1e-3)).backward()
            expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
    values = {}
    for series, value, _ in recording.values:
        values.setdefault(series.kind, []).append(value)
    assert values["gradient_norm_unclipped"] == pytest.approx(expected, rel=1e-6)
    assert values["clipped_share"] == pytest.approx([0, 1 / 2, 1 / 3, 2 / 3])


def test_the_bound_of_a_quadratic_loss_is_its_slope_times_the_way_of_the_weights():
    """Against the same sum written by hand, with clipping, a bias, steps between samples, and a step that is too long."""
    torch.manual_seed(0)
    model, recording, expected, losses = torch.nn.Linear(70, 80), RecordingBackend(), [], []
    before, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(200, 70), torch.randn(200, 80)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(LossChangeBoundSubscriber(subsample=3, backend=recording))
        for step in range(10):
            optimizer.param_groups[0]["lr"] = 40.0 if step == 7 else 0.1
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            if step % 3 == 0:
                losses.append(loss.item())
                now = [p.detach().double().clone() for p in model.parameters()]
                if step:
                    pairs = zip(model.parameters(), now, before, strict=True)
                    expected.append(sum((p.grad * (w - v)).sum().item() for p, w, v in pairs))
                before = now
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01 if step < 7 else 10)
            optimizer.step()
    [found] = curves(recording).values()
    # 2,800 of the 5,600 weights stand for all of them
    assert found == pytest.approx(expected, rel=0.2)
    assert all(
        after - start <= bound + 0.1 * abs(bound)
        for start, after, bound in zip(losses, losses[1:], found, strict=False)
    )
    assert [bound > 0 for bound in found] == [False, False, True]


def test_steps_without_a_gradient_and_closures_have_no_bound():
    model, recording = torch.nn.Linear(4, 2), RecordingBackend()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss

    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(LossChangeBoundSubscriber(backend=recording))
        for _ in range(3):
            optimizer.step(closure)
    assert not curves(recording)
