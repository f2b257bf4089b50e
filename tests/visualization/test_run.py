import errno
import math
import os
import shutil
import tempfile
import threading
import time
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ikkuna import errors
from ikkuna.backends import backend as backend_module
from ikkuna.backends import run as run_module
from ikkuna.backends.backend import Backend, NullBackend
from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.mpl import MPLBackend
from ikkuna.backends.run import Run
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.numerics.statistics import Histogram
from ikkuna.reading import StoredRun
from ikkuna.store.event_records import event_library
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series
from ikkuna.store.run_directory import RunSettings, check_log_dir, make_run_directory, read_run_file
from ikkuna.store.values import Matrix, ModuleEntry
from ikkuna.support import plugins
from ikkuna.testing import RecordingBackend

LOSS = Series("loss")


class Faulty(RecordingBackend):
    """Raises in the given methods."""

    def __init__(self, *verbs):
        super().__init__()
        self.calls = []
        for verb in verbs:
            setattr(self, verb, lambda *_, verb=verb: self.calls.append(verb) or 1 / 0)


class Opened(RecordingBackend):
    """Needs a directory."""

    def open(self, directory):
        self.directory = directory


class Stored(RecordingBackend):
    """Returns the given ``acked_step``."""

    def __init__(self, acked=-1):
        super().__init__()
        self.acked = acked

    @property
    def acked_step(self):
        return self.acked


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Replace the installed backends."""
    made = []
    known = {"jsonl": JSONLinesBackend, "tb": TensorBoardBackend, "null": NullBackend}

    def get(backend):
        if isinstance(backend, str):
            if backend not in known:
                raise errors.ConfigError(f"unknown backend {backend!r}")
            backend = known[backend]()
            made.append(backend)
        return backend

    monkeypatch.setattr(run_module, "get_backend", get)
    return made


def test_nothing_is_made_before_the_first_value(tmp_path):
    run = Run(tmp_path / "log")
    run.commit(0)
    run.flush()
    assert run.close()
    assert not (tmp_path / "log").exists()


def test_values_are_readable_when_close_returns(tmp_path):
    run = Run(tmp_path)
    for step in range(5):
        run.show(LOSS, step / 2, step, ("jsonl", "tb"))
        run.commit(step)
    assert run.flush(30)
    assert run.acked_step == 4
    assert run.close(30)
    assert run.directory == tmp_path / "run0001"
    assert [entry["value"] for entry in read(run.directory)] == [0, 0.5, 1, 1.5, 2]
    assert len(list(run.directory.glob("events.out.tfevents.*"))) == 1
    assert run.dropped == 0


def test_a_backend_is_made_once_per_name(tmp_path, named):
    run = Run(tmp_path)
    for kind in "abc":
        run.show(Series(kind), 1.0, 0, ("jsonl",))
    run.close(30)
    assert len(named) == 1
    assert len(read(run.directory)) == 3


def test_a_backend_object_is_opened_in_the_directory_of_the_run(tmp_path):
    run, mine = Run(tmp_path), JSONLinesBackend()
    run.show(LOSS, 1.0, 0, (mine, "jsonl"))
    run.close(30)
    assert mine.path.parent == run.directory
    assert len(read(run.directory)) == 2


def test_a_backend_that_stores_nothing_needs_no_directory(tmp_path):
    run = Run(tmp_path / "log")
    run.show(LOSS, 1.0, 0, ("null",))
    assert run.close()
    assert run.directory is None
    assert not (tmp_path / "log").exists()


@pytest.mark.fault(71)
def test_a_run_whose_directory_is_deleted_keeps_its_identity(tmp_path):
    run = Run(tmp_path, settings=RunSettings(config={"lr": 0.1}))
    for step in range(2):
        run.show(LOSS, 1.0, step, ("jsonl",))
        run.commit(step)
        assert run.flush(30)
        if step == 0:
            shutil.rmtree(run.directory)
    run.close()
    stored = read_run_file(run.directory)
    assert (stored.id, stored.config) == (run.identity, {"lr": 0.1})


def test_values_are_told_apart(tmp_path):
    run, backend = Run(tmp_path), RecordingBackend()
    histogram = SimpleNamespace(min=0, max=1, num=1, sum=1, sum_squares=1, bucket_limits=[1], bucket_counts=[1])
    run.show(LOSS, 1, 0, [backend])
    run.show(Series("weights", "fc"), histogram, 0, [backend])
    run.show(Series("notes", "fc"), "text", 0, [backend])
    run.show(Series("notes", title="Model"), "text", 0, [backend])
    assert [value for _, value, _ in backend.values] == [1.0, histogram]
    assert backend.texts == [("notes/fc", "text", 0), ("Model", "text", 0)]


def test_a_histogram_of_a_tensor_is_shown_in_buckets(tmp_path):
    run, backend = Run(tmp_path), RecordingBackend()
    run.show(Series("weights", "fc"), Histogram.of(torch.arange(9.0)), 0, [backend])
    [(_, value, _)] = backend.values
    assert (value.num, value.min, value.max, sum(value.bucket_counts)) == (9, 0, 8, 9)


@pytest.mark.parametrize("value", [None, [1.0], object(), 10**400])
def test_a_value_of_no_kind_is_the_callers_mistake(tmp_path, value):
    with pytest.raises(errors.ConfigTypeError, match="'loss' shows a number, a histogram, a matrix or a text, got"):
        Run(tmp_path).show(LOSS, value, 0, [RecordingBackend()])


def histogram(**fields):
    numbers = dict.fromkeys(("min", "max", "num", "sum", "sum_squares"), 1.0)
    return SimpleNamespace(**numbers | {"bucket_limits": [1.0, 2.0], "bucket_counts": [3, 4]} | fields)


def matrix(values=((1.0, 2.0),), rows=("a",), columns=("x", "y"), limits=None):
    return Matrix(rows, columns, values, limits)


MALFORMED = {
    "shape": matrix([[1.0]]),
    "one axis": matrix([1.0, 2.0]),
    "ragged": matrix([[1.0], [1.0, 2.0]]),
    "strings": matrix([["a", "b"]]),
    "complex numbers": matrix(np.ones((1, 2), complex)),
    "objects": matrix([[None, None]]),
    "no host data": matrix(torch.ones(1, 2, device="meta")),
    "gradients": matrix(torch.ones(1, 2, requires_grad=True)),
    "name": matrix(rows=(1,)),
    "names": matrix(columns=2),
    "limits": matrix(limits=(0.0,)),
    "infinite limits": matrix(limits=(0.0, math.inf)),
    "limits in disorder": matrix(limits=(1.0, 0.0)),
    "counts of another length": histogram(bucket_counts=[1.0]),
    "counts that are strings": histogram(bucket_counts=["a", "b"]),
    "limits that are a number": histogram(bucket_limits=3.0),
    "sum that is a list": histogram(sum=[1.0]),
    "minimum that is missing": histogram(min=None),
}


@pytest.mark.fault(313)
@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_a_value_that_no_backend_can_store_is_the_callers_mistake(tmp_path, value):
    run, backend = Run(tmp_path), RecordingBackend()
    with pytest.raises(errors.ConfigError, match="'loss' shows"):
        run.show(LOSS, value, 0, [backend])
    assert run.dropped == 0


@pytest.mark.parametrize("value", [matrix(), matrix(np.ones((1, 2), bool)), matrix(np.ones((0, 2)), ()), histogram()])
def test_every_backend_stores_what_is_accepted(tmp_path, value):
    run, mine = Run(tmp_path), (*backends(), MPLBackend())
    run.show(LOSS, value, 0, mine)
    run.commit(0)
    assert run.close(60)


def test_a_matrix_is_shown_as_it_was(tmp_path):
    run, backend, values = Run(tmp_path), RecordingBackend(), np.zeros((1, 2))
    run.show(LOSS, matrix(values), 0, [backend])
    values[:] = 1
    [(_, shown, _)] = backend.values
    assert shown.values.tolist() == [[0.0, 0.0]]


@pytest.mark.fault(313)
def test_failures_of_a_backend_are_counted_for_each_sender(tmp_path, caplog):
    run, backend = Run(tmp_path), RecordingBackend()
    add = backend.add_scalar
    backend.add_scalar = lambda series, value, step: 1 / 0 if series == LOSS else add(series, value, step)
    bad, good = Mock(label="Bad(loss)"), Mock(label="Good(weights)")
    for step in range(20):
        run.show(LOSS, 1.0, step, [backend], bad)
        run.show(LOSS, 1.0, step, [backend], bad)
        run.show(Series("weights"), 1.0, step, [backend], good)
        run.commit(step)
    assert len(backend.values) == 20
    assert run.dropped == 40
    first, last = (record.message for record in caplog.records)
    assert first == "backend RecordingBackend failed in add_scalar() with a value of Bad(loss)"
    assert last.endswith("failed in add_scalar() 10 times in a row with values of Bad(loss), and gets no more of them")


def test_a_backend_that_fails_is_disabled_and_others_go_on(tmp_path, caplog):
    run, bad, good = Run(tmp_path), Faulty("add_scalar"), RecordingBackend()
    for step in range(20):
        run.show(LOSS, 1.0, step, (bad, good))
        run.commit(step)
    assert len(bad.calls) == 10
    assert len(good.values) == 20
    assert run.dropped == 20
    assert not run.close()
    assert bad.closed
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "Faulty failed in add_scalar() 10 times in a row and is disabled" in caplog.text


def test_a_failing_commit_is_counted_though_adding_works(tmp_path):
    run, bad = Run(tmp_path), Faulty("commit")
    for step in range(20):
        run.show(LOSS, 1.0, step, (bad,))
        run.show(LOSS, 1.0, step, (bad,))
        run.commit(step)
    assert len(bad.calls) == 10
    assert run.dropped == 40


def test_failures_that_are_not_in_a_row_disable_nothing(tmp_path):
    run, backend = Run(tmp_path), RecordingBackend()
    add = backend.add_scalar
    backend.add_scalar = lambda series, value, step: 1 / 0 if step % 10 else add(series, value, step)
    for step in range(100):
        run.show(LOSS, 1.0, step, (backend,))
    assert len(backend.values) == 10
    assert run.dropped == 90


def test_a_backend_that_cannot_be_opened_is_said_once(tmp_path, caplog):
    (tmp_path / "log").write_text("")
    run = Run(tmp_path / "log")
    backend = Opened()
    for step in range(20):
        run.show(LOSS, 1.0, step, [backend])
        run.commit(step)
    assert run.dropped == 20
    assert run.acked_step == -1
    assert run.directory is None
    assert not run.close()
    [record] = caplog.records
    assert "Opened cannot be opened" in record.message
    assert "it exists and is not a directory" in record.message


@pytest.mark.fault(305)
def test_values_of_a_file_that_cannot_be_created_wait_and_are_counted(tmp_path, caplog):
    (tmp_path / "log").write_text("")
    run = Run(tmp_path / "log")
    for step in range(20):
        run.show(LOSS, 1.0, step, ("jsonl",))
        run.commit(step)
    assert not run.flush(30)
    assert run.acked_step == -1
    assert not run.close()
    assert run.dropped == 20
    first, second = (record.message for record in caplog.records)
    assert first.startswith("'values.*.jsonl' cannot be written: cannot create a run directory in")
    assert "it exists and is not a directory; values wait in memory" in first
    assert second == "'values.*.jsonl': closed before 20 values could be written; they are lost"


def backends(**options):
    return JSONLinesBackend(**options), TensorBoardBackend(**options)


def test_the_library_is_there_before_the_first_value():
    """Compiling it takes seconds, and loading it reads the disk."""
    event_library.cache_clear()
    TensorBoardBackend()
    assert event_library.cache_info().currsize == 1


def test_the_first_value_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    gate, threads = threading.Event(), set()

    def slow(function):
        def call(*arguments, **options):
            threads.add(threading.current_thread())
            assert gate.wait(60)
            return function(*arguments, **options)

        return call

    for name in ("mkdir", "open", "fsync"):
        monkeypatch.setattr(os, name, slow(getattr(os, name)))
    run, mine = Run(tmp_path), (*backends(), MPLBackend(interval=0.01))
    for step in range(50):
        run.show(LOSS, 1.0, step, mine)
        run.commit(step)
    assert run.acked_step == -1
    assert threading.current_thread() not in threads
    gate.set()
    assert run.close(60)
    assert len(read(run.directory)) == 50
    assert (run.directory / "pictures" / "loss.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run0001"]


@pytest.mark.fault(75, 305)
@pytest.mark.parametrize("function", ["open", "mkdir"])
@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_a_short_fault_at_the_first_value_costs_nothing(tmp_path, monkeypatch, function, error):
    failures, original = [], getattr(os, function)

    def faulty(path, *arguments, **options):
        if len(failures) < 6:
            failures.append(path)
            raise OSError(error, os.strerror(error))
        return original(path, *arguments, **options)

    monkeypatch.setattr(os, function, faulty)
    run, mine = Run(tmp_path / "log"), backends(retry_seconds=0.01)
    for step in range(200):
        run.show(LOSS, 1.0, step, mine)
        run.commit(step)
    deadline = time.monotonic() + 60
    while run.acked_step < 198 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run.close(60)
    assert len(failures) == 6
    assert [entry["step"] for entry in read(run.directory)] == list(range(200))


def test_a_file_that_cannot_be_created_is_created_elsewhere_if_asked(tmp_path, monkeypatch, caplog):
    (tmp_path / "log").write_text("")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    run, mine = Run(tmp_path / "log"), JSONLinesBackend(fallback=True)
    run.show(LOSS, 1.0, 0, [mine])
    run.commit(0)
    assert run.close(60)
    assert mine.path.is_relative_to(tmp_path / "elsewhere")
    assert len(read(mine.path)) == 1
    assert caplog.records[1].message == f"'values.*.jsonl' is abandoned; continuing in '{mine.path}'"


def test_an_open_of_a_subclass_is_called(tmp_path):
    opened = []

    class Mine(JSONLinesBackend):
        def open(self, directory):
            opened.append(directory)
            super().open(directory)

    run = Run(tmp_path)
    run.show(LOSS, 1.0, 0, [Mine()])
    run.commit(0)
    assert opened == [tmp_path / "run0001"]
    assert run.close(60)
    assert len(read(run.directory)) == 1


def test_an_unknown_name_does_not_raise_while_running(tmp_path, caplog):
    run = Run(tmp_path)
    for step in range(3):
        run.show(LOSS, 1.0, step, ("nonsense",))
    assert run.dropped == 3
    assert len(caplog.records) == 1


@pytest.mark.parametrize("verb", ["flush", "close"])
def test_a_backend_that_fails_at_the_end_is_an_answer(tmp_path, verb):
    run = Run(tmp_path)
    run.show(LOSS, 1.0, 0, (Faulty(verb),))
    run.commit(0)
    assert not getattr(run, verb)()


@pytest.mark.fault(84)
def test_flush_stores_what_was_committed(tmp_path):
    run = Run(tmp_path)
    for step in range(3):
        run.show(LOSS, 1.0, step, ("jsonl",))
        if step < 2:
            run.commit(step)
    assert run.flush(30)
    assert [entry["step"] for entry in read(run.directory)] == [0, 1]
    assert run.close(30)


@pytest.mark.fault(70)
def test_closing_waits_two_seconds_by_default(tmp_path):
    class Quick(RecordingBackend):
        def close(self, timeout=None):
            self.given = timeout
            return True

    run, quick = Run(tmp_path), Quick()
    run.show(LOSS, 1.0, 0, [quick])
    assert run.close()
    assert 0 < quick.given <= 2.0


def test_what_was_not_committed_is_committed_by_close(tmp_path):
    run = Run(tmp_path)
    run.show(LOSS, 1.0, 7, ("jsonl",))
    assert run.close(30)
    assert [entry["step"] for entry in read(run.directory)] == [7]


@pytest.mark.fault(73)
def test_a_closed_run_takes_nothing_and_says_so(tmp_path):
    run, backend = Run(tmp_path), RecordingBackend()
    run.close()
    run.show(LOSS, 1.0, 0, (backend,))
    assert backend.values == []
    assert run.dropped == 1
    with pytest.raises(errors.ClosedError):
        run.prepare(["null"])


def test_the_acknowledged_step_is_that_of_the_slowest(tmp_path):
    run, slow, fast = Run(tmp_path), Stored(), Stored()
    for step in range(100, 103):
        run.show(LOSS, 1.0, step, (slow, fast, "null"))
        run.commit(step)
    assert run.acked_step == -1
    slow.acked, fast.acked = 101, 102
    assert run.acked_step == 101


def test_a_step_is_acknowledged_when_no_further_value_of_it_can_come(tmp_path):
    run, backend, answers = Run(tmp_path), Stored(9), []
    for step in range(3):
        run.show(LOSS, 1.0, step, (backend,))
        answers.append(run.acked_step)
        run.commit(step)
        answers.append(run.acked_step)
    assert answers == [-1, -1, -1, 0, 0, 1]
    backend.acked = 2
    run.flush()
    assert run.acked_step == 2
    run.show(LOSS, 1.0, 2, (backend,))
    assert run.acked_step == 1


def test_the_acknowledged_step_does_not_go_back_when_a_backend_comes_late(tmp_path):
    run, early, late = Run(tmp_path), Stored(), Stored()
    run.show(LOSS, 1.0, 9, (early,))
    run.commit(9)
    run.flush()
    early.acked = 9
    run.show(LOSS, 1.0, 10, (late,))
    assert run.acked_step == 9


def test_a_silent_disk_does_not_take_the_time_of_other_backends(tmp_path, gate):
    class Quick(RecordingBackend):
        def close(self, timeout=2.0):
            self.given = timeout
            return True

    run, quick = Run(tmp_path), Quick()
    for step in range(3):
        run.show(LOSS, 1.0, step, ("jsonl", quick))
        run.commit(step)
    assert not run.close(1.0)
    assert quick.given >= 0.2  # of a half, because a busy machine takes some of it


def test_preparing_makes_no_file_and_refuses_what_cannot_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigError, match="unknown backend 'nonsense'"):
        Run(tmp_path).prepare(["jsonl", "nonsense"])
    with pytest.raises(errors.LogDirError, match="Not a directory"):
        Run(tmp_path / "file" / "log").prepare(["jsonl"])
    Run(tmp_path / "file" / "log").prepare(["null"])
    Run(tmp_path / "log").prepare(["jsonl", NullBackend()])
    assert os.listdir(tmp_path) == ["file"]


def test_a_prepared_backend_is_the_one_that_is_used(tmp_path, named):
    run = Run(tmp_path)
    run.prepare(["jsonl"])
    run.prepare(["jsonl"])
    run.show(LOSS, 1.0, 0, ("jsonl",))
    run.close(30)
    assert named[0].path.exists()


@pytest.mark.parametrize("log_dir", ["", 5, None, "a\0b", b"bytes"])
def test_what_is_no_path_is_refused(log_dir):
    with pytest.raises(errors.ConfigError, match="log_dir is a path, got"):
        Run(log_dir)


@pytest.mark.fault(67)
def test_a_log_directory_is_checked_by_writing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.LogDirError, match="Not a directory"):
        check_log_dir(tmp_path / "file")
    with pytest.raises(errors.LogDirError, match="File name too long"):
        check_log_dir(tmp_path / ("x" * 300) / "y")
    assert check_log_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.fault(323)
@pytest.mark.parametrize("below", [False, True])
def test_a_symbolic_link_to_nothing_is_refused_as_a_log_directory(tmp_path, below):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(errors.LogDirError, match="link' is a symbolic link to something that does not exist"):
        check_log_dir(link / "log" if below else link)


@pytest.mark.fault(323)
def test_a_relative_log_directory_stays_when_the_process_changes_its_directory(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    run = Run("log")
    monkeypatch.chdir("other")
    run.show(LOSS, 1.0, 0, ("jsonl",))
    run.commit(0)
    assert run.close(60)
    assert run.directory == tmp_path / "log" / "run0001"
    assert len(read(run.directory)) == 1


def test_a_log_directory_may_be_nested_deeper_than_calls(tmp_path, monkeypatch):
    deep = tmp_path.joinpath(*["d"] * 1900)
    assert len(str(deep)) < 4000
    check_log_dir(deep)
    assert make_run_directory(deep) == deep / "run0001"
    monkeypatch.chdir(tmp_path)
    for _ in range(1900):  # no function of the standard library removes it in one call
        os.chdir("d")
    os.rmdir("run0001")
    for _ in range(1900):
        os.chdir("..")
        os.rmdir("d")


@pytest.mark.fault(74)
def test_a_run_never_gets_the_directory_of_another(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(make_run_directory(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in found) == [f"run{number:04d}" for number in range(1, 9)]


@pytest.mark.fault(74)
def test_a_directory_that_appears_meanwhile_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "run0001").mkdir()
    monkeypatch.setattr(os, "listdir", lambda path: [])
    assert make_run_directory(tmp_path).name == "run0002"


def test_a_run_comes_after_those_that_are_there(tmp_path):
    for name in ("run0007", "runs", "run12", "run0003.old"):
        (tmp_path / name).mkdir()
    assert make_run_directory(tmp_path).name == "run0008"


def test_the_built_in_backends_are_announced_and_loadable(monkeypatch):
    """Every backend in the project's metadata can be imported."""
    import tomllib
    from importlib.metadata import EntryPoint
    from pathlib import Path

    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    group = metadata["project"]["entry-points"][backend_module.GROUP]
    points = {name: (EntryPoint(name, value, backend_module.GROUP),) for name, value in group.items()}
    monkeypatch.setattr(plugins, "plugins", lambda group: points)
    assert {"tb", "jsonl", "null"} <= set(points)
    for name in points:
        library = {"wandb": "wandb", "mlflow": "mlflow"}.get(name)
        if library is None or find_spec(library):
            assert isinstance(backend_module.get_backend(name), Backend)
            continue
        with pytest.raises(errors.PluginError, match=rf'pip install "ikkuna\[{name}\]"'):
            backend_module.get_backend(name)


def test_a_backend_that_has_all_of_its_values_does_not_hold_back_what_is_acknowledged(tmp_path):
    often, rarely = Stored(7), Stored(4)
    run = Run(tmp_path)
    for step in range(8):
        run.show(LOSS, 1.0, step, [often, *([rarely] if step in (0, 4) else [])])
        run.commit(step)
    assert run.acked_step == 6  # of step 7 further values can come
    run.show(LOSS, 1.0, 8, [rarely])
    run.commit(8)
    assert run.acked_step == 4  # until it has step 8 too


@pytest.mark.fault(328)
@pytest.mark.parametrize("odd", ["7", math.nan, 3.0, object(), -(10**30), np.int64(5)])
def test_an_odd_answer_of_a_backend_harms_nothing(tmp_path, odd):
    backend, good = Stored(odd), Stored(9)
    run = Run(tmp_path)
    for step in (0, 9):
        run.show(LOSS, 1.0, step, [backend, good])
        run.commit(step)
    run.flush()
    assert run.acked_step == {np.int64: 5, int: -1}.get(type(odd), 9)
    assert isinstance(run.acked_step, int)
    run.close()


@pytest.mark.parametrize(("reported", "counted"), [(-5, 0), (None, 0), ("many", 0), (math.nan, 0), (7, 7)])
def test_a_backend_cannot_take_back_values_that_were_lost(reported, counted):
    class Lying(RecordingBackend):
        dropped = reported

    backend, run = Lying(), Run()
    run.show(Series("loss"), 0.5, 0, [backend])
    assert run.dropped == counted


def test_a_module_whose_tag_was_cut_has_its_whole_name(tmp_path):
    name = "block." * 50 + "0"
    run = Run(tmp_path)
    for kind, backends in (("norm", ["tb", "jsonl"]), ("mean", ["tb"])):
        run.show(Series(kind, name), 0.5, 3, backends)
    run.close()
    found = StoredRun(run.directory)
    assert found.names("norm") == found.names("mean") == (name,)
    assert found.series("norm", name).steps.tolist() == [3]


def test_a_run_of_json_lines_has_its_modules(tmp_path):
    """They are in the order of the network, and groups of parameters are none of them."""
    entries = ModuleEntry("b", "Linear", (("weight", (2, 3)),)), ModuleEntry("a", "ReLU")
    run = Run(tmp_path, entries)
    for kind, name in (("norm", "a"), ("norm", "b"), ("learning_rate", "group 0")):
        run.show(Series(kind, name), 0.5, 3, ["jsonl"])
    run.close()
    found = StoredRun(run.directory)
    assert found.modules == entries
    assert (found.module_kinds(), found.names("norm")) == (["norm"], ("b", "a"))
    assert [series.label for series in found.network_series()] == ["learning_rate/group 0"]
