"""After every end of a training process the file contains all acknowledged values and no incomplete record."""

import json
import os
import signal

import pytest

from ikkuna.store.json_lines import read

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals")

TRAIN = """
import os, signal, sys
import torch
from torch import nn
from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD([model.weight], lr=0.1)
other = torch.optim.SGD([model.bias], lr=0.1)
exporter = Exporter(log_dir=sys.argv[1])
exporter.add_modules(model)
exporter.message_bus.register_subscriber(NormSubscriber("weights", backend="jsonl"))
for step in range(50):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    if step < 49:  # the last step stays open
        other.step()
if sys.argv[2] == "os._exit" or sys.argv[2].startswith("SIG"):
    exporter.message_bus.run.flush(30)
print(exporter.health().acked_step, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
match sys.argv[2]:
    case "end": pass
    case "exception": raise RuntimeError("of the user's")
    case "KeyboardInterrupt": raise KeyboardInterrupt
    case "os._exit": os._exit(4)
    case name: os.kill(os.getpid(), getattr(signal, name))
"""

SUDDEN = {"SIGTERM": -signal.SIGTERM, "SIGABRT": -signal.SIGABRT, "os._exit": 4}
# 1 with tabulate installed: torch imports it at exit, and Python loses the exit status
ORDERLY = {"end": (0,), "exception": (1,), "KeyboardInterrupt": (-signal.SIGINT, 1)}


def ended(child, log_dir, way):
    """Return the exit status of a training process, its output, and the steps in its file."""
    process = child(TRAIN, log_dir, way)
    status = process.wait(120)
    lines = process.output.read_text().splitlines()
    [file] = log_dir.glob("run0001/values.*.jsonl")
    assert all(json.loads(line) for line in file.read_text().splitlines())
    acked, is_default = next(line.split() for line in lines if line[:1] in "-0123456789")
    assert is_default == "True"  # ikkuna installs no signal handler
    return status, int(acked), [entry["step"] for entry in read(file)]


@pytest.mark.fault(85, 86)
@pytest.mark.parametrize("way", SUDDEN)
def test_a_sudden_end_loses_nothing_that_was_acknowledged(tmp_path, child, way):
    status, acked, steps = ended(child, tmp_path / "log", way)
    assert status == SUDDEN[way]
    assert acked == 48
    assert steps == list(range(49))


@pytest.mark.fault(87)
@pytest.mark.parametrize("way", ORDERLY)
def test_an_orderly_end_loses_nothing(tmp_path, child, way):
    """The values of an open step are stored too."""
    status, _, steps = ended(child, tmp_path / "log", way)
    assert status in ORDERLY[way]
    assert steps == list(range(50))
