"""P3: memory does not grow with steps."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of a process as Linux tells it")
@pytest.mark.parametrize("way", ["resident", "tracemalloc"])
def test_memory_is_flat_after_the_warm_up(way):
    run = subprocess.run(
        [sys.executable, str(BENCHMARK), "20000", way], capture_output=True, text=True, timeout=1200, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "20,000 steps" in run.stdout
