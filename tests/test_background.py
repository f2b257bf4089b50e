"""Threads that are started without waiting for them, and the rules that hold for each of them."""

import gc
import inspect
import itertools
import linecache
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.loggers import FunctionBackend
from ikkuna.backends.pictures.redraw import RedrawThread
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.flight_recorder.dump_writing import DumpWriter
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series
from ikkuna.store.writer import FileWriter
from ikkuna.support.device_thread import DeviceThread
from ikkuna.support.threads import BackgroundThread, Worker, computed_once

FIND = """
import threading
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.hook_functions import hook_functions

def find():
    start.wait(30)
    kernels = library()
    found.append((kernels, hook_functions(kernels, wait=True)))

start, found = threading.Barrier(2), []
threads = [threading.Thread(target=find) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found[0] == found[1], found
"""


def test_threads_that_need_a_result_at_the_same_time_share_it():
    def compute():
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # the other thread does not come, but waits for this result
        return object()

    found, both, made = [], threading.Barrier(2), computed_once(compute)
    threads = [threading.Thread(target=lambda: found.append(made())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is made()
    assert both.broken


def test_two_threads_load_one_copy_of_the_native_libraries():
    """Copies would call each other for ever, because each replaces how a hook is called by itself and what was there before."""
    subprocess.run([sys.executable, "-c", FIND], check=True, timeout=600)


def refuse(thread):
    raise RuntimeError("can't start new thread")


def die(thread):
    """The thread ends before it can report that it runs."""


FAULTS = {"refused": ("start", refuse), "dying": ("_bootstrap", die)}


@pytest.fixture(params=FAULTS)
def no_thread(request, monkeypatch):
    waiting = dict(threading._limbo)
    monkeypatch.setattr(threading.Thread, *FAULTS[request.param])
    yield
    threading._limbo.clear()  # threads that died while they started are listed there for ever
    threading._limbo.update(waiting)


def test_a_thread_begins_ends_and_is_a_daemon():
    begun, gate, kinds = threading.Event(), threading.Event(), []

    def work():
        kinds.append((threading.current_thread().daemon, threading.current_thread().name))
        begun.set()
        gate.wait()

    thread = BackgroundThread(work, "mine")
    assert not thread.has_begun()
    assert thread.start()
    assert begun.wait(30)
    assert thread.has_begun()
    assert thread.is_alive()
    assert not thread.join(0)
    gate.set()
    assert thread.join(30)
    assert not thread.is_alive()
    assert kinds == [(True, "mine")]


@pytest.mark.fault(309)
def test_starting_a_thread_that_dies_does_not_wait(no_thread):
    thread = BackgroundThread(lambda: None, "mine")
    assert thread.start()
    assert not thread.has_begun(0.05)
    assert not thread.is_alive()


def test_a_thread_that_the_system_refuses_is_no_error(monkeypatch):
    monkeypatch.setattr("_thread.start_new_thread", lambda *arguments: refuse(None))
    thread = BackgroundThread(lambda: None, "mine")
    assert not thread.start()
    assert not thread.has_begun(None)


@pytest.mark.fault(309, 326)
def test_training_goes_on_without_threads_and_loses_nothing(no_thread, tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter(message_bus=MessageBus(), log_dir=tmp_path)
    exporter.add_modules(model)
    exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=["jsonl", "tb", "mpl"]))
    for _ in range(5):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert exporter.health().acked_step == -1
    exporter.close()
    assert exporter.health().acked_step == 4
    assert exporter.health().dropped == 0
    assert [entry["step"] for entry in read(tmp_path / "run0001")] == list(range(5))


# -- one contract for everything that works in a thread ----------------------------------------------------------------


class Job:
    """A dump, a picture, and a function of a device."""

    path = None

    def __init__(self, do, number):
        self.run = self.draw = lambda: self.work(do, number)
        self.name, self.changed = str(number), True

    def work(self, do, number):
        do(number)
        self.changed = False

    def finish(self):
        pass


def file_writer(do, directory):
    writer = FileWriter(directory, JSONLinesBackend()._format(), retry_seconds=0.0)
    writer._file.append = lambda data: [do(int(line)) for line in data.splitlines()]
    return lambda number: writer.submit(b"%d\n" % number, number, 1), writer.close, writer._worker


def logger(do, directory):
    backend = FunctionBackend(lambda tag, value, step: do(step))

    def add(number):
        backend.add_scalar(Series("loss"), 1.0, number)
        backend.commit(number)

    return add, backend.close, backend._worker


def dumps(do, directory):
    writer = DumpWriter()
    return lambda number: writer.write(Job(do, number)), writer.close, writer._worker


def drawing(do, directory):
    pictures = []
    thread = RedrawThread(lambda: pictures, 0.01)

    def add(number):
        pictures.append(Job(do, number))
        thread.open()

    return add, lambda timeout: not thread.close(timeout), thread._worker


def device(do, directory):
    thread = DeviceThread([])
    return lambda number: thread.add(lambda: do(number)), thread._worker.close, thread._worker


USERS = {"file": file_writer, "logger": logger, "dumps": dumps, "drawing": drawing, "device": device}


@pytest.fixture(params=USERS)
def user(request, tmp_path):
    """Return what adds a job, what closes the user, and its worker; what a job does; and what was done, with its thread."""

    class User:
        done: list = []  # noqa: RUF012 - one class for each test
        fault = None
        gate, entered = threading.Event(), threading.Event()

        @classmethod
        def do(cls, number):
            cls.entered.set()
            cls.gate.wait(30)
            fault, cls.fault = cls.fault, None
            if fault is not None:
                raise fault
            cls.done.append((number, threading.current_thread()))

    User.gate.set()
    add, close, User.worker = USERS[request.param](User.do, tmp_path)
    User.add, User.close = staticmethod(add), staticmethod(close)
    return User


def test_jobs_are_done_once_in_order_in_a_daemon_thread(user):
    for number in range(4):
        user.add(number)
    assert user.close(30)
    assert [number for number, _ in user.done] == [0, 1, 2, 3]
    assert {thread.daemon and thread is not threading.current_thread() for _, thread in user.done} == {True}


@pytest.mark.fault(309, 326)
def test_without_a_thread_the_jobs_are_done_at_the_end_by_the_caller(user, no_thread):
    for number in range(3):
        user.add(number)
    assert user.done == []
    user.close(30)
    assert user.done == [(number, threading.current_thread()) for number in range(3)]


def test_a_job_that_fails_does_not_keep_others_from_being_done(user, caplog):
    user.fault = ValueError("of one job")
    for number in range(4):
        user.add(number)
    user.close(30)
    assert {1, 2, 3} <= {number for number, _ in user.done}
    assert not user.worker.is_busy


@pytest.mark.fault(70)
def test_nothing_waits_for_a_job_that_does_not_end(user):
    user.gate.clear()
    for number in range(4):
        user.add(number)  # returns
    assert not user.close(0.01)
    assert user.done == []
    user.gate.set()
    assert user.worker.wait_for(lambda: user.worker.is_finished, 30)


@pytest.mark.fault(91)
def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent(user):
    user.gate.clear()
    user.add(0)
    assert user.entered.wait(30)
    if not (child := os.fork()):
        user.gate.set()
        user.add(1)
        user.close(0.01)
        os._exit(len(user.done))  # at most the job that the child does itself
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) <= 1
    user.gate.set()
    user.close(30)
    assert [number for number, _ in user.done] == [0]


def test_an_interrupt_in_a_job_reaches_the_caller_and_leaves_a_worker_that_works(user, no_thread):
    user.fault = KeyboardInterrupt()
    user.add(0)
    user.add(1)
    with pytest.raises(KeyboardInterrupt):
        user.close(30)
    user.close(30)
    assert 1 in {number for number, _ in user.done}


def test_an_interrupt_at_any_line_leaves_a_worker_that_works(monkeypatch):
    """Between taking the lock, or the job, and the ``try`` too; the lines that release both are left out."""
    monkeypatch.setattr("_thread.start_new_thread", lambda *arguments: refuse(None))
    code, begin = inspect.getsourcelines(Worker._attempt)
    release = begin + next(number for number, line in enumerate(code) if line.strip() == "finally:")
    functions = {getattr(Worker, name).__code__ for name in ("_attempt", "_work_here", "wake", "wait_for", "close")}

    def interrupt(countdown):
        def trace(frame, event, argument):
            if frame.f_code not in functions:
                return None
            is_release = frame.f_code is Worker._attempt.__code__ and frame.f_lineno >= release
            if (
                worker.lock._is_owned()
                and linecache.getline(inspect.getfile(Worker), frame.f_lineno).strip() == "with self.lock:"
            ):
                is_release = True  # a tracer sees the end of the block as another visit of its line; an interrupt cannot come there
            if event == "line" and not is_release and next(countdown) == 0:
                raise KeyboardInterrupt
            return trace

        return trace

    gc.collect()  # the worker of another test that ends in an interrupted line would swallow the interrupt
    for line in itertools.count():
        queue, done = [1, 2], []
        worker = Worker(
            "example", lambda queue=queue, done=done: (lambda: done.append(queue.pop(0))) if queue else None
        )
        sys.settrace(interrupt(itertools.count(-line)))
        try:
            worker.close(30)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(None)
        assert not worker.lock._is_owned()
        assert worker.close(30), f"after an interrupt at line {line}"
        assert done == [1, 2]
    assert line > 20
