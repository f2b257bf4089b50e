"""The benchmark of accelerators runs, tried on the host with small models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_every_variant_of_a_model_has_a_line():
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--rounds", "1", "--models", "mlp"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], timeout=300
    )
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines()]
    wall = {row[0]: float(row[1]) for row in rows if len(row) == 6 and row[0]}
    assert {"alone", "norms", "statistics", "histograms", "default preset", "norms by hand"} <= wall.keys()
    assert min(wall.values()) > 0
