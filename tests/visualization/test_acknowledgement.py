"""Whatever fails and whenever a process dies: a reader finds every acknowledged value, and no value twice.

The threads of the writers cannot start, so that the machine decides when a file is written.
"""

import _thread
import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series, series_tag

CALLS = {
    "write": errno.ENOSPC,
    "fsync": errno.EIO,
    "ftruncate": errno.EIO,
    "rename": errno.EIO,
    "fstat": errno.ESTALE,
}


class Died(KeyboardInterrupt):
    """The process ends here."""


def refuse(*arguments):
    raise RuntimeError("can't start new thread")


def lines(directory):
    entries = [entry for entry in read(directory) if "value" in entry]
    return Counter(
        (series_tag(Series(entry["kind"], entry["module"], entry["pass"])), entry["step"], entry["value"])
        for entry in entries
    )


def events(directory):
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in reader.Tags()["scalars"] if not tag.startswith("Dashboard/")]
    scalars = Counter((tag, event.step, event.value) for tag in tags for event in reader.Scalars(tag))
    return scalars + Counter((tag, event.step, 0.0) for tag in reader.Tags()["images"] for event in reader.Images(tag))


READERS = {"jsonl": lines, "tb": events}


class Writing(RuleBasedStateMachine):
    """Steps, values that are logged later, evaluations and checkpoints on one side; on the other the disk and the writers."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(_thread, "start_new_thread", refuse)
        self.faults = {call: [] for call in CALLS}
        for call in CALLS:
            self.patch.setattr(os, call, self.faulty(call, getattr(os, call)))
        logging.disable()
        self.root = Path(tempfile.mkdtemp())
        self.begin()

    def begin(self):
        self.directory = Path(tempfile.mkdtemp(dir=self.root))
        options = {"retry_seconds": 0.0, "sync_seconds": 1e6, "capacity": 20_000}
        self.backends = [JSONLinesBackend(**options), TensorBoardBackend(**options)]
        self.run_ = Run(self.directory)
        self.values = {}
        self.step = self.count = 0
        self.acked = -1
        self.is_flushed = False

    @contextlib.contextmanager
    def process(self):
        """After its death check what it leaves, and go on with another process and another run."""
        try:
            yield
        except Died:
            self.faults = {call: [] for call in CALLS}
            self.what_is_acknowledged_can_be_read_once()
            self.begin()

    def faulty(self, call, function):
        def called(descriptor, *arguments):
            is_file = not isinstance(descriptor, int) or not Path(f"/proc/self/fd/{descriptor}").is_dir()
            if is_file and (waiting := self.faults[call]) and (fault := waiting.pop(0)):
                raise fault
            return function(descriptor, *arguments)

        return called

    def show(self, step, *series):
        for each in series:
            self.count += 1
            self.values[series_tag(each), step] = float(self.count)
            self.run_.show(each, float(self.count), step, self.backends)
        self.run_.commit(step)

    @rule(count=st.integers(1, 3))
    def train(self, count):
        self.is_flushed = False
        for _ in range(count):
            self.show(self.step, Series("loss"))
            self.step += 1

    @precondition(lambda self: self.step)
    @rule(pass_name=st.sampled_from(["training", "testing"]))
    def show_more_of_the_last_step(self, pass_name):
        """As log() after the step, and as an evaluation: the step is not acknowledged before, except by a flush."""
        assert self.is_flushed or self.run_.acked_step < self.step - 1
        self.acked = min(self.acked, self.step - 2)
        self.show(self.step - 1, Series("logged", f"value{self.count}", pass_name))

    @precondition(lambda self: self.step > 2)
    @rule(age=st.integers(1, 3))
    def draw_a_picture_of_an_earlier_step(self, age):
        self.count += 1
        self.backends[1]._write_image(f"Heatmaps/{self.count}", bytes(24), self.step - age)

    @precondition(lambda self: self.step > 2)
    @rule()
    def go_back(self):
        with self.process():
            self.is_flushed = False
            self.run_.rewind(self.step - 2)
            self.step -= 2
            self.acked = min(self.acked, self.step - 1)
            self.values = {key: value for key, value in self.values.items() if key[1] < self.step}
            self.show(self.step, Series("loss"))
            self.step += 1

    @rule(backends=st.sampled_from([(0,), (1,), (0, 1)]), jobs=st.integers(1, 4))
    def work(self, backends, jobs):
        writers = [self.backends[backend]._writer for backend in backends]
        with self.process():
            for writer in filter(None, writers):
                for _ in range(jobs):
                    writer._worker._attempt()

    @rule()
    def flush(self):
        with self.process():
            self.is_flushed = True
            self.run_.flush(0.2)

    @rule(call=st.sampled_from(list(CALLS)), later=st.integers(0, 2), times=st.integers(1, 2), dies=st.booleans())
    def fail_soon(self, call, later, times, dies):
        fault = Died() if dies else OSError(CALLS[call], os.strerror(CALLS[call]))
        self.faults[call] = [None] * later + [fault] * times

    @invariant()
    def what_is_acknowledged_can_be_read_once(self):
        """As after SIGKILL at this moment: nothing is buffered in the process."""
        acked, dropped = self.run_.acked_step, self.run_.dropped
        assert acked <= self.step
        acked = self.acked = max(self.acked, acked)  # no fault here takes back what the operating system has
        found = list(self.directory.glob("run*"))
        if not found:
            assert acked == -1 or not self.values
            return
        for name, reader in READERS.items():
            stored = reader(found[0])
            assert [value for value, count in stored.items() if count > 1] == [], name
            missing = [
                (tag, step)
                for (tag, step), value in self.values.items()
                if step <= acked and not stored[tag, step, value]
            ]
            assert len(missing) <= dropped, f"{name} lacks {missing}, {acked=}"

    def teardown(self):
        self.faults = {call: [] for call in CALLS}
        try:
            self.run_.close(5)
            self.what_is_acknowledged_can_be_read_once()
            assert self.run_.acked_step >= self.step - 1 or self.run_.dropped or not self.values
        finally:
            self.patch.undo()
            logging.disable(logging.NOTSET)
            shutil.rmtree(self.root)


TestWriting = Writing.TestCase
TestWriting.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Twenty steps are on the disk; a second block of the last one and an image of an earlier one are not synchronised."""
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    faults = {call: [] for call in CALLS}
    for call in CALLS:
        monkeypatch.setattr(os, call, Writing.faulty(SimpleNamespace(faults=faults), call, getattr(os, call)))
    backends = [JSONLinesBackend(retry_seconds=0.0), TensorBoardBackend(retry_seconds=0.0)]
    run = Run(tmp_path)
    for step in range(20):
        run.show(Series("loss"), step, step, backends)
        run.commit(step)
    assert run.flush()
    run.show(Series("logged", "value"), 0.5, 19, backends)
    run.commit(19)
    backends[1]._write_image("Heatmaps/loss", bytes(24), 7)
    for backend in backends:
        backend._writer._worker._attempt()
    return run, backends, faults


@pytest.mark.fault(301)
@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), Died()], ids=["an error", "death"])
def test_the_end_of_a_file_that_cannot_be_cut_is_read_once(written, fault):
    """Death comes after the new file has its name."""
    run, backends, faults = written
    for backend in backends:
        faults["fsync"], faults["ftruncate"] = [OSError(errno.EIO, "Input/output error")], [fault]
        with contextlib.suppress(Died):
            assert backend.flush(30)
        assert faults["ftruncate"] == []
    for reader, count in zip(READERS.values(), (21, 22), strict=True):
        assert set(reader(run.directory).values()) == {1}
        assert len(reader(run.directory)) == count
    assert run.dropped == 0


@pytest.mark.fault(71, 301)
def test_values_are_read_once_after_a_stale_handle_and_a_failed_fsync(written):
    def show(backend, step):
        backend.add_scalar(Series("loss"), step, step)
        backend.commit(step)

    run, backends, faults = written
    for backend in backends:
        show(backend, 20)
        faults["fstat"] = [OSError(errno.ESTALE, "Stale file handle")]
        for _ in range(3):  # finds the handle, writes the new file, writes an image that it does not contain
            backend._writer._worker._attempt()
        show(backend, 21)
        faults["fsync"] = [OSError(errno.EIO, "Input/output error")]
        assert backend.flush(30) or backend.flush(30)
        assert faults["fsync"] == []
    assert run.close(30)
    for reader, count in zip(READERS.values(), (23, 24), strict=True):
        assert set(reader(run.directory).values()) == {1}
        assert len(reader(run.directory)) == count
