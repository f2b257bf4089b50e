import errno
import logging
import os
import shutil
import stat
import tempfile
import threading
import time

import pytest

from ikkuna.errors import LogDirError
from ikkuna.store.writer import FileWriter


def lines(writer):
    return writer.path.read_bytes().splitlines()


def submit(writer, steps, size=0):
    for step in steps:
        writer.submit(b"step %d%s\n" % (step, b"." * size), step, 3)


def expected(*steps):
    return [b"header", *(b"step %d" % step for step in steps)]


@pytest.fixture
def failing(monkeypatch):
    """Raise an error in every `os.write` while `failing.is_set()`."""
    event, write = threading.Event(), os.write

    def faulty(descriptor, data):
        if event.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", faulty)
    return event


def test_a_step_is_never_split_and_what_waits_is_written_together(tmp_path, plain, gate, monkeypatch):
    written, begun, write = [], threading.Event(), os.write
    writer = FileWriter(tmp_path, plain)

    def observed(descriptor, data):
        written.append(data)
        begun.set()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", observed)
    submit(writer, [0])
    assert begun.wait(30)
    submit(writer, [1, 2])
    gate.set()
    assert writer.close()
    assert written == [b"header\nstep 0\n", b"step 1\nstep 2\n"]


@pytest.mark.fault(84)
def test_flush_says_when_everything_is_on_the_disk(tmp_path, plain, monkeypatch):
    synced, sync = [], os.fsync
    writer = FileWriter(tmp_path, plain)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(len(lines(writer))), sync(descriptor)))
    assert writer.flush(0)
    submit(writer, range(3))
    assert writer.flush(30)
    assert synced == [4]
    assert writer.acked_step == 2
    assert lines(writer) == expected(0, 1, 2)
    assert writer.close()


def test_blocks_in_quick_succession_wait_for_each_other_and_are_written_by_themselves(tmp_path, plain, monkeypatch):
    """However fast steps follow, the thread is woken at most 20 times a second."""
    writes, woken, write = [], [], os.write
    writer = FileWriter(tmp_path, plain)
    monkeypatch.setattr(
        os, "write", lambda descriptor, data: writes.append(time.monotonic()) or write(descriptor, data)
    )
    wake = writer._worker.wake
    monkeypatch.setattr(writer._worker, "wake", lambda: woken.append(time.monotonic()) or wake())
    submit(writer, [0])
    while writer.acked_step < 0:
        time.sleep(0.001)
    began, step = time.monotonic(), 1
    while time.monotonic() < began + 0.3:
        submit(writer, [step])
        step += 1
        time.sleep(0.0005)
    while writer.acked_step < step - 1:
        time.sleep(0.001)
    assert max(len(writes), len(woken)) <= 3 + (time.monotonic() - began) / 0.05
    assert lines(writer) == expected(*range(step))
    assert writer.close()


def test_the_acknowledged_step_advances_by_itself(tmp_path, plain):
    writer = FileWriter(tmp_path, plain)
    assert writer.acked_step == -1
    submit(writer, [0, 1])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer.acked_step == 1, 30)
    writer.submit(b"", 7, 0)
    assert writer.acked_step == 7
    assert writer.close()


@pytest.mark.fault(88)
def test_values_are_synced_in_the_background_after_a_while(tmp_path, plain):
    writer = FileWriter(tmp_path, plain, sync_seconds=0.0)
    submit(writer, [0])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._synced == 1, 30)
    assert writer.close()


def test_a_writer_that_has_nothing_to_write_starts_no_thread(tmp_path, plain):
    before = threading.active_count()
    writer = FileWriter(tmp_path, plain)
    assert threading.active_count() == before
    assert writer.close()
    assert writer.close()


@pytest.mark.fault(73)
def test_closing_ends_the_thread_and_releases_the_descriptor(tmp_path, plain):
    writer = FileWriter(tmp_path, plain)
    submit(writer, [0])
    assert writer.close(30)
    assert writer._worker._thread.join(30)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer._file._file._descriptor)
    submit(writer, [1])
    assert writer.dropped == 3


@pytest.mark.fault(68)
def test_a_full_disk_loses_nothing_if_it_recovers_in_time(tmp_path, plain, failing, caplog):
    writer = FileWriter(tmp_path, plain)
    failing.set()
    submit(writer, range(5))
    assert not writer.flush(30)
    assert writer.acked_step == -1
    failing.clear()
    assert writer.flush(30)
    assert lines(writer) == expected(0, 1, 2, 3, 4)
    assert writer.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "No space left on device" in caplog.text


def test_a_failed_write_is_tried_again_without_being_asked(tmp_path, plain, failing):
    writer = FileWriter(tmp_path, plain, retry_seconds=0.01)
    failing.set()
    submit(writer, [0])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._failures > 2, 30)
        failing.clear()
        assert writer._worker.changed.wait_for(lambda: writer.acked_step == 0, 30)
    assert writer.close()
    assert lines(writer) == expected(0)


def test_after_an_error_nothing_is_written_before_the_pause_is_over(tmp_path, plain, failing):
    writer = FileWriter(tmp_path, plain, retry_seconds=1000.0)
    failing.set()
    submit(writer, [0])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._failures, 30)
        submit(writer, [1])
        assert not writer._worker.changed.wait_for(lambda: writer._failures > 1, 0.2)
    failing.clear()
    assert writer.close(30)
    assert lines(writer) == expected(0, 1)


def test_the_thread_sleeps_in_the_pause_after_an_error_although_a_check_is_due(tmp_path, plain, failing):
    writer = FileWriter(tmp_path, plain, retry_seconds=60, check=lambda directory: None)
    failing.set()
    submit(writer, [0])
    assert not writer.flush(30)
    assert writer._job() is None
    assert writer._due() > time.monotonic() + 20
    failing.clear()
    assert writer.close()


def test_the_directory_is_checked_until_the_end(tmp_path, plain, monkeypatch):
    monkeypatch.setattr("ikkuna.store.writer._CHECK_SECONDS", 0.0)
    seen = []
    writer = FileWriter(tmp_path, plain, check=seen.append)
    submit(writer, [0])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: len(seen) > 2, 30)
    assert writer.close(30)
    assert set(seen) == {tmp_path}


def test_a_check_that_fails_is_not_repeated_and_an_exception_of_the_users_is_raised(tmp_path, plain, caplog):
    def fail(directory):
        raise ValueError("on purpose") from causes.pop()

    causes = [KeyboardInterrupt(), None]
    writer = FileWriter(tmp_path, plain, check=fail)
    writer._check_directory()
    writer._check_directory()
    assert [record.message.endswith("failed and is not repeated") for record in caplog.records] == [True]
    writer = FileWriter(tmp_path, plain, check=fail)
    with pytest.raises(KeyboardInterrupt):
        writer._check_directory()  # as in the user's thread, if no other could be started


def test_the_error_is_said_once_however_often_it_happens(tmp_path, plain, failing, caplog):
    writer = FileWriter(tmp_path, plain, retry_seconds=0.0)
    failing.set()
    submit(writer, [0])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._failures > 20, 30)
    assert not writer.close(0.1)
    assert [record.message.count("No space left") for record in caplog.records] == [1, 0]
    assert "closed before 3 values could be written" in caplog.text


@pytest.mark.fault(68)
def test_what_does_not_fit_is_counted_said_and_written_down(tmp_path, plain, failing, caplog):
    writer = FileWriter(tmp_path, plain, capacity=3000)
    failing.set()
    submit(writer, range(5), size=700)
    assert not writer.flush(30)
    assert writer.dropped == 6
    failing.clear()
    assert writer.flush(30)
    submit(writer, [5])
    assert not writer.close()
    assert [line.split(b".")[0] for line in lines(writer)] == [
        *expected(0, 1, 2),
        b"lost 6 3-4",
        b"step 5",
    ]
    said = [record.message.partition(": ")[2] for record in caplog.records if "values" in record.message]
    assert sum("lost from step 3 on" in line for line in said) == 1
    assert sum("6 values of steps 3 to 4 are lost" in line for line in said) == 1


@pytest.mark.fault(329)
def test_losses_are_told_in_the_file_even_if_nothing_follows_them(tmp_path, plain, failing, caplog):
    writer = FileWriter(tmp_path, plain, capacity=1000)
    failing.set()
    submit(writer, range(3), size=700)
    assert not writer.flush(30)
    failing.clear()
    assert not writer.close()
    assert lines(writer)[-1] == b"lost 6 1-2"
    assert caplog.records[-1].message.endswith("6 values of steps 1 to 2 are lost")


@pytest.mark.parametrize("fault", ["full", "short", "interrupted"])
def test_an_error_at_any_write_costs_nothing(tmp_path, plain, monkeypatch, fault):
    """After any failure of any write the file contains every block once and in order."""
    write = os.write
    for bad in range(1, 7):
        calls = iter(range(1, 100))

        def faulty(descriptor, data, calls=calls, bad=bad):
            if next(calls) != bad:
                return write(descriptor, data)
            if fault != "full":
                done = write(descriptor, data[: len(data) // 2])
                if fault == "short":
                    return done
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "write", faulty)
        writer = FileWriter(tmp_path / f"{fault}{bad}", plain, retry_seconds=0.0)
        submit(writer, range(5))
        with writer._worker.changed:
            assert writer._worker.changed.wait_for(lambda writer=writer: writer.acked_step == 4, 30)
        assert writer.close(30)
        assert lines(writer) == expected(0, 1, 2, 3, 4)


@pytest.mark.fault(84)
def test_an_error_of_fsync_is_an_answer(tmp_path, plain, monkeypatch):
    writer = FileWriter(tmp_path, plain)
    submit(writer, [0])

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        assert not writer.flush(30)
    assert writer.flush(30)
    assert writer.close()


def stored(directory):
    """Return the steps in all files, in order."""
    files = [path.read_bytes().splitlines() for path in sorted(directory.iterdir())]
    return [line for lines in files for line in lines if line != b"header"]


@pytest.fixture
def lossy(monkeypatch):
    """As Linux: a failing fsync discards the pages, and the next one succeeds; fails at the calls in the set."""
    failing, calls, fsync = set(), iter(range(10**6)), os.fsync
    synced = {}

    def sync(descriptor):
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return fsync(descriptor)
        if next(calls) in failing:
            begin = synced.get(status.st_ino, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.ftruncate(descriptor, begin)
            os.ftruncate(descriptor, status.st_size)  # zeros
            raise OSError(errno.EIO, "Input/output error")
        synced[status.st_ino] = status.st_size
        return fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return failing


@pytest.mark.fault(84, 301)
def test_after_a_failed_fsync_the_blocks_are_written_again_to_a_new_file(tmp_path, plain, lossy, caplog):
    lossy.add(1)
    writer = FileWriter(tmp_path, plain)
    submit(writer, range(3))
    assert writer.flush(30)
    submit(writer, range(3, 5))
    first = writer.path
    assert not writer.flush(30)
    assert writer.flush(30)
    submit(writer, [5])
    assert writer.close(30)
    assert first.read_bytes().splitlines() == expected(0, 1)
    assert lines(writer) == expected(2, 3, 4, 5)  # a block of step 2 could have followed
    assert len(list(tmp_path.iterdir())) == 2
    assert (writer.acked_step, writer.dropped) == (5, 0)
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "Input/output error; values wait in memory" in messages[0]
    assert messages[1].endswith(f"could not be synchronised; the values since the last success are in '{writer.path}'")


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 2}, {1, 2, 3}, {0, 1, 2, 3, 4, 5}])
def test_no_failed_fsync_costs_a_value(tmp_path, plain, lossy, bad):
    lossy |= bad
    writer = FileWriter(tmp_path, plain, sync_seconds=0.0, retry_seconds=0.0)
    for step in range(6):
        submit(writer, [step])
        writer.flush(30)
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._synced == 6, 30)
    assert writer.close(30)
    assert stored(tmp_path) == expected(*range(6))[1:]


@pytest.mark.fault(84, 301)
def test_a_lasting_error_of_fsync_is_counted_and_said_once(tmp_path, plain, lossy, caplog):
    lossy |= set(range(10**4))
    writer = FileWriter(tmp_path, plain, sync_seconds=0.0, retry_seconds=0.0)
    submit(writer, range(4))
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._failures > 20, 30)
    assert not writer.flush(1)
    assert not writer.close(0.5)
    writer._worker._thread.join(30)
    assert writer.dropped == 12
    assert len(list(tmp_path.iterdir())) == 1
    assert len(caplog.records) == 2
    assert "closed before 12 values could be written" in caplog.text


def test_an_fsync_that_fails_at_the_end_is_tried_again_at_once(tmp_path, plain, lossy):
    lossy.add(0)
    writer = FileWriter(tmp_path, plain)
    submit(writer, range(3))
    assert writer.close(30)
    assert stored(tmp_path) == expected(0, 1, 2)[1:]


def test_blocks_that_wait_for_fsync_are_bounded(tmp_path, plain):
    writer = FileWriter(tmp_path, plain, capacity=2000, sync_seconds=1000.0)
    for step in range(20):
        submit(writer, [step], size=500)
        with writer._worker.changed:
            assert writer._worker.changed.wait_for(lambda step=step: writer.acked_step == step, 30)
            assert writer._queue.unsynced < 3000
    assert writer._synced > 0
    assert writer.close(30)


@pytest.mark.fault(70)
def test_a_disk_that_never_answers_does_not_delay_training(tmp_path, plain, gate, caplog):
    writer = FileWriter(tmp_path, plain, capacity=100_000)
    submit(writer, range(10_000))  # returns, although the disk never answers
    assert not writer.flush(0.05)
    assert not writer.close(0.2)
    assert writer.acked_step == -1
    assert writer.dropped == 30_000
    assert "closed before" in caplog.text
    gate.set()
    assert writer._worker._thread.join(30)


@pytest.mark.fault(71)
def test_a_deleted_directory_is_made_again_with_a_new_file(tmp_path, plain, caplog):
    directory = tmp_path / "log"
    writer = FileWriter(directory, plain)
    submit(writer, [0])
    assert writer.flush(30)
    shutil.rmtree(directory)
    submit(writer, [1, 2])
    assert writer.close()
    assert lines(writer) == expected(0, 1, 2)
    assert "was deleted while it was being written" in caplog.text


def test_a_directory_that_cannot_be_made_again_is_an_error_like_others(tmp_path, plain):
    directory = tmp_path / "log"
    writer = FileWriter(directory, plain)
    shutil.rmtree(directory)
    directory.write_text("in the way")
    submit(writer, [0])
    assert not writer.flush(30)
    directory.unlink()
    assert writer.close()
    assert lines(writer) == expected(0)


def refuse(thread):
    raise RuntimeError("can't start new thread")


def die(thread):
    """End a new thread before it can report that it runs, as the lack of memory does."""


STARTS = {"refused": ("start", refuse), "dying": ("_bootstrap", die)}


@pytest.fixture(params=STARTS)
def no_thread(request, monkeypatch):
    """No thread can be started: the system refuses it, or it dies before it can report that it runs."""
    name, function = STARTS[request.param]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, name, function)
        yield patched


@pytest.mark.fault(326, 309)
def test_without_a_thread_submitting_does_not_wait_for_the_disk(tmp_path, plain, gate, no_thread, caplog):
    """The gate is closed, so a write in this thread would never end."""
    writer = FileWriter(tmp_path, plain, capacity=2000, retry_seconds=0.0)
    submit(writer, range(20))
    assert writer.acked_step == -1
    assert writer.dropped > 0
    gate.set()
    assert not writer.close()
    assert writer.dropped < 60


@pytest.mark.fault(326)
def test_without_a_thread_flush_and_close_write(tmp_path, plain, no_thread, caplog):
    writer = FileWriter(tmp_path, plain)
    submit(writer, range(3))
    assert writer.acked_step == -1
    assert writer.flush()
    assert writer.acked_step == 2
    assert lines(writer) == expected(0, 1, 2)
    submit(writer, [3])
    assert writer.close()
    assert lines(writer) == expected(0, 1, 2, 3)
    assert sum("no thread can be started" in record.message for record in caplog.records) == 1


@pytest.mark.fault(309, 326)
def test_a_thread_is_started_when_that_is_possible_again(tmp_path, plain, no_thread, caplog, monkeypatch):
    monkeypatch.setattr("ikkuna.support.threads.START_SECONDS", 0.0)
    writer = FileWriter(tmp_path, plain, retry_seconds=0.0)
    submit(writer, range(3))
    no_thread.undo()
    submit(writer, [3])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer.acked_step == 3, 30)
    assert writer.close(30)
    assert lines(writer) == expected(0, 1, 2, 3)


def test_a_thread_that_ends_by_an_error_is_replaced(tmp_path, plain, monkeypatch):
    writer = FileWriter(tmp_path, plain)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda arguments: None)
        patched.setattr(writer._worker, "_attempt", lambda: 1 / 0)
        submit(writer, [0])
        assert writer._worker._thread.join(30)
    submit(writer, [1])
    assert writer.close(30)
    assert lines(writer) == expected(0, 1)


def test_a_writer_that_cannot_make_its_file_raises_at_once(tmp_path, plain):
    (tmp_path / "log").write_text("")
    with pytest.raises(LogDirError):
        FileWriter(tmp_path / "log", plain)


def test_several_threads_lose_nothing_and_keep_their_order(tmp_path, plain):
    writer = FileWriter(tmp_path, plain)

    def work(name):
        for number in range(200):
            writer.submit(b"%d %d\n" % (name, number), number, 1)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(30)
    found = [tuple(map(int, line.split())) for line in lines(writer)[1:]]
    assert [[number for name, number in found if name == wanted] for wanted in range(8)] == [list(range(200))] * 8


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Replace the temp directory."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.mark.fault(69)
@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_disk_that_fails_is_left_for_another_if_asked(tmp_path, plain, monkeypatch, elsewhere, caplog, error):
    writer = FileWriter(tmp_path / "run0007", plain, fallback=True)
    submit(writer, [0])
    assert writer.flush(30)
    home, write = writer._file._file._descriptor, os.write

    def faulty(descriptor, data):
        if descriptor == home and writer.path.parent != elsewhere:
            raise OSError(error, os.strerror(error))
        return write(descriptor, data)

    monkeypatch.setattr(writer._file._file, "append", lambda data: faulty(home, data))
    begun = writer.path
    submit(writer, [1, 2])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer.acked_step == 2, 30)
    assert writer.path.parent.parent == elsewhere
    assert writer.path.parent.name.startswith("ikkuna-run0007-")
    assert writer.close(30)
    assert begun.read_bytes().splitlines() == expected(0)
    assert lines(writer) == expected(1, 2)
    assert [r.message.count(f"continuing in '{writer.path}'") for r in caplog.records] == [0, 1, 0]


@pytest.mark.fault(69)
def test_without_a_place_to_go_a_disk_that_fails_is_tried_again(tmp_path, plain, failing, elsewhere):
    elsewhere.rmdir()
    writer = FileWriter(tmp_path, plain, fallback=True, retry_seconds=0.01)
    failing.set()
    submit(writer, [0])
    with writer._worker.changed:
        assert writer._worker.changed.wait_for(lambda: writer._failures > 2, 30)
        failing.clear()
        assert writer._worker.changed.wait_for(lambda: writer.acked_step == 0, 30)
    assert writer.close()
    assert writer.path.parent == tmp_path
