"""A run that is interrupted and continued from a checkpoint has the values of a run that was not."""

import io
from collections import deque
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import (
    BufferReplicaSubscriber,
    CKASubscriber,
    DistanceFromInitSubscriber,
    FreezeSubscriber,
    NonFiniteSubscriber,
    NormSubscriber,
    PrecisionSubscriber,
    ReplicaSubscriber,
)
from ikkuna.metrics.subscriber.state import pack, unpack
from tests.export.resumed import (
    BrokenTraining,
    K,
    LargeTraining,
    LongTraining,
    Regression,
    RepeatedTraining,
    Training,
    run_of,
)
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS, labelled_rows, outputs_of_any_model


def names():
    """One set of arguments for each class, and all of those that keep something over steps."""
    seen = set()
    for name, make in EVERY_SUBSCRIBER.items():
        subscriber = make()
        of_ranks = ReplicaSubscriber, BufferReplicaSubscriber
        if type(subscriber) not in of_ranks and (subscriber.state or type(subscriber) not in seen):
            yield name  # in one process nothing has a replica
        seen.add(type(subscriber))


def by_name(name):
    return lambda training: [factory() for factory in (*NEEDS.get(name, ()), EVERY_SUBSCRIBER[name])]


def by_name_until_memory_is_short(name):
    """Return a function that creates a subscriber whose evaluations fail after the checkpoint."""

    def make(training):
        [subscriber] = by_name(name)(training)
        forward = subscriber.forward

        def failing(model, inputs):
            if training.step > K:
                raise torch.OutOfMemoryError("no memory left")
            return forward(model, inputs)

        subscriber.forward = failing
        return [subscriber]

    return make


def freezing(patience):
    """Return a function that creates subscribers that freeze all layers but one, after `patience` evaluations."""

    def make(training):
        cka = CKASubscriber(labelled_rows(9), batch_size=5, every=2, to=["previous"], forward=outputs_of_any_model)
        return [cka, FreezeSubscriber("cka_to_previous", threshold=0.0, patience=patience)]

    return make


EVALUATING = [name for name, make in EVERY_SUBSCRIBER.items() if "_emitted" in make().state]
TRAININGS = {
    "ConstantPredictionSubscriber": Regression,
    "SpikeScoreSubscriber": LongTraining,
    "InputRowsSubscriber": RepeatedTraining,
}
CASES = {
    **{name: (by_name(name), TRAININGS.get(name.partition("-")[0], Training)) for name in names()},
    "NaN in the weights": (lambda training: [NonFiniteSubscriber()], BrokenTraining),
    "sampled elements": (lambda training: [PrecisionSubscriber("activations")], LargeTraining),
    "layers frozen before the checkpoint": (freezing(2), Training),
    "layers frozen after the checkpoint": (freezing(4), Training),
    **{f"{name} without memory": (by_name_until_memory_is_short(name), Training) for name in EVALUATING},
}


@cache
def straight(case):
    make, training = CASES[case]
    return run_of(make, False, training)


@pytest.mark.parametrize("case", CASES)
def test_every_subscriber_continues_from_a_checkpoint(case):
    """Tags, steps, values and weights are those of a run that was not interrupted."""
    make, training = CASES[case]
    assert straight(case)[0]
    assert run_of(make, True, training) == straight(case)


def kept():
    """Return class and attribute of everything that subscribers keep over steps, and the cases of this class."""
    found = {}
    for case, (make, _) in CASES.items():
        for subscriber in make(None):
            for attribute in subscriber.state:
                found.setdefault((type(subscriber), attribute), []).insert(0, case)
    return found


KEPT = kept()


@pytest.mark.parametrize("key", KEPT, ids=lambda key: f"{key[0].__name__}{key[1]}")
def test_the_comparison_notices_every_attribute_that_is_lost(key, monkeypatch):
    """In at least one case the values after the checkpoint depend on each attribute in `Subscriber.state`."""
    kind, attribute = key
    load = kind.load_state_dict

    def load_without(subscriber, state):
        fresh = subscriber.state_dict()[attribute]
        load(subscriber, {**state, attribute: fresh} if type(subscriber) is kind else state)

    monkeypatch.setattr(kind, "load_state_dict", load_without)
    assert any(run_of(CASES[case][0], True, CASES[case][1]) != straight(case) for case in KEPT[key])


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
    first = Training(lambda training: [DistanceFromInitSubscriber(backend="null"), Keeping(backend="null")])
    first.train(1)
    checkpoint = first.checkpoint()
    first.exporter.close()
    again = Training(lambda training: [Keeping(backend="null")], checkpoint)
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
    training = Training(lambda training: [Failing(backend="null"), DistanceFromInitSubscriber(backend="null")])
    state = training.exporter.state_dict()
    training.exporter.close()
    assert [each["label"] for each in state["subscribers"]] == ["DistanceFromInitSubscriber(weights)"]
    assert "Failing(weights).state_dict() failed" in caplog.text


def test_a_state_of_shards_is_left_out_where_a_process_has_all_parts(caplog):
    """A shard may have the shape that another part of the tensor has now."""
    training = Training(lambda training: [DistanceFromInitSubscriber(backend="null")])
    training.train(1)
    state = training.exporter.state_dict()
    training.exporter.close()
    for each in state["subscribers"]:
        each["part"] = 0, 2
    again = Training(lambda training: [DistanceFromInitSubscriber(backend="null")])
    again.exporter.load_state_dict(state)
    [registered] = again.exporter.message_bus.registered
    assert not registered.subscriber._first._tensors
    assert "the states hold other parts of the parameters than the ranks do" in caplog.text
    again.exporter.close()


def test_a_state_that_does_not_fit_is_refused():
    training = Training(lambda training: [Keeping(backend="null")])
    state = training.exporter.state_dict()
    state["subscribers"][0]["state"] = {"other": 1}
    with pytest.raises(ConfigError, match=r"the state of Keeping\(weights\) cannot be loaded: .* needs the state"):
        training.exporter.load_state_dict(state)
    training.exporter.close()


VALUES = (
    *(None, True, 3, -0.5, "text", [1, [2]], (1, None), {("a", None): deque([1.0], maxlen=2)}),
    *({"b", "a"}, torch.Size((2, 3)), torch.float16, torch.device("cpu")),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
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


@pytest.mark.parametrize("value", [lambda: None, object(), int, Fraction], ids=lambda value: type(value).__name__)
def test_what_is_no_data_is_refused(value):
    with pytest.raises(ConfigError, match="cannot be stored in a checkpoint"):
        pack([value])


def test_damaged_states_are_refused():
    for packed in ({}, {"ikkuna": "tuple"}, {"ikkuna": "dict", "items": [1]}, {"ikkuna": "dtype", "value": "no_dtype"}):
        with pytest.raises(ConfigError, match="a state cannot be read"):
            unpack(packed)
