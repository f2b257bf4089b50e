"""A run that is interrupted and continued from a checkpoint has the values of a run that was not."""

import io
import math
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import DistanceFromInitSubscriber, NormSubscriber
from ikkuna.export.subscriber.state import pack, unpack
from ikkuna.testing import RecordingBackend
from ikkuna.visualization.matrix import Matrix
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS

K = 4


class Net(nn.Module):
    """Layers of the kinds that the installed metrics need."""

    def __init__(self):
        super().__init__()
        self.first, self.relu, self.lstm, self.last = (
            nn.Linear(4, 6),
            nn.Tanh(),
            nn.LSTM(6, 5, batch_first=True),
            nn.Linear(5, 3),
        )
        self.norm, self.router = nn.BatchNorm1d(6), nn.Linear(5, 4)

    def forward(self, x):
        hidden = self.relu(self.norm(self.first(x))).unsqueeze(1)
        output = self.lstm(hidden)[0][:, 0]
        return self.last(output) * self.router(output).amax()


class Training:
    """A model that trains on other data at each step, with two micro-batches, and its exporter."""

    def __init__(self, make, checkpoint=None, **options):
        torch.manual_seed(0)
        self.model, self.loss = Net(), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step = 0
        self.exporter = Exporter(message_bus=MessageBus("resumed"), on_error="raise", **options)
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
        self.exporter.add_modules(self.model)
        self.exporter.set_loss(self.loss)
        for subscriber in make():
            self.exporter.message_bus.register_subscriber(subscriber)
        if checkpoint is not None:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.step = checkpoint["step"]
            self.exporter.load_state_dict(checkpoint["exporter"])

    def train(self, steps):
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            for _ in range(2):
                x, y = torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)
                (self.loss(self.model(x), y) / 2).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def checkpoint(self):
        """Return what ``torch.load`` reads from the bytes of a checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "exporter": self.exporter.state_dict(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


def comparable(values):
    return [(series, step, plain(value)) for series, value, step in values]


def plain(value):
    if isinstance(value, Matrix):
        return value.rows, value.columns, np.nan_to_num(value.values, nan=-7.0).tolist()
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value
    return [value.num, value.sum, list(value.bucket_limits), list(value.bucket_counts)]


def run_of(make, resumed):
    """Return the values of 2 K steps, in one go or with a checkpoint after K."""
    backend = RecordingBackend()

    def subscribers():
        made = make()
        for subscriber in made:
            subscriber.backends = (backend,)
        return made

    training = Training(subscribers)
    training.train(K)
    if resumed:
        checkpoint = training.checkpoint()
        training.train(2)  # the steps that are lost
        training.exporter.close()
        backend.values = [entry for entry in backend.values if entry[2] < K]
        backend.texts = [entry for entry in backend.texts if entry[2] < K]
        training = Training(subscribers, checkpoint)
    training.train(2 * K - training.step)
    training.exporter.close()
    return comparable(backend.values), backend.texts


def of_time(entry):
    return entry[0].kind in ("step_seconds", "samples_per_second", "monitor_share", "peak_memory")


def names():
    """One set of arguments for each class, and all of those that keep something over steps."""
    seen = set()
    for name, make in EVERY_SUBSCRIBER.items():
        subscriber = make()
        if subscriber.state or type(subscriber) not in seen:
            yield name
        seen.add(type(subscriber))


@pytest.mark.parametrize("name", list(names()))
def test_every_subscriber_continues_from_a_checkpoint(name):
    """Tags, steps and values are those of a run that was not interrupted."""

    def make():
        factories = [*NEEDS.get(name, ()), EVERY_SUBSCRIBER[name]]
        return [factory() for factory in factories]

    (straight, texts), (resumed, resumed_texts) = run_of(make, False), run_of(make, True)
    assert straight
    assert {entry[0] for entry in resumed} == {entry[0] for entry in straight}
    assert [entry for entry in resumed if not of_time(entry)] == [entry for entry in straight if not of_time(entry)]
    assert resumed_texts == texts


# -- states -----------------------------------------------------------------------------------------------------------


class Keeping(NormSubscriber):
    """Keeps something from one step to the next."""

    state = ("kept",)

    def __init__(self, **options):
        super().__init__("weights", **options)
        self.kept = Fraction(1, 2).numerator


class Failing(Keeping):
    def state_dict(self):
        return 1 / 0


def test_a_state_waits_for_a_subscriber_that_is_registered_later():
    first = Training(lambda: [DistanceFromInitSubscriber(backend="null"), Keeping(backend="null")])
    first.train(1)
    checkpoint = first.checkpoint()
    first.exporter.close()
    again = Training(lambda: [Keeping(backend="null")], checkpoint)
    late = DistanceFromInitSubscriber(backend="null")
    again.exporter.message_bus.register_subscriber(late)
    again.exporter.close()
    stored = {each["label"]: each["state"] for each in checkpoint["exporter"]["subscribers"]}
    for (key, own), (other_key, other) in zip(
        late._first._tensors.items(),
        unpack(stored["DistanceFromInitSubscriber(weights)"]["_first"]["attributes"])["_tensors"].items(),
        strict=True,
    ):
        assert key == other_key
        assert torch.equal(own, other)


def test_a_state_that_fails_is_left_out_and_logged(caplog):
    training = Training(lambda: [Failing(backend="null"), DistanceFromInitSubscriber(backend="null")])
    state = training.exporter.state_dict()
    training.exporter.close()
    assert [each["label"] for each in state["subscribers"]] == ["DistanceFromInitSubscriber(weights)"]
    assert "Failing(weights).state_dict() failed" in caplog.text


def test_a_state_that_does_not_fit_is_refused():
    training = Training(lambda: [Keeping(backend="null")])
    state = training.exporter.state_dict()
    state["subscribers"][0]["state"] = {"other": 1}
    with pytest.raises(ConfigError, match=r"the state of Keeping\(weights\) cannot be loaded: .* needs the state"):
        training.exporter.load_state_dict(state)
    training.exporter.close()


VALUES = (
    *(None, True, 3, -0.5, "text", [1, [2]], (1, None), {("a", None): deque([1.0], maxlen=2)}),
    *({"b", "a"}, torch.Size((2, 3)), torch.float16, torch.device("cpu")),
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_packed_as_what_they_are(value):
    file = io.BytesIO()
    torch.save(pack(value), file)
    file.seek(0)
    found = unpack(torch.load(file, weights_only=True))
    assert found == value
    assert type(found) is type(value)


def test_packed_tensors_share_no_memory():
    tensor, array = torch.ones(2), np.ones(2)
    packed = pack([tensor, array])
    tensor.zero_()
    array[:] = 0
    found = unpack(packed)
    assert found[0].tolist() == found[1].tolist() == [1.0, 1.0]
    assert isinstance(found[1], np.ndarray)


def test_only_known_classes_are_created():
    packed = {"ikkuna": "object", "class": "Popen", "attributes": pack({"args": "true"})}
    with pytest.raises(ConfigError, match="unknown class 'Popen'"):
        unpack(packed, [Keeping])


@pytest.mark.parametrize("value", [lambda: None, object(), int, Fraction], ids=str)
def test_what_is_no_data_is_refused(value):
    with pytest.raises(ConfigError, match="cannot be stored in a checkpoint"):
        pack([value])


def test_damaged_states_are_refused():
    for packed in ({}, {"ikkuna": "tuple"}, {"ikkuna": "dict", "items": [1]}, {"ikkuna": "dtype", "value": "no_dtype"}):
        with pytest.raises(ConfigError, match="a state cannot be read"):
            unpack(packed)
