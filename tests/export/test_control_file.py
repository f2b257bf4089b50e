"""The file ``control.json``, by which another process changes the sampling of a run."""

import json
import logging
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.store import writer
from ikkuna.store.run_directory import ControlFile, SamplingRequest

pytestmark = pytest.mark.host("the thread of the writer reads the file")


class Training:
    """A run that is trained step by step until something happens."""

    def __init__(self, log_dir, subsample):
        self.bus = MessageBus("control")
        self.exporter = Exporter(message_bus=self.bus, log_dir=log_dir)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.norms = NormSubscriber("weights", subsample=subsample, backend="jsonl", message_bus=self.bus)
        self.exporter.add_modules(self.model)
        self.steps = 0

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.steps += 1

    def train_until(self, condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "nothing has changed"
            self.step()

    @property
    def directory(self):
        return self.bus.run.directory

    @property
    def sampled(self):
        self.bus.run.flush(5)
        lines = (self.directory / next(self.directory.glob("*.jsonl")).name).read_text().splitlines()
        return {json.loads(line)["step"] for line in lines if '"weights_norm2"' in line}


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_CHECK_SECONDS", 0.01)
    made = []

    def make(subsample=1):
        made.append(Training(tmp_path, subsample))
        made[0].step()
        made[0].bus.run.flush(5)
        return made[0]

    yield make
    for one in made:
        one.exporter.close()
        one.bus.close()


def write(directory, content):
    """Write the file from another process, as a person at another shell does."""
    path = str(directory / "control.json")
    subprocess.run([sys.executable, "-c", f"open({path!r}, 'w').write({content!r})"], check=True)


def test_sampling_is_paused_and_resumed_from_another_process(training):
    run = training()
    write(run.directory, '{"paused": true}')
    run.train_until(lambda: run.bus.sampling.at(run.steps)[0])
    first = run.steps
    for _ in range(5):
        run.step()
    write(run.directory, '{"paused": false}')
    run.train_until(lambda: not run.bus.sampling.at(run.steps)[0])
    last = run.steps
    run.step()
    assert run.sampled & set(range(first, last + 1)) == {last}
    assert run.exporter.health().errors == 0


def test_every_step_is_sampled_on_request(training):
    run = training(subsample=1000)
    write(run.directory, '{"every": 1}')
    run.train_until(lambda: run.bus.sampling.at(run.steps)[1] == 1)
    first = run.steps
    for _ in range(3):
        run.step()
    assert {first, first + 1, first + 2} <= run.sampled


def test_a_file_that_is_no_request_is_logged_and_ignored(training, caplog):
    run = training()
    with caplog.at_level(logging.WARNING):
        write(run.directory, '{"paused": ')
        run.train_until(lambda: "control.json' is ignored" in caplog.text)
    run.step()
    assert run.steps - 1 in run.sampled
    assert not run.exporter.health().unwritable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object with paused or every or mute, got list"),
        ('{"stop": 1}', "unknown key 'stop'; known: paused, every"),
        ('{"paused": 1}', "paused must be true or false, got 1"),
        ('{"paused": null}', "paused must be true or false, got None"),
        ('{"every": 0}', "every must be an int >= 1 or null, got 0"),
        ('{"every": true}', "every must be an int >= 1 or null, got True"),
        ('{"every": -1}', "every must be an int >= 1 or null, got -1"),
        ("[" * 100_000, "nested too deeply"),
        ("", "Expecting value"),
    ],
)
def test_contents_that_are_no_request(text, message):
    with pytest.raises(ValueError, match=message):
        SamplingRequest.parse(text)


def test_a_file_is_read_once_for_each_change(tmp_path, caplog):
    control, path = ControlFile(), tmp_path / "control.json"
    control.check(tmp_path)
    assert control.take() is None
    path.write_text('{"every": null}')
    for _ in range(3):
        control.check(tmp_path)
    assert (control.take(), control.take()) == (SamplingRequest(every=None), None)
    path.unlink()
    control.check(tmp_path)
    assert control.take() is None
    path.mkdir()
    control.check(tmp_path)
    assert control.take() is None
    assert "is ignored" in caplog.text
