"""A script of a user with three planted bugs, watched with one line: the console names all of them."""

import re
import subprocess
import sys

SCRIPT = """
import torch
from torch import nn

import ikkuna

torch.manual_seed(0)
inputs = torch.randn(2000, 20)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()

features = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
nn.init.constant_(features[0].bias, -50.0)
model = nn.Sequential(features, nn.Linear(64, 2))
optimizer = torch.optim.Adam(features.parameters(), lr=1e-3)
ikkuna.watch(model)

for step in range(100):
    rows = torch.randint(0, 2000, (32,))
    loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
    loss.backward()
    optimizer.step()
"""


def test_three_bugs_in_a_script_are_named_on_the_console(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    named = re.findall(r"error: (\w+)(?: in (\S+)(?: \(\w+\))?)? at step \d+: (.*)", done.stderr)
    modules = {rule: module for rule, module, _ in named}
    assert modules["not_in_optimizer"] == "1"
    assert modules["dead_units"] == "0.1"
    assert "not_zeroed" in modules
    assert len(done.stderr.splitlines()) <= 12, done.stderr  # a finding once more when its severity rises
