"""Whether anything grows in hours of training: ``ikkuna.watch`` with the preset ``full``, which measures every step.

A small model trains on random batches; every 500th batch contains NaN or values of 10,000 by turns, so that rules find something
and the flight recorder writes dumps.  Every `--report` seconds a dump is also written by hand, and another process writes a report.
The process notes every `--interval` seconds its memory, open files, threads, the copies of weights that it keeps,
what Python's collector tracks, and the bytes on the disk.

    python benchmarks/soak.py [--seconds 7200] [--interval 60] [--report 600] [--pause 0.03] [--log FILE]

The exit status is 1 if memory, open files, threads or the bytes of a step grow in the second half, see `problems`.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis import RecorderOptions

MEBIBYTE = 1 << 20
GROWTH = 4.0
"""MiB of memory an hour.  Allocators take and return pieces: notes vary by 5 MiB around a straight line, and its slope by 2 MiB an hour."""


def memory():
    """Return the memory of this process, in MiB: its own (``anonymous``), and pages of files, which the system may drop."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"anonymous": "RssAnon", "of_files": "RssFile"}
    return {name: round(int(fields[field].split()[0]) / 1024, 2) for name, field in names.items()}


def size(directory):
    """Return the bytes of all files below `directory`, in MiB."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / MEBIBYTE


class Reporter:
    """Writes reports of a run, each in a process beside the training; `poll` returns the seconds of one that has finished."""

    def __init__(self, directory):
        page = str(directory.parent / "report.html")
        self._command = [sys.executable, "-m", "ikkuna", "report", str(directory), "-o", page]
        self._process, self._began = None, 0.0

    def start(self):
        if self._process is None:
            self._began = time.monotonic()
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def poll(self):
        """Return a dictionary for a note, empty if no report has finished since the last call."""
        if self._process is None or self._process.poll() is None:
            return {}
        status, self._process = self._process.returncode, None
        return {"report_seconds": round(time.monotonic() - self._began), "report_status": status}

    def stop(self):
        if self._process is not None:
            self._process.wait()


class Training:
    """A model that trains under `ikkuna.watch`, one `step` at a time."""

    def __init__(self, log_dir):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.loss = nn.CrossEntropyLoss()
        options = RecorderOptions(state_every=10, cool_down=50, max_dumps=1000, signals=("SIGUSR1",))
        self.monitor = ikkuna.watch(
            self.model,
            loss=self.loss,
            preset="full",
            every=1,
            log_dir=str(log_dir),
            backend=["tb", "jsonl"],
            recorder=options,
        )
        self.number = 0

    def step(self):
        inputs = torch.randn(8, 4)
        is_hostile = self.number % 500 == 499
        if is_hostile:
            inputs[0] = float("nan") if self.number % 1000 == 999 else 1e4
        self.optimizer.zero_grad()
        self.loss(self.model(inputs), torch.randint(0, 3, (8,))).backward()
        if is_hostile:  # the weights stay finite
            for parameter in self.model.parameters():
                parameter.grad.zero_()
        self.optimizer.step()
        self.monitor.log("number", float(self.number))
        self.number += 1


def note(training, directory, seconds):
    health = training.monitor.health()
    return {
        "seconds": round(seconds),
        "steps": health.steps,
        "acked": health.acked_step,
        **memory(),
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "kept_bytes": health.kept_bytes,
        "objects": len(gc.get_objects()),
        "run": round(size(directory) - size(directory / "dumps"), 2),
        "dumps": health.dumps,
        "dumps_size": round(size(directory / "dumps"), 2),
        "failed_dumps": health.failed_dumps,
        "findings": len(training.monitor.findings),
        "errors": health.errors,
        "dropped": health.dropped,
    }


def slope(notes, name, over):
    """Return the slope of the least-squares line of one figure over another."""
    return float(np.polyfit([one[over] for one in notes], [one[name] for one in notes], 1)[0])


def problems(notes):
    """Return what grows in the second half of a run, as sentences."""
    half = len(notes) // 2
    first, second = notes[half // 2 : half], notes[half:]
    found = []
    growth = slope(second, "anonymous", "seconds") * 3600
    if growth > GROWTH:
        found.append(f"memory grows by {growth:.1f} MiB an hour")
    for name in ("open_files", "threads", "kept_bytes"):
        before, after = (max(one[name] for one in part) for part in (first, second))
        if after > before:
            found.append(f"{name} grew from {before} to {after}")
    before, after = (slope(part, "run", "steps") for part in (first, second))
    if after > 1.05 * before:
        found.append(f"a step needs {after * MEBIBYTE:.0f} bytes of the run, and before {before * MEBIBYTE:.0f}")
    found += [f"{name}: {notes[-1][name]}" for name in ("errors", "dropped", "failed_dumps") if notes[-1][name]]
    found += [f"a report ended with status {one['report_status']}" for one in notes if one.get("report_status")]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between two notes")
    parser.add_argument(
        "--report", type=float, default=600.0, help="seconds between two reports, and two dumps by hand"
    )
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between two steps")
    parser.add_argument("--log", help="a file to which each note is appended as a line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    notes, reporter = [], None
    with tempfile.TemporaryDirectory(prefix="ikkuna-soak-") as root:
        training = Training(Path(root) / "log")
        began = noted = reported = time.monotonic()
        while (now := time.monotonic()) < began + options.seconds:
            training.step()
            time.sleep(options.pause)
            if now < noted + options.interval:
                continue
            noted = now
            [directory] = (Path(root) / "log").glob("run*")
            reporter = reporter or Reporter(directory)
            notes.append(note(training, directory, now - began) | reporter.poll())
            if now >= reported + options.report:
                reported = now
                training.monitor.dump("by hand")
                reporter.start()
            line = json.dumps(notes[-1])
            print(line, flush=True)
            if options.log:
                with open(options.log, "a") as file:
                    file.write(line + "\n")
        training.monitor.close()
        if reporter is not None:
            reporter.stop()
        health = training.monitor.health()
        print(f"closed: {health.steps} steps, {health.acked_step} acknowledged, {health.dropped} values dropped")
    found = problems(notes)
    print("\n".join(found) or "flat")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
