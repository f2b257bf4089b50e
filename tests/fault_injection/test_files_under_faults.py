"""The contents of files, through real descriptors, when calls of the operating system fail or take long."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ikkuna.store.json_lines import read
from tests.fault_injection import Fault, build_shim

ROOT = Path(__file__).parents[2]
EVENTS = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    try:
        return build_shim(tmp_path_factory.mktemp("shim"))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"faults cannot be injected: {error}")


SCRIPT = """
import json, logging, os, sys, threading, time
sys.modules["torch"] = None  # tensorboardX would import it, for longer than a test takes
logging.basicConfig(filename=sys.argv[2])
from ikkuna.store.names import Series
from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import TensorBoardBackend

options = {"retry_seconds": 0.02, "sync_seconds": 0.02}
run = Run(sys.argv[1])
backends = [JSONLinesBackend(**options), TensorBoardBackend(**options)]

def show(steps):
    for step in steps:
        run.show(Series("loss"), step + 0.5, step, backends)
        run.commit(step)

def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
"""


@pytest.fixture
def result(shim, tmp_path):
    """Run a script under faults below the log directory; return what it printed, as JSON."""

    def run(body, faults):
        below = tmp_path / "disk"
        below.mkdir()
        environment = shim.environment(below, faults, journal=tmp_path / "journal")
        script = tmp_path / "script.py"
        script.write_text(SCRIPT + body)
        done = subprocess.run(
            [sys.executable, str(script), str(below / "log"), str(tmp_path / "log.txt")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def journal(tmp_path):
    path = tmp_path / "journal"
    return [tuple(line.split()[1:]) for line in path.read_text().splitlines()] if path.exists() else []


def stored(tmp_path):
    """Return the steps in the files of each backend; a wrong value fails."""
    [directory] = (tmp_path / "disk" / "log").glob("run*")
    entries = [entry for entry in read(directory) if "value" in entry]
    assert all(entry["value"] == entry["step"] + 0.5 for entry in entries)
    accumulator = EVENTS.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    events = accumulator.Scalars("Network/loss")
    assert all(event.value == event.step + 0.5 for event in events)
    return [entry["step"] for entry in entries], [event.step for event in events]


WHOLE = """
show(range(20))
run.flush(0.2)
show(range(20, 40))
wait_for(lambda: run.acked_step == 38)
run.flush(10) or run.flush(10)
print(json.dumps([run.close(10), run.acked_step, run.dropped]))
"""
FIRST = {"first": 1, "last": 3}
TRANSIENT = {
    # errors of write-back; the first call of each file synchronises its directory
    "a failed fsync": [Fault("fsync", errno.EIO, 3, 4)],
    "a failed fsync that loses pages": [Fault("fsync", "lose", 3, 4)],
    "many failed calls of fsync": [Fault("fsync", "lose", 2, 9)],
    "fsync and ftruncate": [Fault("fsync", errno.EIO, 3, 6), Fault("ftruncate", errno.EIO)],
    "fsync and open": [Fault("fsync", "lose", 3, 4), Fault("open", errno.EMFILE, 5, 9)],
    # the first value
    "too many open files at first": [Fault("open", errno.EMFILE, **FIRST)],
    "no inodes at first": [Fault("open", errno.ENOSPC, **FIRST)],
    "no permission at first": [Fault("mkdir", errno.EACCES, **FIRST)],
    "read-only at first": [Fault("mkdir", errno.EROFS, **FIRST), Fault("open", errno.EROFS, **FIRST)],
    "a full disk at first": [Fault("write", errno.ENOSPC, **FIRST)],
    "over quota at first": [Fault("write", errno.EDQUOT, **FIRST)],
    # later
    "torn writes": [Fault("write", "torn", 2, 5)],
    "short writes": [Fault("write", "short", 1, 5)],
    "torn writes that cannot be cut at once": [Fault("write", "torn", 2, 3), Fault("ftruncate", errno.EIO, 1, 4)],
}
PLACES = {301: "fsync", 305: "at first"}


def marks(name):
    return [pytest.mark.fault(number) for number, part in PLACES.items() if part in name]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in TRANSIENT])
def test_a_fault_that_passes_costs_no_value(result, tmp_path, name):
    assert result(WHOLE, TRANSIENT[name]) == [True, 39, 0]
    assert stored(tmp_path) == (list(range(40)), list(range(40)))
    assert {f"{fault.operation}" for fault in TRANSIENT[name]} <= {operation for operation, _ in journal(tmp_path)}


@pytest.mark.fault(301)
def test_a_disk_that_never_synchronises_stores_nothing_and_says_so_once(result, tmp_path):
    body = """
options["sync_seconds"] = 30  # no step is synchronised before the last one was shown
backends = [JSONLinesBackend(**options), TensorBoardBackend(**options)]
show(range(20))
flushed = run.flush(30)
acked = run.acked_step
print(json.dumps([flushed, acked, run.close(0.5), run.dropped]))
"""
    flushed, acked, closed, dropped = result(body, [Fault("fsync", "lose")])
    assert (flushed, acked, closed) == (False, -1, False)
    assert dropped == 40
    errors = (tmp_path / "log.txt").read_text().splitlines()
    assert sum("cannot be written" in line for line in errors) == 2  # one for each file
    assert sum("closed before 20 values" in line for line in errors) == 2


@pytest.mark.fault(304)
@pytest.mark.parametrize("operation", ["mkdir", "open", "fsync", "write"])
def test_the_first_value_does_not_wait_for_the_disk(result, tmp_path, operation):
    """The disk takes 0.7 s for each call; while it does, 50 steps are shown."""
    body = """
show(range(50))
shown = time.monotonic()
closed = run.close(30)
print(json.dumps([shown, closed]))
"""
    shown, closed = result(body, [Fault(operation, 0.7, 1, 2)])
    assert closed
    begun = [float(line.split()[0]) for line in (tmp_path / "journal").read_text().splitlines()]
    assert shown < begun[0] + 0.7
    assert stored(tmp_path)[0] == list(range(50))


def test_a_process_without_faults_below_the_directory_is_not_disturbed(result, tmp_path):
    body = f"""
for number in range(5):
    with open({str(tmp_path)!r} + f"/other{{number}}", "w") as file:
        file.write("content")
        file.flush()
        os.fsync(file.fileno())
print(json.dumps(None))
"""
    every = [Fault(operation, errno.EIO) for operation in ("write", "fsync", "open", "mkdir", "ftruncate")]
    result(body, every)
    assert journal(tmp_path) == []


@pytest.mark.slow
@pytest.mark.fault(83, 301, 305)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_200_processes_that_are_killed_under_random_faults_keep_what_was_acknowledged(shim, tmp_path):
    """No acknowledged value is lost, none is wrong, and none is there twice."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killed_rounds.py")), str(tmp_path), "0", "200"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_PRELOAD": str(shim.path)},
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == {}
    assert found["steps"] > 1000
