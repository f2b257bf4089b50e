"""Evaluations in the user's own loop are a pass by themselves, and their figures equal those of plain Python."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber
from ikkuna.testing import RecordingBackend

X, Y = torch.randn(48, 6, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 4
HELD_OUT = torch.randn(30, 6, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 4
OTHER = torch.randn(10, 6, generator=torch.Generator().manual_seed(2)), torch.arange(10) % 3


class Loop:
    """A training loop that computes what should be shown."""

    def __init__(self, criterion=None):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.trained, self.losses, self.accuracies = {}, {}, {}
        self.step = 0

    def backward(self, x, y):
        self.model.train()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.trained.setdefault(self.step, []).append(loss.item())

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def evaluate(self, *sets, step=None, guard=torch.no_grad, training=False, size=7):
        """Evaluate sets of data one after another; keep the mean loss and the accuracy of all items."""
        self.model.train(training)
        loss, correct, count = 0.0, 0, 0
        with guard():
            for x, y in sets:
                for inputs, labels in zip(x.split(size), y.split(size), strict=True):
                    outputs = self.model(inputs)
                    loss += self.criterion(outputs, labels).double().item() * len(labels)
                    correct += int((outputs.argmax(1) == labels).sum())
                    count += len(labels)
        step = self.step - 1 if step is None else step
        self.losses[step], self.accuracies[step] = loss / count, correct / count
        self.model.train()


def shown(handle, kind="loss", pass_name="validation"):
    series = handle.history(kind, pass_name=pass_name)
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_a_validation_each_epoch_has_its_own_loss_and_accuracy(tmp_path, guard, every):
    loop = Loop()
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path, every=every) as handle:
        for _ in range(4):
            for x, y in zip(X.split(16), Y.split(16), strict=True):
                loop.backward(x, y)
                loop.update()
            loop.evaluate(HELD_OUT, guard=guard)
    assert shown(handle) == pytest.approx(loop.losses, rel=1e-6)
    assert list(loop.losses) == [2, 5, 8, 11]
    assert shown(handle, "accuracy") == pytest.approx(loop.accuracies)
    sampled = {step: values[0] for step, values in loop.trained.items() if step % every == 0}
    assert shown(handle, pass_name="training") == pytest.approx(sampled, rel=1e-6)


@pytest.mark.parametrize("has_pass", [False, True], ids=["in the loop", "as a pass"])
@pytest.mark.parametrize(
    ("order", "how"),
    [
        *((order, how) for order in ("behind", "between, later", "between, earlier") for how in ("flat", "whole")),
        ("behind", "scaled"),
    ],
)
def test_the_evaluation_of_an_average_of_the_weights_does_not_count(order, how, has_pass, tmp_path):
    # the average is a copy, of which the same module computes losses; what receives something computed from outputs counts always
    loop, expected = Loop(), {}
    average = copy.deepcopy(loop.model).eval()

    def losses(model):
        for x, y in zip(HELD_OUT[0].split(7), HELD_OUT[1].split(7), strict=True):
            outputs = model(x).view(-1, 4) if how == "flat" else model(x)
            yield loop.criterion(2 * outputs if how == "scaled" else outputs, y).double().item() * len(y)

    with ikkuna.watch(loop.model, LossSubscriber(tag=None), loss=loop.criterion, log_dir=tmp_path) as handle:
        for _ in range(3):
            loop.backward(X, Y)
            loop.update()
            handle.test() if has_pass else None
            loop.model.eval()
            with torch.no_grad():
                found = zip(losses(average), losses(loop.model), strict=True) if order == "between, earlier" else None
                found = zip(losses(loop.model), losses(average), strict=True) if order == "between, later" else found
                pairs = list(found or zip(list(losses(loop.model)), list(losses(average)), strict=True))
            own = 1 if order == "between, earlier" else 0
            total, of_average = (sum(pair[i] for pair in pairs) / len(HELD_OUT[1]) for i in (own, 1 - own))
            expected[loop.step - 1] = (total + of_average) / 2 if how == "scaled" else total
            handle.train() if has_pass else None
            loop.model.train()
    values = shown(handle, pass_name="testing" if has_pass else "validation")
    if order == "between, earlier":
        # before the first evaluation it is not known that the module receives outputs of the model
        del values[min(values)], expected[min(expected)]
    assert list(values.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def test_sets_that_are_evaluated_one_after_another_are_one_pass_and_named_ones_their_own(tmp_path):
    loop = Loop()
    with ikkuna.watch(
        loop.model, loop.criterion, LossSubscriber(tag="other"), preset="default", log_dir=tmp_path
    ) as handle:
        loop.backward(X, Y)
        loop.update()
        loop.evaluate(HELD_OUT, OTHER)
        loop.backward(X, Y)
        loop.update()
        loop.evaluate(HELD_OUT)
        named = dict(loop.losses)
        handle.test("other")
        loop.evaluate(OTHER)
        handle.train()
    assert shown(handle) == pytest.approx(named, rel=1e-6)
    assert shown(handle, pass_name="other") == pytest.approx({1: loop.losses[1]}, rel=1e-6)


def test_a_validation_between_accumulated_batches_leaves_the_step_as_it_is(tmp_path):
    loop = Loop()
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path, every=1) as handle:
        for _ in range(3):
            for x, y in zip(X.split(24), Y.split(24), strict=True):
                loop.backward(x, y)
                loop.evaluate(HELD_OUT, step=loop.step)
            loop.update()
    assert shown(handle) == pytest.approx(loop.losses, rel=1e-6)
    expected = {step: sum(losses) / len(losses) for step, losses in loop.trained.items()}
    assert shown(handle, pass_name="training") == pytest.approx(expected, rel=1e-6)


def test_validations_inside_of_steps_that_are_only_counted_are_a_pass_each(tmp_path):
    loop = Loop()
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path, every=50) as handle:
        for step in range(60):
            loop.backward(X, Y)
            if step % 6 == 5:
                loop.evaluate(HELD_OUT, step=step)
            loop.update()
    assert shown(handle) == pytest.approx(loop.losses, rel=1e-6)
    assert shown(handle, "accuracy") == pytest.approx(loop.accuracies)


class Parts:
    """An encoder and a decoder that the loop calls, of which each is switched to another mode by itself."""

    def __init__(self, parts):
        self.parts, self.training = parts, True

    def __call__(self, x):
        for part in self.parts.values():
            x = part(x)
        return x

    def train(self, mode=True):
        for part in self.parts.values():
            part.train(mode)


def test_models_that_are_called_by_the_loop_are_validated(tmp_path):
    loop = Loop()
    parts = nn.ModuleDict({"encoder": loop.model[:3], "decoder": loop.model[3:]})
    loop.model = Parts(parts)
    with ikkuna.watch(parts, loop.criterion, log_dir=tmp_path, every=3) as handle:
        for step in range(12):
            loop.backward(X, Y)
            loop.update()
            if step % 4 == 2:
                loop.evaluate(HELD_OUT, OTHER)
    assert shown(handle) == pytest.approx(loop.losses, rel=1e-6)
    assert shown(handle, "accuracy") == pytest.approx(loop.accuracies)
    sampled = {step: losses[0] for step, losses in loop.trained.items() if step % 3 == 0 and step}
    assert shown(handle, pass_name="training") == pytest.approx(sampled, rel=1e-6)


def test_a_loss_of_outputs_of_parts_that_train_in_evaluation_mode_is_no_validation(tmp_path):
    loop = Loop()
    parts = nn.ModuleDict({"encoder": loop.model[:3], "decoder": loop.model[3:]}).eval()
    with ikkuna.watch(parts, loop.criterion, log_dir=tmp_path, every=1) as handle:
        for _ in range(4):
            outputs = parts["decoder"](parts["encoder"](X))
            with torch.no_grad():
                loop.criterion(outputs, Y)
            loop.criterion(outputs, Y).backward()
            loop.update()
    assert "validation" not in handle.read().passes()


def test_an_evaluation_in_training_mode_counts_if_it_is_apart(tmp_path):
    loop = Loop()
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path) as handle:
        for step in range(36):
            loop.backward(X, Y)
            loop.update()
            if step % 12 == 11:
                loop.evaluate(HELD_OUT, training=True)
    assert shown(handle) == pytest.approx(loop.losses, rel=1e-6)


def test_losses_without_gradients_of_the_training_are_no_validation(tmp_path):
    """Neither a target network's forwards nor the loss of the training's own outputs is one."""
    loop = Loop()
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path) as handle:
        for _ in range(24):
            with torch.no_grad():
                loop.criterion(loop.model(X), Y)  # in training mode, before each step
            outputs = loop.model(X)
            loop.criterion(outputs, Y).backward()
            with torch.no_grad():
                loop.criterion(outputs, Y)
            loop.update()
    assert handle.read().passes() == ("training",)


def test_only_what_the_loss_sees_is_measured_and_training_is_bit_identical():
    def trained(watched):
        loop = Loop()
        backend = RecordingBackend()
        if watched:
            exporter = Exporter(message_bus=MessageBus("validation"), on_error="raise")
            exporter.add_modules(loop.model)
            exporter.set_loss(loop.criterion)
            for subscriber in (LossSubscriber(tag=None), NormSubscriber("activations", tag=None)):
                exporter.message_bus.register_subscriber(subscriber.show_with(backend) or subscriber)
        for _ in range(3):
            loop.backward(X, Y)
            loop.evaluate(HELD_OUT, step=loop.step)
            loop.update()
        if watched:
            exporter.close()
        return [*loop.model.parameters()], {(s.kind, s.pass_name) for s, *_ in backend.values}

    plain, (watched, kinds) = trained(False)[0], trained(True)
    assert all(map(torch.equal, plain, watched))
    assert kinds == {("loss", "training"), ("loss", "validation"), ("activations_norm2", "training")}


class WithLoss(nn.Module):
    """A model that returns its own loss, as those of transformers do."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_returns_its_loss_is_validated(tmp_path):
    model = WithLoss(Loop().model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    with ikkuna.watch(model, log_dir=tmp_path) as handle:
        for step in range(3):
            model(X, labels=Y)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                expected[step] = model(HELD_OUT[0], labels=HELD_OUT[1])["loss"].item()
            model.train()
    assert shown(handle) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("known", [True, False])
def test_an_unknown_validation_loss_is_one_line(tmp_path, caplog, known):
    loop = Loop()
    with (
        caplog.at_level(logging.WARNING, "ikkuna"),
        ikkuna.watch(loop.model, loss=loop.criterion if known else None, log_dir=tmp_path),
    ):
        for _ in range(5):
            loop.backward(X, Y)
            loop.update()
            loop.evaluate(HELD_OUT)
    assert caplog.text.count(
        "no loss is seen in the evaluations of the loop: if they compute one, pass its module"
    ) == (not known)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", ["module", "wrapper"])
def test_a_compiled_model_is_validated(tmp_path, guard, how):
    torch._dynamo.reset()
    loop = Loop()
    del loop.model[2]  # dropout, whose random numbers differ
    original = loop.model
    if how == "module":
        original.compile(backend="eager")
    else:
        loop.model = torch.compile(original, backend="eager")
    with ikkuna.watch(original, loop.criterion, log_dir=tmp_path, every=1) as handle:
        for _ in range(3):
            for x, y in zip(X.split(16), Y.split(16), strict=True):
                loop.backward(x, y)
                loop.update()
            loop.evaluate((HELD_OUT[0][:21], HELD_OUT[1][:21]), guard=guard)
    assert shown(handle) == pytest.approx(loop.losses, rel=1e-6)
    assert list(loop.losses) == [2, 5, 8]
    sampled = {step: values[0] for step, values in loop.trained.items()}
    assert shown(handle, pass_name="training") == pytest.approx(sampled, rel=1e-6)


def test_a_loss_inside_of_a_compiled_function_is_said(tmp_path, caplog):
    torch._dynamo.reset()
    loop = Loop()
    call = torch.compile(lambda x, y: loop.criterion(loop.model(x), y), backend="eager")
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path, verbosity=0) as handle:
        for _ in range(4):
            loop.model.train()
            call(X[:16], Y[:16]).backward()
            loop.update()
            loop.model.eval()
            with torch.no_grad():
                for rows in (slice(0, 10), slice(10, 20)):
                    call(HELD_OUT[0][rows], HELD_OUT[1][rows])
    assert [each.message for each in caplog.records if "no loss is seen" in each.message] == [
        "no loss is seen in the evaluations of the loop: if they compute one, call the loss outside of the compiled function there, "
        "so that over-fitting is judged"
    ]
    assert len(handle.history("loss").values) == 1


def test_over_fitting_is_found_in_the_users_own_loop(tmp_path):
    loop = Loop()
    loop.model[2].p = 0.0
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.03)
    noise = torch.randint(0, 4, (48,), generator=torch.Generator().manual_seed(3))
    with ikkuna.watch(loop.model, loop.criterion, log_dir=tmp_path) as handle:
        for step in range(400):
            loop.backward(X, noise)
            loop.update()
            if step % 20 == 19:
                loop.evaluate(HELD_OUT)
    assert "overfit" in {finding.rule for finding in handle.findings}
