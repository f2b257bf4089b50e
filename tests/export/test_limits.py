"""The sentences of the page on limits that no other file tests."""

import threading

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.testing import RecordingBackend

KINDS = ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates")


def norms(position, steps=3):
    """Train with `zero_grad()` at a position; return the norms by kind, name and step."""
    generator = torch.Generator().manual_seed(1)
    model, recording = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), RecordingBackend()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in KINDS:
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=recording))
        for _ in range(steps):
            inputs = torch.randn(5, 4, generator=generator)
            if position == "before the forward":
                optimizer.zero_grad()
            loss = model(inputs).square().mean()
            if position == "before the backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if position == "after the step":
                optimizer.zero_grad()
    return {(series.kind, series.name, step): value for series, value, step in recording.values}


@pytest.mark.parametrize("position", ["before the backward", "after the step"])
def test_zero_grad_may_stand_anywhere_between_two_backwards(position):
    expected = norms("before the forward")
    assert len(expected) == (2 * 3 + 3 * 2) * 3
    assert norms(position) == expected


def test_two_threads_may_train_two_models():
    expected, found = norms("after the step", 20), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: norms("after the step", 20)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected, 1: expected}


def test_a_module_that_was_added_alone_is_not_followed(bus):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(("head", model[1]))
        exporter.set_model(model)
        model[1] = removed = nn.Linear(3, 2)
        exporter.epoch_finished()
        assert [named.module for named in exporter.modules] != [removed]


def test_embeddings_of_transformers_are_resized_while_they_are_observed(bus):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model, recording = transformers.GPT2LMHeadModel(config), RecordingBackend()

    def step():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(0, 20, (2, 6))
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in ("weights", "weight_gradients"):
            bus.register_subscriber(NormSubscriber(kind, modules="*wte*", p=0, backend=recording))
        step()
        model.resize_token_embeddings(30, mean_resizing=False)
        step()
        step()
    found = {(series.kind, step): value for series, value, step in recording.values}
    assert found["weights_norm0", 0] == 20 * 8
    assert found["weights_norm0", 2] == 30 * 8
    assert ("weight_gradients_norm0", 2) in found
