"""Every installed subscriber and backend passes the checks of the test kit, and the checks find faults."""

import random
from dataclasses import astuple, is_dataclass

import numpy as np
import pytest
import torch

from ikkuna.backends.backend import GROUP as BACKENDS
from ikkuna.backends.backend import Backend
from ikkuna.export import subscriber as installed
from ikkuna.export.subscriber import GROUP, Subscriber
from ikkuna.metrics.subscriber.base import METHODS
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.support.plugins import plugin_names
from ikkuna.testing import RecordingBackend, check_backend, check_subscriber, run
from ikkuna.testing.subscribers import small_model, train
from ikkuna.visualization import get_backend
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS


@pytest.mark.devices(slow=True)
@pytest.mark.parametrize("name", EVERY_SUBSCRIBER)
def test_every_subscriber_keeps_the_contract(name):
    check_subscriber(EVERY_SUBSCRIBER[name], NEEDS.get(name, ()))


@pytest.mark.parametrize("name", EVERY_SUBSCRIBER)
def test_messages_give_equal_values_at_once_and_one_by_one(name):
    """A metric implements one of the two ways, unless it takes whole steps alone; here it is also called in the other."""
    found = []
    for is_changed in (False, True):
        backend = RecordingBackend()
        made = EVERY_SUBSCRIBER[name](backend=backend)
        takes_batches = Registered(made).takes_batches
        if is_changed and any(getattr(type(made), way) is not getattr(Subscriber, way) for way in METHODS[1:]):
            other = "compute" if takes_batches else "compute_batch"
            made.__class__ = type(type(made))(type(made).__name__, (type(made),), {other: getattr(Subscriber, other)})
            assert Registered(made).takes_batches != takes_batches
        needed = [make(backend="null") for make in NEEDS.get(name, ())]
        train(small_model(), [*needed, made])
        values = [
            (step, str(series), astuple(value) if is_dataclass(value) else value)
            for series, value, step in backend.values
        ]
        found.append(sorted(values, key=lambda item: item[:2]))
    one, other = found
    assert [item[:2] for item in one] == [item[:2] for item in other]
    if not name.startswith("Speed"):  # its values are times
        np.testing.assert_equal([item[2] for item in one], [item[2] for item in other])


def test_no_installed_subscriber_is_left_out():
    """A new plugin is checked before its author writes a test."""
    checked = {type(make(backend="null")).__name__ for make in EVERY_SUBSCRIBER.values()}
    ours = {
        name for name in plugin_names(GROUP) if getattr(installed, name).__module__.startswith("ikkuna_subscribers.")
    }
    assert ours == checked


_TRACKERS = {"mlflow", "wandb"}  # tests/integrations holds them to the contract where they are installed


@pytest.mark.parametrize("name", sorted(plugin_names(BACKENDS) - _TRACKERS))
def test_every_backend_keeps_the_contract(name, tmp_path):
    for _ in range(2):
        check_backend(lambda: get_backend(name), tmp_path / "new")


# -- faults are found -------------------------------------------------------------------------------------------------


class Good(Subscriber):
    """The mean, measured by hand."""

    def __init__(self, kind="weights", **options):
        super().__init__(kind, publishes="good", **options)

    def measure(self, message):
        x = message.data.double()
        return torch.stack([x.sum(), torch.full_like(x.sum(), x.numel())])

    def compute(self, message):
        total, n = message.data
        self.emit(message, total / n)


class DrawsRandomNumbers(Good):
    def measure(self, message):
        torch.randn(1)
        return super().measure(message)


class DrawsWhileItIsMade(Good):
    def __init__(self, **options):
        super().__init__(**options)
        random.random()


class WritesIntoWeights(Good):
    def measure(self, message):
        message.data.data.mul_(1.01)
        return super().measure(message)


class WritesIntoActivations(WritesIntoWeights):
    def __init__(self, **options):
        super().__init__("activations", **options)


class ChangesTheDefaultType(Good):
    def compute(self, message):
        super().compute(message)
        torch.set_default_dtype(torch.float64)


class FailsOnIntegers(Good):
    def measure(self, message):
        return message.data.mean().reshape(1)

    def compute(self, message):
        self.emit(message, message.data[0])


class FailsOnNaN(Good):
    def compute(self, message):
        self.emit(message, int(message.data[0]))


class KeepsTheTensor(Good):
    def measure(self, message):
        self.kept = message.data.view(-1) if message.data.is_contiguous() else None
        return super().measure(message)


class RowOfVaryingSize(Good):
    calls = 0

    def measure(self, message):
        self.calls += 1
        return torch.ones(2 + self.calls)

    def compute(self, message):
        self.emit(message, message.data.sum())


class EmitsWhatItDoesNotAnnounce(Good):
    def compute(self, message):
        self.emit(message, 0.0, kind="other")


class ShowsWhatItDoesNotAnnounce(Good):
    def compute(self, message):
        self.show(message.carrying(None, kind="other"), 0.0)


class StampsOfItsOwn(Good):
    def compute(self, message):
        self.emit(type(message)(type(message.stamp)(0, 0, 0), "weights", module="first"), 0.0)


BAD = {
    DrawsRandomNumbers: "training with the subscriber changed torch's random state",
    DrawsWhileItIsMade: "the constructor changed python's random state",
    WritesIntoWeights: "training with the subscriber differs in losses",
    WritesIntoActivations: "training with the subscriber differs in losses",
    ChangesTheDefaultType: "training with the subscriber changed default dtype",
    FailsOnIntegers: r"special tensor \(integers\): RuntimeError: mean",
    FailsOnNaN: r"special tensor \(with a NaN\): ValueError: cannot convert float NaN",
    KeepsTheTensor: "keeps a reference to the tensor",
    RowOfVaryingSize: "The size of tensor a",
    EmitsWhatItDoesNotAnnounce: r"emits 'other' but publishes \['good'\]",
    ShowsWhatItDoesNotAnnounce: r"shows 'other', which is not among \['good', 'weights'\]",
    StampsOfItsOwn: r"published at Stamp\(global_step=0",
}


def test_a_good_subscriber_passes():
    check_subscriber(Good)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_the_contract_of_subscribers_is_checked(bad):
    try:
        with pytest.raises((AssertionError, RuntimeError, ValueError), match=BAD[bad]):
            check_subscriber(bad)
    finally:
        torch.set_default_dtype(torch.float32)


class Failing(RecordingBackend):
    """A backend with one fault."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def open(self, directory):
        self.directory = directory
        if self.fault == "writes outside":
            (directory.parent / "file").touch()

    def flush(self, timeout=None):
        return self.fault != "does not flush"

    def close(self, timeout=2.0):
        again, self.closed = self.closed, True
        return not (again and self.fault == "closes twice")

    @property
    def dropped(self):
        return int(self.fault == "drops")

    @property
    def acked_step(self):
        return 3 if self.fault == "is late" else None


@pytest.mark.parametrize(
    ("fault", "message"),
    {
        "writes outside": "the backend wrote outside its directory",
        "does not flush": r"flush\(\) returned False",
        "closes twice": r"the second close\(\) returned False",
        "drops": "1 values were dropped",
        "is late": "acked_step is 3, expected 6",
    }.items(),
)
def test_the_contract_of_backends_is_checked(fault, message, tmp_path):
    with pytest.raises(AssertionError, match=message):
        check_backend(lambda: Failing(fault), tmp_path)


# -- the test kit -----------------------------------------------------------------------------------------------------


def test_run_returns_the_shown_values_and_writes_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = run(Good(), steps=2)
    assert [(v.kind, v.name, v.step) for v in values] == [
        ("good", "first", 0),
        ("good", "last", 0),
        ("good", "first", 1),
        ("good", "last", 1),
    ]
    assert list(tmp_path.iterdir()) == []


def test_run_raises_the_errors_of_subscribers():
    with pytest.raises(ValueError, match="emits 'other'"):
        run(EmitsWhatItDoesNotAnnounce())


def test_run_takes_a_model_and_a_batch():
    model = torch.nn.Linear(2, 5)
    values = run(Good(), model=model, batch=(torch.ones(3, 2), torch.tensor([0, 1, 4])), steps=1)
    assert [v.name for v in values] == ["linear"]


def test_run_is_reproducible_and_uses_no_global_random_generator():
    state = torch.get_rng_state()
    assert run(Good()) == run(Good())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_recording_backend_is_a_backend():
    backend = RecordingBackend()
    backend.add_text("title", "text", 0)
    backend.commit(0)
    assert backend.texts == [("title", "text", 0)]
    assert backend.commits == [0]
    assert isinstance(backend, Backend)
