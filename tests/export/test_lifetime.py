"""How long an exporter lives, what it leaves behind, and what happens when it is created again."""

import gc
import json
import os
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.errors import ConfigError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.observation.hooks import optimizers
from ikkuna.visualization import get_backend


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()


_earlier = []


@pytest.fixture(autouse=True)
def threads_before():
    """Remember the threads of tests that have run before, which may end at any time."""
    _earlier[:] = threading.enumerate()
    yield
    _earlier.clear()


def own_threads():
    """Return the names of the threads of ikkuna that were started since the test began."""
    return [t.name for t in threading.enumerate() if t.name.startswith("ikkuna") and t not in _earlier]


def becomes_true(condition):
    """Whether a condition holds soon; threads start and end on their own."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def stored(directory):
    """Return (kind, name, step) of all values below a directory."""
    lines = [line for file in directory.rglob("*.jsonl") for line in file.read_text().splitlines()]
    return {(row["kind"], row.get("module"), row["step"]) for row in map(json.loads, lines) if "kind" in row}


@pytest.mark.fault(206)
def test_a_watched_model_is_recorded_although_the_exporter_is_not_kept():
    model, steps = mlp(), []
    ikkuna.watch(model, CallbackSubscriber("weights", lambda message: steps.append(message.global_step), modules="0"))
    for _ in range(3):
        train(model, 2)
        gc.collect()
    assert steps == [*range(6)]
    del model
    gc.collect()


@pytest.mark.fault(206)
def test_a_model_that_is_dropped_releases_the_exporter_its_thread_and_its_file_and_loses_no_value(tmp_path):
    gc.collect()
    assert becomes_true(lambda: not own_threads())
    before = descriptors()
    model = mlp()
    subscriber = NormSubscriber("weights", backend=get_backend("jsonl"))
    gone = [weakref.ref(x) for x in (model, model[0], ikkuna.watch(model, subscriber, log_dir=tmp_path)._session)]
    train(model, 3)
    assert becomes_true(own_threads)
    del model, subscriber
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
    assert becomes_true(lambda: not own_threads())
    assert descriptors() == before
    assert not optimizers.BEFORE_STEP.hooks
    assert not optimizers.AFTER_STEP.hooks
    assert {step for _, _, step in stored(tmp_path)} == {0, 1, 2}


@pytest.mark.fault(206)
def test_an_exporter_without_modules_is_released_at_once(bus):
    alive = weakref.ref(Exporter(message_bus=bus)._session)
    gc.collect()
    assert alive() is None
    assert bus.sources == ()


@pytest.mark.fault(208, 318)
@pytest.mark.parametrize("shared", [False, True], ids=["own buses", "one bus"])
def test_runs_that_are_forgotten_do_not_pile_up(shared, tmp_path, bus):
    counts = []
    for _ in range(12):
        model = mlp()
        exporter = Exporter(message_bus=bus if shared else MessageBus(), log_dir=tmp_path)
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(NormSubscriber("weights", backend="jsonl"))
        train(model)
        hooks = len(optimizers.BEFORE_STEP.hooks)
        counts.append((len(own_threads()), descriptors(), hooks))
    exporter.close()
    del exporter, model
    gc.collect()
    threads, files, hooks = (list(column) for column in zip(*counts, strict=True))
    assert max(threads) <= 3
    assert max(hooks) <= hooks[0] + 1
    assert max(files) <= files[0] + 6  # a thread may be synchronising its directory
    assert len(stored(tmp_path)) == 2


def test_large_tensors_are_measured_without_threads_of_our_own(bus):
    model = nn.Linear(1024, 1024)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Exporter(message_bus=bus) as exporter:
            exporter.add_modules(model)
            bus.register_subscriber(NormSubscriber("weights", backend="null"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.randn(2, 1024)).sum().backward()
            optimizer.step()
            assert not own_threads()
    finally:
        torch.set_num_threads(before)


@pytest.mark.fault(222)
def test_a_second_watch_of_a_model_replaces_the_first_and_says_so(caplog):
    model, seen = mlp(), {"first": 0, "second": 0}

    def count(name):
        return CallbackSubscriber("weights", lambda message: seen.update({name: seen[name] + 1}), modules="0")

    first = ikkuna.watch(model, count("first"))
    train(model)
    second = ikkuna.watch(model, count("second"))
    train(model)
    assert seen == {"first": 1, "second": 1}
    said = [record.message for record in caplog.records if "labels cannot be seen" not in record.message]
    assert said == ["the model is watched already; closed the exporter of the earlier watch()"]
    assert first.health().steps == 1
    second.close()


CELL = """
model = mlp() if {new} else model
exporter = Exporter(message_bus=bus, log_dir=directory)
{first}
{second}
train(model, 2)
"""
REGISTER = 'exporter.message_bus.register_subscriber(NormSubscriber("weights", backend="jsonl"))'
ADD = "exporter.add_modules(model)"


@pytest.mark.fault(222)
@pytest.mark.parametrize("new", [True, False], ids=["new model", "same model"])
def test_a_cell_that_is_run_again_starts_afresh(new, bus, tmp_path, caplog):
    cell = CELL.format(new=new, first=ADD, second=REGISTER)
    names = {**globals(), "bus": bus, "directory": tmp_path, "model": mlp()}
    for _ in range(3):
        exec(cell, names)
    names["exporter"].close()
    runs = sorted(tmp_path.iterdir())
    assert len(runs) == 3
    assert [len(stored(run)) for run in runs] == [4, 4, 4]
    logged = caplog.text.count("closed an earlier exporter")
    assert logged == 2 or (new and logged < 2)  # the garbage collector may have closed it before


@pytest.mark.fault(222)
def test_a_cell_that_registers_first_starts_afresh_with_a_new_model(bus, tmp_path):
    names = {**globals(), "bus": bus, "directory": tmp_path}
    for _ in range(3):
        exec(CELL.format(new=True, first=REGISTER, second=ADD), names)
    names["exporter"].close()
    assert [len(stored(run)) for run in sorted(tmp_path.iterdir())] == [4, 4, 4]


@pytest.mark.fault(222)
def test_an_exporter_that_a_variable_refers_to_is_never_replaced(bus):
    model = mlp()
    first, second = Exporter(message_bus=bus), Exporter(message_bus=bus)
    first.add_modules(model)
    with pytest.raises(ConfigError, match="another exporter on this bus observes a module '0' already"):
        second.add_modules(model)
    first.close()
    second.add_modules(model)
    second.close()


def test_an_earlier_exporter_with_other_names_goes_on(bus):
    """Two functions may set up one exporter each, and keep neither."""
    models, seen = {"g": mlp(), "d": mlp()}, []
    for name, model in models.items():
        Exporter(message_bus=bus).add_modules((name, model))
    bus.register_subscriber(CallbackSubscriber("weights", lambda message: seen.append(message.module)))
    gc.collect()
    for model in models.values():
        train(model)
    assert seen == ["g.0", "g.2", "d.0", "d.2"]
    models.clear()
    del model
    gc.collect()
    assert bus.sources == ()


def test_an_exporter_leaves_no_function_behind_that_the_process_calls(monkeypatch):
    """Functions that are called after a fork cannot be removed again, so one serves all exporters."""
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: registered.append(functions))
    for _ in range(3):
        ikkuna.watch(nn.Linear(2, 2)).close()
    assert registered == []
