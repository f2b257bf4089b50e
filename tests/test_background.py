"""Threads that are started without waiting for them."""

import threading

import pytest
import torch

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.store.json_lines import read
from ikkuna.support.threads import BackgroundThread


def refuse(thread):
    raise RuntimeError("can't start new thread")


def die(thread):
    """The thread ends before it can report that it runs."""


FAULTS = {"refused": ("start", refuse), "dying": ("_bootstrap", die)}


@pytest.fixture(params=FAULTS)
def no_thread(request, monkeypatch):
    waiting = dict(threading._limbo)
    monkeypatch.setattr(threading.Thread, *FAULTS[request.param])
    yield
    threading._limbo.clear()  # threads that died while they started are listed there for ever
    threading._limbo.update(waiting)


def test_a_thread_begins_ends_and_is_a_daemon():
    begun, gate, kinds = threading.Event(), threading.Event(), []

    def work():
        kinds.append((threading.current_thread().daemon, threading.current_thread().name))
        begun.set()
        gate.wait()

    thread = BackgroundThread(work, "mine")
    assert not thread.has_begun()
    assert thread.start()
    assert begun.wait(30)
    assert thread.has_begun()
    assert thread.is_alive()
    assert not thread.join(0)
    gate.set()
    assert thread.join(30)
    assert not thread.is_alive()
    assert kinds == [(True, "mine")]


@pytest.mark.fault(309)
def test_starting_a_thread_that_dies_does_not_wait(no_thread):
    thread = BackgroundThread(lambda: None, "mine")
    assert thread.start()
    assert not thread.has_begun(0.05)
    assert not thread.is_alive()


def test_a_thread_that_the_system_refuses_is_no_error(monkeypatch):
    monkeypatch.setattr("_thread.start_new_thread", lambda *arguments: refuse(None))
    thread = BackgroundThread(lambda: None, "mine")
    assert not thread.start()
    assert not thread.has_begun(None)


@pytest.mark.fault(309, 326)
def test_training_goes_on_without_threads_and_loses_nothing(no_thread, tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter(message_bus=MessageBus(), log_dir=tmp_path)
    exporter.add_modules(model)
    exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=["jsonl", "tb", "mpl"]))
    for _ in range(5):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert exporter.health().acked_step == -1
    exporter.close()
    assert exporter.health().acked_step == 4
    assert exporter.health().dropped == 0
    assert [entry["step"] for entry in read(tmp_path / "run0001")] == list(range(5))
