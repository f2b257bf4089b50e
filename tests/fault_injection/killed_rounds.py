"""Kills processes that write under random faults of files, and checks what they leave; run under the shim.

Arguments: a directory, the first seed, the number of rounds.  Prints a JSON list of what is wrong.
"""

import ctypes
import errno
import json
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    logging.disable()
    sys.modules["torch"] = None  # tensorboardX would import it, for longer than a round takes

from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series
from tests.fault_injection import Fault

SERIES = [Series("loss"), Series("accuracy")]
FAULTS = [
    Fault("write", errno.ENOSPC, probability=0.03),
    Fault("write", "torn", probability=0.03),
    Fault("write", "short", probability=0.03),
    Fault("write", 0.002, probability=0.05),
    Fault("fsync", errno.EIO, probability=0.15),
    Fault("fsync", "lose", probability=0.15),
    Fault("fsync", 0.005, probability=0.1),
    Fault("open", errno.EMFILE, probability=0.2),
    Fault("mkdir", errno.EACCES, probability=0.2),
    Fault("ftruncate", errno.EIO, probability=0.3),
]


def value_of(series, step):
    return step + (0.25 if series.kind == "accuracy" else 0.5)


def write(directory, seed, reports):
    """Show values until this process is killed, and report the acknowledged step with its time."""
    os.environ["FILE_FAULTS_BELOW"] = str(directory)
    os.environ["FILE_FAULTS"] = " ".join(map(str, FAULTS))
    os.environ["FILE_FAULTS_SEED"] = str(seed)
    os.environ["FILE_FAULTS_JOURNAL"] = f"{directory}.journal"
    ctypes.CDLL(None).file_faults_restart()
    options = {"retry_seconds": 0.01, "sync_seconds": 0.02}
    backends = [JSONLinesBackend(**options), TensorBoardBackend(**options)]
    run = Run(directory / "log")
    step = 0
    while True:
        for series in SERIES:
            run.show(series, value_of(series, step), step, backends)
        run.commit(step)
        os.write(reports, b"%.9f %d\n" % (time.monotonic(), run.acked_step))
        if step % 50 == 49:
            run.flush(0.05)
        step += 1
        time.sleep(0.0002)


def acknowledged(directory):
    """Return the last acknowledged step; -1 if values were lost by the disk since it was reported."""
    lines = Path(f"{directory}.reports").read_text().split("\n")[:-1]
    if not lines:
        return -1
    when, acked = lines[-1].split()
    journal = Path(f"{directory}.journal")
    faults = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    lost = max((float(line[0]) for line in faults if line[2] == "lose"), default=0.0)
    return int(acked) if lost < float(when) else -1


def stored(directory):
    """Return the entries (kind, step, value) that the files of each backend contain, as often as they do."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines, events = Counter(), Counter()
    for run in directory.glob("log/run*"):
        for entry in read(run):
            if "value" in entry:
                lines[entry["kind"], entry["step"], entry["value"]] += 1
        accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        for tag in accumulator.Tags()["scalars"]:
            for event in accumulator.Scalars(tag):
                events[tag.removeprefix("Network/"), event.step, event.value] += 1
    return {"lines": lines, "events": events}


def problems(directory):
    """Return what is wrong in the files of a killed process, and the last acknowledged step."""
    acked = acknowledged(directory)
    wrong = []
    right = {(series.kind, step, value_of(series, step)) for series in SERIES for step in range(acked + 1)}
    for name, found in stored(directory).items():
        wrong += [
            f"{name}: {entry} is wrong" for entry in found if entry[2] % 1 != (0.25 if entry[0] == "accuracy" else 0.5)
        ]
        wrong += [f"{name}: {entry} is wrong" for entry in found if int(entry[2]) != entry[1]]
        wrong += [f"{name}: {entry} is there {count} times" for entry, count in found.items() if count != 1]
        wrong += [f"{name}: {entry} of {acked} acknowledged steps is missing" for entry in sorted(right - set(found))]
    return wrong, acked


def round_of(root, seed):
    directory = root / f"round{seed}"
    directory.mkdir()
    reports = os.open(f"{directory}.reports", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    child = os.fork()
    if not child:
        try:
            write(directory, seed, reports)
        finally:
            os._exit(1)
    os.close(reports)
    time.sleep(random.Random(seed).uniform(0.02, 0.6))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    wrong, acked = problems(directory)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        wrong.append(f"the process ended with {status}")
    return wrong, acked


def main():
    root, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    wrong, steps = {}, 0
    for seed in range(first, first + count):
        found, acked = round_of(root, seed)
        steps += acked + 1
        if found:
            wrong[seed] = [len(found), *found[:3]]
    sys.stdout.write(json.dumps({"wrong": wrong, "steps": steps}) + "\n")


if __name__ == "__main__":
    main()
