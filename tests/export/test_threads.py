"""Several threads train at the same time, each with an exporter of its own."""

import threading

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.testing import RecordingBackend


def in_thread(function, *args):
    """Run a function in another thread; raise what it raises."""
    errors = []

    def run():
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def train(steps, exporters=1):
    """Train with several exporters, one after the other; return the steps with a value, counted by each."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    counts = []
    for _ in range(exporters):
        recording = RecordingBackend()
        with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
            exporter.add_modules(model)
            exporter.message_bus.register_subscriber(NormSubscriber("weight_updates", backend=recording))
            for _ in range(steps // exporters):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
        counts.append(len({step for _, _, step in recording.values}))
    return counts


@pytest.mark.fault(307)
def test_an_exporter_is_opened_and_closed_during_the_step_of_another_thread():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter, Exporter(message_bus=MessageBus()) as other:
        exporter.add_modules(model)
        other.add_modules(nn.Linear(2, 1))
        opened = CallbackSubscriber(["weights"], lambda message: in_thread(train, 1), backend="null")
        exporter.message_bus.register_subscriber(opened)
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        assert exporter.health().steps == 2


@pytest.mark.fault(307)
@pytest.mark.parametrize("steps", [60, pytest.param(7200, marks=pytest.mark.slow)])
def test_all_steps_of_three_threads_are_counted(steps):
    results = [None] * 3
    ready = threading.Barrier(3)

    def run(number):
        ready.wait(60)
        results[number] = train(steps, exporters=4)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[steps // 4] * 4] * 3


def test_the_pair_of_hooks_is_registered_again_if_a_library_has_cleared_torchs_dictionary():
    torch_optimizer._global_optimizer_pre_hooks.clear()
    assert train(2) == [2]
