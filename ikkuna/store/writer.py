"""Writes blocks to one file in a thread, so that training never waits for the disk."""

import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ikkuna.store.append_file import FileFormat, ReplaceableFile
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.threads import START_SECONDS, BackgroundThread

__all__ = ["BlockQueue", "FileWriter", "QueuedBlock"]


_OVERHEAD = 200  # bytes of a waiting block besides its data, so that the number of empty blocks is bounded


@dataclass(frozen=True, slots=True)
class QueuedBlock:
    """The bytes that a step adds to a file, and the number of values in them."""

    data: bytes
    step: int
    values: int


class BlockQueue:
    """A first-in-first-out queue of blocks, at most `capacity` bytes long.

    A block that does not fit is lost and its values are counted.
    After a loss, blocks are accepted again when half of the queue is free, so that a slow disk causes few log lines.
    Before the first accepted block the queue inserts a block that reports the loss to the reader of the file.
    Written blocks are kept until they are synchronised, so that they can be written again.

    Parameters
    ----------
    capacity : int
        In bytes.  An empty queue accepts a single block that is larger.
    describe : callable
        Returns the reporting block for the number of lost values and the first and last step.
    """

    def __init__(self, capacity: int, describe: Callable[[int, int, int], bytes]) -> None:
        self._capacity = capacity
        self._describe = describe
        self._blocks: deque[QueuedBlock] = deque()
        self._size = 0
        self._written: list[QueuedBlock] = []  # but not synchronised
        self._is_abandoned = False
        self.unsynced = 0
        """Bytes of written blocks that are not synchronised."""
        self._lost: tuple[int, int, int] | None = None  # values, first step, last step
        self.dropped = 0
        """Number of lost values."""
        self.accepted = 0
        """Number of accepted blocks."""
        self.done = 0
        """Number of written blocks."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def head(self, size: int = 0) -> list[QueuedBlock]:
        """Return the oldest block and those after it that fit into `size` bytes together with it."""
        blocks: list[QueuedBlock] = []
        for block in self._blocks:
            size -= _size(block)
            if blocks and size < 0:
                break
            blocks.append(block)
        return blocks

    def put(self, block: QueuedBlock) -> str | None:
        """Accept `block`, or count it as lost; return a line for the log if losses have begun or ended."""
        limit = self._capacity // 2 if self._lost else self._capacity
        if self._blocks and self._size + _size(block) > limit:
            return self._lose(block)
        line = self.end_losses()
        self._append(block)
        return line

    def end_losses(self) -> str | None:
        """If blocks have been lost since the last call, queue the report, and return a line for the log."""
        if self._lost is None:
            return None
        values, first, last = self._lost
        self._lost = None
        self._append(QueuedBlock(self._describe(values, first, last), last, 0))
        return f"{values} values of steps {first} to {last} are lost"

    def _append(self, block: QueuedBlock) -> None:
        self._blocks.append(block)
        self._size += _size(block)
        self.accepted += 1

    def _lose(self, block: QueuedBlock) -> str | None:
        if not block.values:
            return None
        self.dropped += block.values
        if self._lost is not None:
            values, first, _ = self._lost
            self._lost = values + block.values, first, block.step
            return None
        self._lost = block.values, block.step, block.step
        return f"writing is too slow, {self._size} bytes are waiting; values are lost from step {block.step} on"

    def mark_written(self, blocks: list[QueuedBlock]) -> None:
        """Remove `blocks`, which have been written, from the head, unless :meth:`abandon` has removed them."""
        for block in blocks:
            if self._blocks and self._blocks[0] is block:
                self._written.append(self._blocks.popleft())
                self._size -= _size(block)
                self.unsynced += _size(block)
                self.done += 1

    def mark_synced(self) -> None:
        """Forget the written blocks."""
        self._written.clear()
        self.unsynced = 0

    def restore(self) -> None:
        """Return the written blocks to the head, because synchronising them has failed."""
        if self._is_abandoned:
            self.dropped += sum(block.values for block in self._written)
        else:
            self._blocks.extendleft(reversed(self._written))
            self._size += self.unsynced
        self.done -= len(self._written)
        self.mark_synced()

    def abandon(self) -> int:
        """Remove all blocks and count them as lost; return the number of their values."""
        values = sum(block.values for block in self._blocks)
        self._is_abandoned = True
        self._blocks.clear()
        self._size = 0
        self.dropped += values
        return values


def _size(block: QueuedBlock) -> int:
    return len(block.data) + _OVERHEAD


_SMALL_BATCH, _BATCH = 2**10, 2**20  # bytes
_CHECK_SECONDS = 1.0


class FileWriter:
    """One file of this process, and the daemon thread that writes it.

    Each step is one block, written completely or not at all; waiting blocks are written together.
    :meth:`submit` only appends the block to a queue, so a slow, full, failing or blocked disk does not delay the caller.
    Blocks that do not fit into the queue are dropped, counted in :attr:`dropped`, and logged in two lines.
    After an error the blocks stay in the queue, and writing is tried again every `retry_seconds`.
    Blocks are kept until fsync has succeeded.  If it fails, the operating system may have discarded them, and it reports
    this only once.  They are then written again to a new file, which replaces the old one when its fsync has succeeded.
    If the directory is deleted, it is created again with a new file.
    In a forked child all methods do nothing.

    Parameters
    ----------
    directory : Path or callable
        Created if it does not exist.  If it is a function that returns a directory, the thread calls it and creates the
        file, and errors are handled as errors of writing; with a path the file is created at once.
    file_format : FileFormat
        Name, header and the report of lost values.
    capacity : int
        Largest number of bytes that wait to be written.
    retry_seconds : float
        Pause after a failed write.
    sync_seconds : float
        Time between two calls of fsync: the most that a power failure can lose.
    fallback : bool
        Whether to continue in a directory for temporary files when the disk reports an error.
    check : callable, optional
        Called by the thread about once a second with the directory of the file, when there is nothing to write.

    Raises
    ------
    LogDirError
        If the file cannot be created at once.
    """

    def __init__(
        self,
        directory: Path | Callable[[], Path],
        file_format: FileFormat,
        *,
        capacity: int = 8 * 2**20,
        retry_seconds: float = 10.0,
        sync_seconds: float = 30.0,
        fallback: bool = False,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        self._check = check
        self._check_at = 0.0
        self._fallback = fallback
        self._file = ReplaceableFile(directory, file_format)
        self._retry_seconds = retry_seconds
        self._sync_seconds = sync_seconds
        self._capacity = capacity
        self._batch = _BATCH  # bytes that are written together
        self._queue = BlockQueue(capacity, file_format.loss)
        self._changed = threading.Condition()  # guards the attributes below; its lock is reentrant, for signal handlers
        self._thread: BackgroundThread | None = None
        self._is_served = False  # whether the thread runs
        self._is_working = False  # whether some thread does a job
        self._has_logged_refusal = False
        self._started_at = self._start_at = 0.0
        self._acked = -1
        self._synced = self._wanted = 0  # numbers of blocks: on the disk, and requested to be
        self._synced_step = -1  # the last step on the disk
        self._synced_at = time.monotonic()
        self._retry_at = 0.0
        self._failures = 0
        self._failing = self._closing = self._finished = False
        self._is_unsafe = False  # fsync has failed: the file may lack blocks
        self._process = os.getpid()
        self._disown_in_children()

    # Native code can fork without calling the hook, and a process id can be used again: hence a mark and a comparison.
    def _disown_in_children(self) -> None:
        disown = weakref.WeakMethod(self._disown)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: (method := disown()) and method())

    def _disown(self) -> None:
        self._process = -1

    def _ours(self) -> bool:
        return self._process == os.getpid()

    @property
    def path(self) -> Path | None:
        """The file being written; ``None`` before it is created."""
        return self._file.path

    @property
    def acked_step(self) -> int:
        """Last step whose bytes the operating system has; -1 before.

        All values up to this step, except those in :attr:`dropped`, survive the death of the process.
        After a failed fsync it is the last step that is on the disk, until the others have been written again.
        """
        return self._acked

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to write or to synchronise the file failed."""
        return self._failing

    @property
    def dropped(self) -> int:
        """Number of lost values."""
        return self._queue.dropped

    @property
    def written(self) -> int:
        """Number of blocks that the operating system has."""
        return self._queue.done

    def submit(self, block: bytes, step: int, values: int) -> int:
        """Queue the block of a step and return at once.

        Parameters
        ----------
        block : bytes
            May be empty.
        step : int
            Its step.
        values : int
            Number of values in the block, to be counted if it is lost.

        Returns
        -------
        int
            Number of blocks queued so far; the block is written when :attr:`written` reaches it.
        """
        if not self._ours():
            self._queue.dropped += values
            return 0
        with self._changed:
            if self._closing:
                self._queue.dropped += values
                return 0
            if not block and not self._queue:
                self._acked = step
                return 0
            line = self._queue.put(QueuedBlock(block, step, values))
            number = self._queue.accepted
            self._changed.notify_all()
            self._start()
        if line:
            log.warning("'%s': %s", self._file.label, line)
        return number

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything queued so far to the disk, and return whether that was done.

        Return ``False`` after `timeout` seconds, and as soon as the disk reports an error.
        If no thread can be started, this thread writes, and waits for the disk.
        """
        if not self._ours():
            return False
        with self._changed:
            target, failures = self._request_sync(), self._failures
        self._work_here(timeout)
        with self._changed:
            self._changed.wait_for(
                lambda: self._synced >= target or self._failures > failures or self._finished, timeout
            )
            return self._synced >= target

    def close(self, timeout: float | None = 2.0) -> bool:
        """Flush, release the file, and return whether no value was lost since it was opened.

        Blocks that have not been written after `timeout` seconds are lost.  A second call does nothing.
        If no thread can be started, this thread writes, and waits for the disk.
        In the writer's own thread, the rest is written after the call.
        """
        if not self._ours():
            return False
        with self._changed:
            line = self._queue.end_losses()
            self._closing = True
            target = self._request_sync()
        self._work_here(timeout)
        with self._changed:
            if not self._is_served:
                self._finish()
            elif self._thread is not None and self._thread.is_current:
                return False
            self._changed.wait_for(lambda: self._finished, timeout)
            lost = self._queue.abandon()
            stored = self._finished and self._synced >= target and not self._queue.dropped
        if line:
            log.warning("'%s': %s", self._file.label, line)
        if lost:
            log.error("'%s': closed before %d values could be written; they are lost", self._file.label, lost)
        return stored

    def _request_sync(self) -> int:
        """Request that everything queued so far is synchronised; return the number of the last block."""
        self._wanted = max(self._wanted, self._queue.accepted)
        self._retry_at = self._start_at = 0.0
        self._changed.notify_all()
        self._start()
        return self._queue.accepted

    def _start(self) -> None:
        """Start the thread if it is needed and not running; try again after a pause if it does not begin."""
        if self._is_served or self._finished or self._job() is None:
            return
        now, earlier = time.monotonic(), self._thread
        if earlier is not None and (
            now < self._start_at or (earlier.may_begin and now < self._started_at + START_SECONDS)
        ):
            return
        self._started_at, self._start_at = now, now + self._retry_seconds
        self._thread = BackgroundThread(self._run, "ikkuna-writer")
        is_refused = not self._thread.start() or (earlier is not None and not earlier.has_begun())
        if is_refused and not self._has_logged_refusal:
            self._has_logged_refusal = True
            what = "'%s': no thread can be started; values wait in memory until one can, or until flush() or close()"
            log.error(what, self._file.label)

    def _run(self) -> None:
        with self._changed:
            if self._is_served or self._finished:  # another one was started in the meantime
                return
            self._is_served = True
            self._changed.notify_all()
        try:
            while self._wait_for_job():
                self._attempt()
            with self._changed:
                self._finish()
        finally:
            with self._changed:
                self._is_served = False

    def _wait_for_job(self) -> bool:
        with self._changed:
            while True:
                found = self._job() is not None
                if not self._is_working and (found or self._closing):
                    return found
                self._changed.wait(None if self._is_working else self._pause())

    def _work_here(self, timeout: float | None) -> None:
        """If there is work, and no thread can be started, work in this thread."""
        with self._changed:
            if self._is_served or self._job() is None:
                return
            thread = self._thread
        deadline = None if timeout is None else time.monotonic() + timeout
        patience = START_SECONDS if timeout is None else min(timeout, START_SECONDS)
        if thread is not None and (thread.has_begun(patience) or (thread.may_begin and patience < START_SECONDS)):
            return
        while self._attempt() and (deadline is None or time.monotonic() < deadline):
            pass

    def _job(self) -> Callable[[], None] | None:
        """Return the next job that can be done now; ``None`` during the pause after an error."""
        now = time.monotonic()
        if now < self._retry_at or self._finished:
            return None
        if self._is_unsafe and self._queue:
            return self._rewrite
        if self._queue.done > self._synced and (
            self._queue.done >= self._wanted > self._synced
            or now >= self._synced_at + self._sync_seconds
            or self._queue.unsynced >= self._capacity
        ):
            return self._sync
        if self._queue:
            return self._write
        may_check = self._check is not None and self._is_served and self.path is not None and not self._closing
        return self._check_directory if may_check and now >= self._check_at else None

    def _pause(self) -> float | None:
        """Return the seconds until the next job is due, unless something changes; ``None`` if there is none."""
        if self._queue:
            due = self._retry_at
        elif self._queue.done > self._synced:
            due = max(self._retry_at, self._synced_at + self._sync_seconds)
        else:
            due = math.inf
        if self._check is not None:
            due = min(due, self._check_at)
        return None if due == math.inf else max(due - time.monotonic(), 0.0)

    def _attempt(self) -> bool:
        """Do the next job, unless another thread does one; return whether there was one."""
        with self._changed:
            if (job := self._job()) is None or self._is_working:
                return False
            self._is_working = True
        try:
            job()
        except Exception as error:
            raise_users_exception(error)
            self._fail(error)
        finally:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
        return True

    def _write(self) -> None:
        """Write waiting blocks; they stay in the queue until that has succeeded."""
        # A write for each step would release the interpreter's lock each time and fall behind a busy training thread.
        # After an error only one block is written, because it may fit where many do not, and then twice as many each time.
        with self._changed:
            blocks = self._queue.head(self._batch)
            if not blocks:
                return
        if data := b"".join(block.data for block in blocks):
            self._file.append(data)
        with self._changed:
            self._queue.mark_written(blocks)
            self._acked = blocks[-1].step
            self._batch = min(2 * max(self._batch, _SMALL_BATCH), _BATCH)
            recovered, self._failing = self._failing, False
            self._changed.notify_all()
        if recovered:
            log.warning("'%s': can be written again", self._file.label)

    def _check_directory(self) -> None:
        """Call ``check``; without errors, because they would count as errors of the disk."""
        if self._check is not None and (path := self.path) is not None:
            try:
                self._check(path.parent)
            except Exception as error:
                raise_users_exception(error)
                log.error("'%s': a check of its directory failed and is not repeated", self._file.label, exc_info=error)
                self._check = None
        with self._changed:
            self._check_at = time.monotonic() + _CHECK_SECONDS

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError:
            with self._changed:
                self._queue.restore()
                self._is_unsafe = True
                self._acked = self._synced_step
            raise
        with self._changed:
            self._mark_synced()

    def _mark_synced(self) -> None:
        self._queue.mark_synced()
        self._synced, self._synced_step = self._queue.done, self._acked
        self._synced_at = time.monotonic()
        self._changed.notify_all()

    def _rewrite(self) -> None:
        """Write all blocks that are not synchronised to a new file."""
        with self._changed:
            blocks = self._queue.head(sys.maxsize)
            first_step = blocks[0].step if blocks[0].step > self._synced_step else None
        self._file.replace_end([block.data for block in blocks], first_step)
        with self._changed:
            self._queue.mark_written(blocks)
            self._acked = blocks[-1].step
            self._failing = self._is_unsafe = False
            self._mark_synced()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            if not self._closing:
                self._wanted = self._synced
            self._synced_at = time.monotonic()
            self._batch = 0
            first, self._failing = not self._failing, True
            is_last_chance = self._closing and self._is_unsafe and first
            self._retry_at = 0.0 if is_last_chance else self._synced_at + self._retry_seconds
            self._changed.notify_all()
        if first:
            what = "'%s' cannot be written: %s; values wait in memory, and writing is tried again every %g s"
            log.error(what, self._file.label, error, self._retry_seconds)
        if self._fallback and isinstance(error, OSError):
            self._fallback = False
            if self._file.move_to_temporary_directory():
                self._retry_at = 0.0
                self._is_unsafe = False

    def _finish(self) -> None:
        if not self._finished:
            self._file.close()
        self._finished = True
        self._changed.notify_all()
