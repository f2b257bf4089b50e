"""Training started with torchrun writes one run, in which TensorBoard reads the values of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.visualization.test_tensorboard import load, points

ROOT = Path(__file__).parents[2]


def trained(log_dir, *launcher):
    """Run the script to its end; return every scalar that TensorBoard reads from its one run."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "subscribers"))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, str(ROOT / "tests/distributed/train.py"), str(log_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    assert [path.name for path in log_dir.iterdir()] == ["run0001"]
    read = load(log_dir / "run0001")
    return {tag: points(read, tag) for tag in read.Tags()["scalars"]}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torchrun_writes_the_one_run_of_one_process(tmp_path, ranks):
    one = trained(tmp_path / "one")
    many = trained(tmp_path / "many", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    assert many.keys() == one.keys()
    assert {"Network/loss", "Network/train_accuracy", "weights_norm2/block.0"} <= one.keys()
    for tag, values in one.items():
        assert [step for step, _ in many[tag]] == [step for step, _ in values], tag
        assert [value for _, value in many[tag]] == pytest.approx([value for _, value in values], rel=2e-4, abs=1e-6), (
            tag
        )
