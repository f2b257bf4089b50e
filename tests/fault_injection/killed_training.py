"""Kills trainings that are watched under random faults of files, and checks what they leave.

    python -m tests.fault_injection.killed_training DIRECTORY [ROUNDS]   (``make killed-rounds``)

Everything that writes is on: all metrics of the preset ``full`` at every step, an evaluation pass, ``log()``, the rules and the
flight recorder.  What TensorBoard's own reader and plain `json` find is compared with the files of the same training without faults:
a value can be lost (it was acknowledged and is missing), wrong (it is not the one of the other training), or there twice.
Each round is noted in ``DIRECTORY/rounds.jsonl``; the totals are printed as they come, and a second call goes on where the first one ended.
The directories of rounds in which something was wrong are kept.
"""

import ctypes
import errno
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

import torch

import ikkuna
from ikkuna.backends.backend import FileBackend
from ikkuna.diagnosis import RecorderOptions
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber
from ikkuna.store.writer import FileWriter
from tests.fault_injection import Fault, build_shim
from tests.fault_injection.killed_rounds import FAULTS, acknowledged

STEPS = 240
"""Steps of a training; a process that gets there waits to be killed."""
PARTS = ("kind", "title", "module", "pass", "event")
"""Fields of a line that name what it is about; those of a finding have a rule."""
TIMES = ("step_seconds", "samples_per_second", "monitor_share", "peak_memory")
"""Kinds that two trainings do not have in common."""


def failing(number, **probabilities):
    return [Fault(operation, number, probability=chance) for operation, chance in probabilities.items()]


MIXES = {
    "all kinds": FAULTS,
    "interrupted": [
        *failing(errno.EINTR, write=0.3, fsync=0.3, open=0.2, ftruncate=0.3),
        Fault("write", "short", probability=0.1),
    ],
    "stale": failing(errno.ESTALE, fstat=0.05, write=0.05, fsync=0.1, open=0.1, rename=0.2),
    "rename": [
        *failing(errno.EIO, rename=0.4, unlink=0.5, fsync=0.2),
        Fault("fsync", "lose", probability=0.15),
        Fault("write", "torn", probability=0.02),
    ],
    "read-only": [
        *failing(errno.EROFS, write=0.2, open=0.3, mkdir=0.3, ftruncate=0.5, rename=0.3),
        Fault("fsync", errno.EIO, probability=0.2),
    ],
    "full": [
        *failing(errno.ENOSPC, write=0.2, open=0.1, mkdir=0.1),
        Fault("write", "torn", probability=0.1),
        Fault("ftruncate", errno.EIO, probability=0.3),
    ],
    "no faults": [],
}


def import_everything():
    """Import what a training needs, so that the processes that are forked later begin at once."""
    ikkuna.watch(torch.nn.Linear(2, 2), preset="full", rules="all", recorder=RecorderOptions(), verbosity=0).close()


def train(directory, report):
    """Train for `STEPS` steps, and call ``report(monitor)`` after each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.05), torch.nn.CrossEntropyLoss()
    for writer in (FileWriter, FileBackend):
        writer.__init__.__kwdefaults__.update(retry_seconds=0.01, sync_seconds=0.02)
    options = RecorderOptions(state_every=5, burst=2, cool_down=1, max_dumps=10**6, severity="info")
    tested = [NormSubscriber("activations", tag="testing"), LossSubscriber(tag="testing")]
    with ikkuna.watch(
        model, *tested, loss=loss, preset="full", every=1, log_dir=directory, verbosity=0, rules="all",
        backend=["jsonl", "tb"], recorder=options,
    ) as monitor:  # fmt: skip
        for step in range(STEPS):
            inputs, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
            if step % 60 == 29:
                inputs[0, 0] = 300.0
            monitor.log("before", step + 0.125)
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            monitor.log("inside", step + 0.25)
            optimizer.step()
            monitor.log("after", step + 0.5)
            if step % 7 == 3:
                monitor.evaluate([(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))])
                monitor.log("evaluated", step + 0.75)
            if step % 10 == 4:
                monitor.dump("by hand", timeout=0.0)
            report(monitor)


def is_timed(name):
    return any(kind in name for kind in TIMES)


def lines_of(run, names="values.*.jsonl"):
    """Return how often files of JSON lines contain each (series, step, value), by the documented format and plain `json`."""
    contents = {path.name: path.read_bytes() for path in sorted(run.glob(names))}
    for content in list(contents.values()):
        first = content.split(b"\n", 1)[0]
        if b'"replaces"' in first and content.startswith(b"{") and first.endswith(b"}"):
            entry = json.loads(first)
            if entry["replaces"] in contents:
                contents[entry["replaces"]] = contents[entry["replaces"]][: entry["size"]]
    found = Counter()
    for content in contents.values():
        for line in content.split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the line that was being written
            if "replaces" not in entry and "lost" not in entry:
                step = entry.pop("step")
                entry.pop("time", None)
                rule = entry.get("rule") or entry.get("finding", {}).get("rule")
                name = "/".join(map(str, (*(entry.get(part) for part in PARTS), rule)))
                found[name, step, json.dumps(entry, sort_keys=True)] += 1
    return found


def events_of(run):
    """Return how often TensorBoard shows each (tag, step, value) of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "histograms": 0, "tensors": 0, "images": 0, "compressedHistograms": 1}
    accumulator = EventAccumulator(str(run), size_guidance=everything).Reload()
    tags, found = accumulator.Tags(), Counter()
    for tag in tags["scalars"]:
        found.update((tag, event.step, repr(event.value)) for event in accumulator.Scalars(tag))
    for tag in tags["histograms"]:
        found.update((tag, event.step, repr(event.histogram_value)) for event in accumulator.Histograms(tag))
    return found


def findings_of(run):
    """Return how often a run's files contain each event of a finding."""
    return lines_of(run, "findings.*.jsonl")


READERS = {"json": lines_of, "TensorBoard": events_of, "findings": findings_of}


def damaged_dumps(run):
    """Return the names of the visible dumps of a run that are not complete, and the number of dumps."""
    damaged, dumps = [], [path for path in run.glob("dumps/*") if not path.name.startswith(".")]
    for dump in dumps:
        try:
            files = json.loads((dump / "dump.json").read_text())["files"]
            contents = {name: (dump / name).read_bytes() for name in files}
            is_whole = all(zlib.crc32(contents[name]) == files[name]["crc32"] for name in files)
        except (OSError, ValueError, KeyError):
            is_whole = False
        damaged += [] if is_whole else [dump.name]
    return damaged, len(dumps)


def checked(log_dir, reference, acked):
    """Return totals of what the runs below a directory contain, and examples of what is wrong."""
    totals, examples = Counter(), []

    def note(what, reader, entries):
        totals[what] += len(entries)
        examples.extend(f"{what}, {reader}: {entry}"[:300] for entry in sorted(map(str, entries))[:2])

    runs = sorted(log_dir.glob("run*"))
    for reader, read in READERS.items():
        found = sum((read(run) for run in runs), Counter())
        places = Counter()
        for (name, step, _), count in found.items():
            places[name, step] += count
        right = reference[reader]
        totals[f"values {reader}"] += found.total()
        note("twice", reader, [place for place, count in places.items() if count > 1])
        note("wrong", reader, [entry for entry in found if not is_timed(entry[0]) and entry not in right])
        acknowledged_places = {(name, step) for name, step, _ in right if step <= acked and not is_timed(name)}
        note("lost", reader, acknowledged_places - places.keys())
    for run in runs:
        damaged, count = damaged_dumps(run)
        totals["dumps"] += count
        note("damaged dumps", "files", damaged)
    return totals, examples


def run_child(directory, mix, seed, reports):
    os.environ |= {
        "FILE_FAULTS_BELOW": str(directory),
        "FILE_FAULTS": " ".join(map(str, MIXES[mix])),
        "FILE_FAULTS_SEED": str(seed),
        "FILE_FAULTS_JOURNAL": f"{directory}.journal",
    }
    ctypes.CDLL(None).file_faults_restart()

    def report(monitor):
        health = monitor.health()
        os.write(reports, b"%.9f %d\n" % (time.monotonic(), health.acked_step))
        if health.errors:
            raise AssertionError(f"{health.errors} errors")

    train(directory / "log", report)
    while True:
        signal.pause()


def round_of(root, seed, reference):
    """Kill one training; return its totals and examples of what was wrong."""
    mix = list(MIXES)[seed % len(MIXES)]
    directory = root / f"round{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    others = [Path(f"{directory}.{suffix}") for suffix in ("reports", "journal", "crash")]
    for path in others:
        path.unlink(missing_ok=True)
    reports = os.open(others[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    child = os.fork()
    if not child:
        try:
            run_child(directory, mix, seed, reports)
        except BaseException as error:
            others[2].write_text(repr(error))
        finally:
            os._exit(1)
    os.close(reports)
    while others[0].stat().st_size == 0 and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.0, 1.0))
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    acked = acknowledged(directory)
    totals, examples = checked(directory / "log", reference, acked)
    totals += Counter({"rounds": 1, "acknowledged steps": acked + 1, "steps": len(others[0].read_text().splitlines())})
    totals["faults"] = len(others[1].read_text().splitlines()) if others[1].exists() else 0
    if status != -signal.SIGKILL:
        totals["crashed"] += 1
        examples.append(f"the process ended with {status}: {others[2].read_text() if others[2].exists() else ''}")
    if not examples:
        shutil.rmtree(directory)
        for path in others:
            path.unlink(missing_ok=True)
    return totals, [f"round {seed}, {mix}: {example}" for example in examples]


def reference_of(root):
    """Train without faults, in a process of its own, and return what each reader finds."""
    with tempfile.TemporaryDirectory(dir=root) as directory:
        child = os.fork()
        if not child:
            status = 1
            try:
                train(Path(directory), lambda monitor: None)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            raise RuntimeError("the training without faults failed")
        [run] = Path(directory).glob("run*")
        return {reader: read(run) for reader, read in READERS.items()}


def main():
    root, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    root.mkdir(parents=True, exist_ok=True)
    if "file_faults" not in os.environ.get("LD_PRELOAD", ""):
        library = build_shim(root.resolve()).path
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"LD_PRELOAD": str(library)})
    logging.disable()
    torch.set_num_threads(1)
    notes, total = root / "rounds.jsonl", Counter()
    done = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    for line in done:
        total.update(line["totals"])
    import_everything()
    reference = reference_of(root)
    for seed in range(len(done), count):
        totals, examples = round_of(root.resolve(), seed, reference)
        with notes.open("a") as file:
            file.write(json.dumps({"seed": seed, "totals": totals, "examples": examples}) + "\n")
        total.update(totals)
        if examples or seed % 10 == 9:
            sys.stdout.write("\n".join([*examples, json.dumps(total), ""]))
            sys.stdout.flush()
    sys.stdout.write(json.dumps(total) + "\n")
    sys.exit(any(total[what] for what in ("lost", "wrong", "twice", "damaged dumps", "crashed")))


if __name__ == "__main__":
    main()
