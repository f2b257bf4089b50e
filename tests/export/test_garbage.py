"""Recording creates few objects for the garbage collector, because a full collection traverses all objects of torch."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from ikkuna.backends.pictures.redraw import RedrawThread
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, Stamp
from ikkuna.export.subscriber import (
    MinMaxSubscriber,
    NormSubscriber,
    RatioSubscriber,
    Subscriber,
    TrainAccuracySubscriber,
)
from ikkuna.metrics.bus.delivery import Finished
from ikkuna.observation.rows.plan import Demand, Site
from ikkuna.observation.rows.recorder import Recorder

KINDS = ("weights", "weight_gradients", "weight_updates", "activations", "layer_gradients")
LAYERS, STEPS, THRESHOLD = 50, 20, 100


def rounds_of_collection(watch: bool) -> int:
    """Return how often the collector runs in some steps of a network of small layers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exporter = Exporter(message_bus=MessageBus(), on_error="raise")
    if watch:
        exporter.add_modules(model)
        for kind in KINDS:
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend="null"))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    step(), step()
    seen: list[str] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    before = gc.get_threshold()
    try:
        gc.set_threshold(THRESHOLD, 10, 1_000_000)
        for _ in range(STEPS):
            step()
    finally:
        gc.set_threshold(*before)
        del gc.callbacks[-1]
        exporter.close()
    return seen.count("start")


def test_a_step_creates_few_objects_per_value() -> None:
    """One for the hook of a gradient."""
    more = (rounds_of_collection(watch=True) - rounds_of_collection(watch=False)) * THRESHOLD
    assert more < 1.25 * LAYERS * len(KINDS) * STEPS


def rounds_in_delivery(sites: int, backend: str, directory: Path) -> int:
    """Return how often the collector runs while the values of some steps are delivered."""
    bus = MessageBus(log_dir=directory)
    for kind in KINDS:
        for make in (NormSubscriber, MinMaxSubscriber):
            bus.register_subscriber(make(kind, backend=backend))
    bus.register_subscriber(RatioSubscriber(["weight_updates", "weights"], backend=backend))
    bus.register_subscriber(NormSubscriber("weights_norm2", 1, backend=backend))
    recorder, demand = Recorder(bus.error_guard), Demand(bus)
    places = [Site(kind, f"layer{i}") for kind in KINDS for i in range(sites)]
    seen: list[str] = []
    before = gc.get_threshold()
    for step in range(STEPS):
        stamp = Stamp(step, step, 0)
        recorder.open(stamp, demand.of(stamp))
        for site in places:
            recorder.receive(site, torch.ones(2), "")
        finished = Finished(recorder.close(), None)
        gc.collect(0)
        gc.callbacks.append(lambda phase, info, step=step: seen.append(phase if step > 2 else "first"))
        try:
            gc.set_threshold(THRESHOLD, 1_000_000, 1_000_000)
            finished.deliver(bus)
        finally:
            gc.set_threshold(*before)
            del gc.callbacks[-1]
    bus.close()
    return seen.count("start")


@pytest.mark.parametrize("backend", ["null", "tb"])
def test_delivery_creates_no_object_per_value(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of objects of a step does not grow with the number of modules, if no subscriber takes single messages."""
    monkeypatch.setattr(RedrawThread, "open", lambda thread: None)  # which creates objects meanwhile
    few, many = (rounds_in_delivery(sites, backend, tmp_path / str(sites)) for sites in (5, 300))
    assert many <= few + STEPS / 4


def test_reused_rows_keep_no_subscriber_alive() -> None:
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)

        def step() -> None:
            optimizer.zero_grad()
            loss(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
            optimizer.step()

        gone: list[weakref.ref[Subscriber]] = []
        for make in (NormSubscriber, TrainAccuracySubscriber):
            subscriber = make(*["weights"] * (make is NormSubscriber), backend="null")
            handle = exporter.message_bus.register_subscriber(subscriber)
            step()
            handle.remove()
            gone.append(weakref.ref(subscriber))
            del subscriber, handle
        step()
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
