"""The code that several metrics share and that is not a metric itself."""

import numpy as np
import pytest
import torch
from ikkuna_subscribers._helpers import EarlierResults, SampleCount, TensorCopies, require_integers
from ikkuna_subscribers.non_finite import find_producer
from ikkuna_subscribers.recurrent import RecurrentLayers

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import GradientSNRSubscriber, RankSpreadSubscriber
from ikkuna.numerics.statistics import Record
from ikkuna.store.values import ModuleEntry


def weight(x, kind="weights", module="fc"):
    return ModuleMessage(Stamp(0, 0, 0), kind, x, module=module)


def test_a_copy_is_found_only_for_the_same_series_shape_dtype_and_device():
    copies, x = TensorCopies(), torch.ones(2, 3)
    copies.store(weight(x))
    x.zero_()
    assert torch.equal(copies.find(weight(torch.zeros(2, 3))), torch.ones(2, 3))
    others = [weight(x, "biases"), weight(x, module="head"), weight(x.t()), weight(x.double()), weight(x.to("meta"))]
    assert [copies.find(message) for message in others] == [None] * 5


def test_results_of_the_previous_and_of_the_first_evaluation_are_stored():
    earlier = EarlierResults("Some", ["init", "previous"])
    for value in (1, 2, 3):
        earlier.store({"fc": value})
    earlier.store({"new": 9})
    assert (earlier.find("fc"), earlier.find("new")) == ([1, 3], [9, 9])


@pytest.mark.parametrize("number", [1, 0, -3, True, 2.0, "2", None])
def test_numbers_that_are_not_integers_or_too_small_are_refused(number):
    with pytest.raises(ConfigError, match=r"Some needs window >= 2, got "):
        require_integers("Some", 2, steps=2, window=number)


def test_a_parameter_without_parametrisation_decides_how_many_rows_gates_have():
    larger = ModuleEntry("rnn", "LSTM", (("weight_ih_l0", (12, 2)), ("weight_hh_l0.original0", (20, 3))))
    layers = RecurrentLayers(lambda: [larger])
    assert layers.gates("rnn", "weight_ih_l0") == ("i", "f", "g", "o")
    assert layers.gates("rnn", "weight_hh_l0.original0") == ()


def test_only_the_first_tensor_of_the_input_counts_samples():
    count = SampleCount()
    for samples in (8.0, 3.0):
        count.add(NetworkMessage(Stamp(0, 0, 0), "input_data", np.array([samples, 1.0])))
    assert count.take() == (8.0, 1.0)


def test_the_producer_of_a_gradient_is_another_module_than_the_one_it_belongs_to():
    """A module with two outputs has two gradients; the first one of them was finite."""
    names = [("head", ""), ("lstm", ""), ("lstm", "1.0")]
    events = [
        ModuleMessage(Stamp(0, 0, 0), "layer_gradients", module=module, path=path, name=f"{module}:{path}".rstrip(":"))
        for module, path in names
    ]
    producer = find_producer(events, 2, events[2:])
    assert producer.message is events[0]
    assert "the backward pass of 'head', or of an operation between 'lstm:1.0' and 'head'" in producer.description


def test_a_rank_without_elements_is_left_out_of_the_spread():
    ranks = (Record.of(1.0), Record(), None, Record.of(3.0))
    values = RankSpreadSubscriber("loss", "mean").values(Record(ranks=ranks))
    assert values == (1.0, 2.0, 3.0, 0, 3)


def test_a_repeated_step_starts_a_new_window_of_the_snr():
    """The stamps of a step and its repetition are equal, but not the same object."""
    metric = GradientSNRSubscriber(window=2)
    gradients = [torch.tensor([value]) for value in (100.0, 1.0, 3.0)]
    stamps = [Stamp(0, 0, 0), Stamp(0, 0, 0)]
    rows = [
        metric.measure(ModuleMessage(stamp, "weight_micro_gradients", gradient, module="fc"))
        for stamp, gradient in zip((stamps[0], stamps[1], stamps[1]), gradients, strict=True)
    ]
    assert rows[:2] == [None, None]
    assert rows[2].item() == pytest.approx(2.0**2 / 2.0)  # mean 2 and variance 2 of 1 and 3
