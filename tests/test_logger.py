"""Handlers of the user that raise."""

import errno
import logging
import os
import threading

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.store.json_lines import read
from ikkuna.support.failures import log


class Raising(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)
        raise BrokenPipeError("the log server is gone")


@pytest.fixture
def handler():
    made, logger = Raising(), logging.getLogger("ikkuna")
    logger.addHandler(made)
    yield made
    logger.removeHandler(made)


@pytest.mark.fault(44)
def test_an_exception_of_a_handler_is_ignored_and_the_record_names_its_source(handler):
    log.warning("a %s", "text")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    assert [record.getMessage() for record in handler.records] == ["a text", "failed"]
    assert {record.filename for record in handler.records} == {"test_logger.py"}
    assert handler.records[1].exc_info[0] is ValueError


@pytest.mark.fault(44)
def test_keyboard_interrupts_of_a_handler_are_raised(handler, monkeypatch):
    def interrupt(record):
        raise KeyboardInterrupt

    monkeypatch.setattr(handler, "emit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        log.warning("x")


@pytest.mark.fault(314)
def test_a_handler_that_raises_stops_neither_training_nor_writing(tmp_path, handler, monkeypatch):
    failing, write = threading.Event(), os.write

    def faulty(descriptor, data):
        if failing.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", faulty)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus("handlers"), log_dir=tmp_path) as exporter:
        exporter.add_modules(model)
        bus = exporter.message_bus
        bus.register_subscriber(NormSubscriber("weights", backend="jsonl"))
        bus.register_subscriber(CallbackSubscriber("weights", lambda message: 1 / 0))
        for step in range(30):
            failing.set() if step < 10 else failing.clear()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            exporter.epoch_finished()
            if step < 10:
                assert not bus.run.flush(30)
        assert bus.run.flush(60)
        directory = bus.run.directory
    assert [entry["step"] for entry in read(directory)] == list(range(30))
    assert any("No space left" in record.getMessage() for record in handler.records)
    assert any(record.levelno == logging.ERROR and "Callback" in record.getMessage() for record in handler.records)
