"""Killed processes, forks, full disks and the end of the interpreter, each in another process."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time

import pytest

from ikkuna.backends.run import Run
from ikkuna.store.append_file import process_name
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series
from ikkuna.store.run_directory import Continued, read_run_file

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals and fork")

MAKE = """
import json, os, sys
sys.modules["torch"] = None  # tensorboardX would import it, for longer than a test takes
from ikkuna.store.names import Series
from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.backends.run import Run

LOSS = Series("loss")
run = Run(sys.argv[1])
events, lines = TensorBoardBackend(retry_seconds=0.05), JSONLinesBackend(retry_seconds=0.05)

def step(number, values=1):
    for _ in range(values):
        run.show(LOSS, float(number), number, (events, lines))
    run.commit(number)
"""

KILLED = (
    MAKE
    + """
number = 0
while True:
    step(number)
    number += 1
    print(run.acked_step, flush=True)
"""
)


def event_steps(directory):
    found = accumulators.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in found.Scalars("Network/loss")]


def line_steps(directory):
    return [entry["step"] for entry in read(directory) if "value" in entry]


def wait_for(process, condition, seconds=60):
    """Wait until `condition` is true for the output of the process."""
    deadline = time.monotonic() + seconds
    while not condition(process.output.read_text()):
        assert time.monotonic() < deadline, process.output.read_text()[-1000:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.01)
            raise AssertionError(process.output.read_text()[-1000:])


def result(process, seconds=60):
    assert process.wait(seconds) == 0, process.output.read_text()
    return json.loads(process.output.read_text().splitlines()[-1])


@pytest.mark.fault(83)
@pytest.mark.parametrize("round_", range(5))
def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path, child, round_):
    process = child(KILLED, tmp_path / "log")
    size = random.Random(round_).randint(10, 5_000)
    wait_for(process, lambda text: len(text) > size and int(text.split("\n")[-2]) >= 0)  # the last whole line
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    acked = max(int(line) for line in process.output.read_text().split("\n")[:-1])
    assert acked >= 0
    for steps in (event_steps(tmp_path / "log" / "run0001"), line_steps(tmp_path / "log" / "run0001")):
        assert steps == list(range(len(steps)))
        assert len(steps) > acked


FULL = (
    MAKE
    + """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
for number in range(2_000):
    step(number)
while run.acked_step < 10:
    pass
first = run.flush(10)
if sys.argv[2] == "freed":
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps([first, run.close(10), run.acked_step, run.dropped]))
"""
)


@pytest.mark.fault(68)
def test_a_full_disk_leaves_readable_files_and_exact_counts(tmp_path, child):
    flushed, closed, acked, dropped = result(child(FULL, tmp_path / "log", "full"))
    steps, lines = event_steps(tmp_path / "log" / "run0001"), line_steps(tmp_path / "log" / "run0001")
    assert (flushed, closed) == (False, False)
    assert steps == list(range(len(steps)))
    assert lines == list(range(len(lines)))
    assert 10 < min(len(steps), len(lines)) < 2000
    assert acked == min(steps[-1], lines[-1])
    assert dropped == 4000 - len(steps) - len(lines)


def test_a_disk_that_has_room_again_gets_everything(tmp_path, child):
    assert result(child(FULL, tmp_path / "log", "freed")) == [False, True, 1999, 0]
    assert event_steps(tmp_path / "log" / "run0001") == list(range(2000))
    assert line_steps(tmp_path / "log" / "run0001") == list(range(2000))


FORKED = (
    MAKE
    + """
import gc
step(0)
child = os.fork()
if not child:
    for number in range(100, 150):
        step(number)
    answers = [run.flush(), run.close(), events.flush(), events.close(), lines.close()]
    lines.add_scalar(LOSS, 1.0, 200)
    lines.commit(200)
    if sys.argv[2] == "collected":
        run = events = lines = None
        gc.collect()
    assert answers == [False] * 5, answers
    sys.exit(7)
_, status = os.waitpid(child, 0)
for number in range(1, 50):
    step(number)
print(json.dumps([os.waitstatus_to_exitcode(status), run.close(30), run.dropped]))
"""
)


@pytest.mark.parametrize("way", ["left", "collected"])
def test_a_forked_child_is_inert(tmp_path, child, way):
    """The child logs, closes and exits without changing the files or affecting its parent."""
    assert result(child(FORKED, tmp_path / "log", way)) == [7, True, 0]
    assert event_steps(tmp_path / "log" / "run0001") == list(range(50))
    assert line_steps(tmp_path / "log" / "run0001") == list(range(50))


FORKED_WHILE_BUSY = (
    MAKE
    + """
for number in range(100):
    step(number)
    if number % 20 == 0 and not (child := os.fork()):
        for ours in (run, events, lines):
            ours.commit(number)
            ours.close()
        sys.exit(0)
    elif number % 20 == 0:
        os.waitpid(child, 0)
print(json.dumps(run.close(30)))
"""
)


def test_forking_while_the_thread_holds_the_lock_harms_nobody(tmp_path, child):
    assert result(child(FORKED_WHILE_BUSY, tmp_path / "log")) is True
    assert event_steps(tmp_path / "log" / "run0001") == list(range(100))


STUCK = (
    MAKE
    + """
import atexit, threading, time
never = threading.Event()
write = os.write
os.write = lambda descriptor, data: never.wait()
for number in range(100):
    step(number)
if sys.argv[2] == "atexit":
    atexit.register(run.close)
elif sys.argv[2] == "thread":
    threading.Thread(target=lambda: (run.close(), sys.exit(1))).start()
print(json.dumps(None))
sys.stdout.flush()
"""
)


@pytest.mark.fault(89)
@pytest.mark.parametrize("way", ["never closed", "atexit", "thread"])
def test_a_disk_that_never_answers_does_not_keep_the_interpreter(tmp_path, child, way):
    process = child(STUCK, tmp_path / "log", way)
    wait_for(process, lambda text: text.startswith("null\n"))
    assert process.wait(60) == 0, process.output.read_text()  # an interpreter that waited for the disk would never end


LATE = (
    MAKE
    + """
import atexit
def late():
    step(1)
    print(json.dumps(run.close(10)))
if sys.argv[2] == "started":
    step(0)
atexit.register(late)
"""
)


@pytest.mark.parametrize("way", ["started", "not started"])
def test_values_of_the_last_moment_are_kept(tmp_path, child, way):
    """Some versions of Python cannot start a thread at this point."""
    assert result(child(LATE, tmp_path / "log", way)) is True
    assert line_steps(tmp_path / "log" / "run0001")[-1] == 1


IMPORTED = """
import json, sys
import ikkuna.visualization, ikkuna.backends.run
print(json.dumps([name for name in ("torch", "tensorboardX", "matplotlib") if name in sys.modules]))
"""


def test_importing_costs_nothing(child):
    assert result(child(IMPORTED)) == []


def continued(directory, step):
    """Write a value of a step by another run object of this process; return the directory that it got."""
    run = Run(directory.parent, continued=Continued(directory, step, "1a2b"))
    run.show(Series("loss"), 0.5, step, ["jsonl"])
    run.commit(step)
    found = run.directory
    assert run.close(10.0)
    return found


@pytest.mark.fault(342)
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_another_process_writes_is_not_continued_before_that_process_has_ended(
    tmp_path, child, signal_number, caplog
):
    process = child(KILLED, tmp_path)
    wait_for(process, lambda text: text.count("\n") > 1 and int(text.split("\n")[-2]) >= 0)
    [directory] = tmp_path.glob("run*")
    other = continued(directory, 5)
    assert other.name == "run0002"
    assert f"process {process_name().split('.')[0]}" in caplog.text
    assert f".{process.pid} writes the run in '{directory}'; this one writes to '{other}'" in caplog.text
    assert read_run_file(other).id != "1a2b"
    assert line_steps(other) == [5]
    process.send_signal(signal_number)
    process.wait(10)
    acked = int(process.output.read_text().split("\n")[-2])  # of the last whole line
    assert continued(directory, acked + 1) == directory
    assert line_steps(directory) == [*range(acked + 2)]
