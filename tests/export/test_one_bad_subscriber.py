"""A bad value of one subscriber affects no other, and `health()` reports backends that cannot be written."""

import errno
import os
import time

import numpy as np
import pytest
import torch

from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber, Subscriber
from ikkuna.store.json_lines import read
from ikkuna.store.values import Matrix
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop

pytestmark = pytest.mark.devices(slow=True)

STEPS = 15


class BadMatrices(Subscriber):
    """Shows matrices whose shape does not fit their names."""

    fields = ("mean",)

    def compute(self, message):
        self.show(message, Matrix(("a",), ("x", "y"), np.zeros((3, 3))))


class BadRows(Subscriber):
    """Returns rows that cannot be copied to the host."""

    def __init__(self, make, **options):
        super().__init__("weights", publishes="bad", backend="null", **options)
        self.make = make

    def measure(self, message):
        return self.make()

    def compute(self, message):
        raise AssertionError("no row arrives")


class WithoutData(torch.Tensor):
    """A subclass without a storage, as quantised tensors are."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float64)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return cls()


def train(*subscribers, log_dir=None, steps=STEPS):
    loop, bus = Loop(CASES["mlp"]), MessageBus(log_dir=log_dir)
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        for subscriber in subscribers:
            bus.register_subscriber(subscriber)
        losses = loop.run(steps)
    return losses, exporter.health()


@pytest.mark.fault(313)
@pytest.mark.parametrize("backend", ["tb", "jsonl", "mpl"])
def test_malformed_matrices_are_a_failure_of_their_subscriber_alone(tmp_path, backend, caplog):
    good = RecordingBackend()
    _, health = train(
        BadMatrices("weights", backend=backend),
        NormSubscriber("weights", backend=[backend, good]),
        log_dir=tmp_path,
    )
    assert health.disabled == ("BadMatrices",)
    assert (health.errors, health.dropped, health.unwritable) == (10, 0, ())
    assert len(good.values) == 3 * STEPS
    assert "matrix with 1 names of rows and 2 of columns, but its shape is (3, 3)" in caplog.text
    assert "backend" not in "".join(record.message for record in caplog.records)


BAD_ROWS = {
    "no data": lambda: torch.ones(2, device="meta"),
    "a subclass without data": WithoutData,
    "sparse": lambda: torch.ones(2).to_sparse(),
    "complex numbers": lambda: torch.ones(2, dtype=torch.complex64),
}


@pytest.mark.fault(313)
@pytest.mark.parametrize("make", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_cannot_be_copied_are_a_failure_of_their_subscriber_alone(make, caplog):
    good = RecordingBackend()
    losses, health = train(BadRows(make), NormSubscriber("weights", backend=good))
    assert all(torch.equal(a, b) for a, b in zip(losses, Loop(CASES["mlp"]).run(STEPS), strict=True))
    assert health.disabled == ("BadRows",)
    assert len(good.values) == 3 * STEPS
    assert "ikkuna failed" not in caplog.text


@pytest.fixture
def disk(monkeypatch):
    """A dictionary; while its entry ``"full"`` is true, no file can be written."""
    state, write = {"full": False}, os.write

    def faulty(descriptor, data):
        if state["full"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", faulty)
    return state


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@pytest.mark.host("values of a device are delivered some steps later")
@pytest.mark.fault(311)
def test_health_tells_that_the_run_cannot_be_written_until_it_can(tmp_path, disk):
    loop, bus = Loop(CASES["mlp"]), MessageBus(log_dir=tmp_path)
    mine = JSONLinesBackend(retry_seconds=0.01)
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("weights", backend=[mine, "null"]))
        loop.run(2)
        assert bus.run.flush(30)
        assert exporter.health().unwritable == ()
        disk["full"] = True
        loop.run(2)
        assert wait_for(lambda: exporter.health().unwritable == ("JSONLinesBackend",))
        assert exporter.health().acked_step == 1
        disk["full"] = False
        assert wait_for(lambda: exporter.health().unwritable == ())
    assert (exporter.health().unwritable, exporter.health().dropped) == ((), 0)
    assert len(read(mine.path)) == 4 * 3


@pytest.mark.host("values of a device are delivered some steps later")
@pytest.mark.fault(311)
def test_health_after_close_keeps_what_was_lost_and_that_the_run_could_not_be_written(tmp_path, disk):
    loop, bus = Loop(CASES["mlp"]), MessageBus(log_dir=tmp_path)
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("weights", backend="jsonl"))
        loop.run(2)
        assert bus.run.flush(30)
        disk["full"] = True
        loop.run(3)
    health = exporter.health()
    assert (health.acked_step, health.dropped, health.unwritable) == (1, 3 * 3, ("jsonl",))
    assert health == exporter.health()


@pytest.mark.host("values of a device are delivered some steps later")
@pytest.mark.fault(311)
def test_a_disabled_backend_is_one_that_cannot_be_written():
    class Broken(RecordingBackend):
        def commit(self, step):
            raise OSError(errno.EIO, "on purpose")

    loop, bus = Loop(CASES["mlp"]), MessageBus()
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(loop.model)
        bus.register_subscriber(NormSubscriber("weights", backend=Broken()))
        for steps in (1, STEPS):
            loop.run(steps)
            assert exporter.health().unwritable == ("Broken",)
    assert exporter.health().unwritable == ("Broken",)
