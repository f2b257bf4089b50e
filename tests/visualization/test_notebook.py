"""Pictures in an executed notebook; runs where nbclient and ipykernel are installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documentation.test_blocks import SITE, blocks
from tests.plugins.children import environment

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("nbclient", "ipykernel"))), reason="nbclient and ipykernel are not installed"
)

CELLS = (
    """
import torch
from torch import nn
from ikkuna.export import Exporter
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exporter = Exporter(log_dir="run", verbosity=0)
exporter.add_modules(model)
for metric in (NormSubscriber, HistogramSubscriber):
    exporter.message_bus.register_subscriber(metric("weights", backend="mpl"))
""",
    """
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    exporter.message_bus.run.flush()
""",
    "exporter.close()",
)
EXECUTE = """
import json, sys
import nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient
manager = KernelManager(transport="ipc", ip="kernel")
manager.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
cells = [nbformat.v4.new_code_cell(code) for code in json.loads(sys.argv[1])]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=100, km=manager).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


def execute(cells, directory):
    """Execute a notebook in another process, in a directory, and return the outputs of its cells."""
    path = environment(*map(Path, sys.path))["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, json.dumps(cells)],
        env={**os.environ, "PYTHONPATH": path, "JUPYTER_PLATFORM_DIRS": "1", "HOME": str(directory)},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_pictures_are_shown_once_below_the_cell_that_trains_and_replaced_in_place(tmp_path):
    before, shown, after = execute(CELLS, tmp_path)
    assert (before, after) == ([], [])
    assert [output["output_type"] for output in shown] == ["display_data", "display_data"]
    assert [output["data"]["text/plain"] for output in shown] == [
        "<picture of weights_norm2>",
        "<picture of weights_histograms>",
    ]
    assert all(output["data"]["image/png"].startswith("iVBOR") for output in shown)


@pytest.mark.slow  # the pictures above run the same cells once
@pytest.mark.fault(222)
def test_the_cells_of_the_quick_start_can_be_run_again(tmp_path):
    """Each time they begin a new run with all values, also where the cell before was not run to its end."""
    model, watched, chosen = (code for _, code in blocks(SITE / "quick_start.rst")[:3])
    set_up, found, loop = chosen.partition("exporter.close()")[0].partition("for inputs, labels in batches:\n")
    assert found
    assert "ikkuna.watch(" in watched
    unclosed = [set_up, found + loop, "print('steps', exporter.health().steps, exporter.health().errors)"]
    short = ["exporter = ikkuna.watch(model, loss_function)", *unclosed[1:]]
    outputs = execute([model, watched, watched, *unclosed * 2, model, *unclosed, *short * 2], tmp_path)
    texts = {
        name: [o["text"] for cell in outputs for o in cell if o.get("name") == name] for name in ("stdout", "stderr")
    }
    assert [text for text in texts["stdout"] if text.startswith("steps")] == ["steps 29 0\n"] * 5
    closed, again = (
        sum(what in text for text in texts["stderr"]) for what in ("closed an earlier exporter", "is watched already")
    )
    assert closed in (1, 2)  # the garbage collector may have closed the exporter of the model that was replaced
    assert again == 1
    assert len(list((tmp_path / "run").iterdir())) == 7
