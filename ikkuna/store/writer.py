"""Writes blocks to one file in a thread, so that training never waits for the disk."""

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ikkuna.store.append_file import FileFormat, ReplaceableFile
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.threads import Worker

_OVERHEAD = 200  # bytes of a waiting block besides its data, so that the number of empty blocks is bounded


@dataclass(slots=True)
class QueuedBlock:
    """The bytes that a step adds to a file, and the number of values in them."""

    data: bytes
    step: int
    values: int
    is_picture: bool = False
    """Whether it is an image drawn later, so that blocks of later steps may precede it."""
    is_written: bool = False
    is_synced: bool = False
    size: int = field(init=False)
    """The bytes that it takes in a queue."""

    def __post_init__(self) -> None:
        self.size = len(self.data) + _OVERHEAD


class BlockQueue:
    """A first-in-first-out queue of blocks, at most `capacity` bytes long.

    A block that does not fit is lost and its values are counted.
    After a loss, blocks are accepted again when half of the queue is free, so that a slow disk causes few log lines.
    Before the first accepted block the queue inserts a block that reports the loss to the reader of the file.
    Written blocks are kept until they are synchronised, so that they can be written again; those of the last step until a later
    one is synchronised, because readers can only drop whole steps of an earlier file.

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
        self.nbytes = 0
        """Number of bytes that wait, with an allowance for each block."""
        self._written: list[QueuedBlock] = []  # but not synchronised
        self._is_abandoned = False
        self.unsynced = 0
        """Bytes of written blocks that are not synchronised."""
        self.last_step = -1
        """The step that was written last."""
        self._final_step = -1  # the last step whose blocks are not kept
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
            size -= block.size
            if blocks and size < 0:
                break
            blocks.append(block)
        return blocks

    @property
    def acked_step(self) -> int:
        """The last step that was written, together with all values of it and of earlier steps that are not lost; -1 before."""
        waiting = (block.step for block in self._blocks if block.values and not block.is_synced)
        return min(self.last_step, min(waiting, default=self.last_step + 1) - 1)

    def put(self, block: QueuedBlock) -> str | None:
        """Accept `block`, or count it as lost; return a line for the log if losses have begun or ended."""
        limit = self._capacity // 2 if self._lost else self._capacity
        if self._blocks and self.nbytes + block.size > limit:
            return self._lose(block)
        line = None if self._lost is None else self.end_losses()
        self._append(block)
        return line

    def end_losses(self) -> str | None:
        """If blocks have been lost since the last call, queue the report, and return a line for the log."""
        if self._lost is None:
            return None
        values, first, last = self._lost
        self._lost = None
        block = QueuedBlock(self._describe(values, first, last), last, 0)
        self._append(block)
        return f"{values} values of steps {first} to {last} are lost"

    def _append(self, block: QueuedBlock) -> None:
        self._blocks.append(block)
        self.nbytes += block.size
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
        return f"writing is too slow, {self.nbytes} bytes are waiting; values are lost from step {block.step} on"

    def mark_written(self, blocks: list[QueuedBlock]) -> None:
        """Remove `blocks`, which have been written, from the head, unless :meth:`abandon` has removed them."""
        for block in blocks:
            if self._blocks and self._blocks[0] is block:
                self._written.append(self._pop())
                self.unsynced += block.size

    def _pop(self) -> QueuedBlock:
        block = self._blocks.popleft()
        block.is_written = True
        self.nbytes -= block.size
        self.done += 1
        self.last_step = self.last_step if block.is_picture else block.step
        return block

    def mark_synced(self) -> int:
        """Forget the written blocks, except those of the last step if they are small; return how many bytes these have.

        They are at the end of the file, and are written again together with those that follow them, if that is necessary.
        """
        begin = len(self._written)
        for place in range(begin - 1, -1, -1):
            block = self._written[place]
            block.is_synced = True
            if not block.is_picture:
                if block.step != self.last_step:
                    break
                begin = place
        kept = self._written[begin:]
        if sum(block.size for block in kept) > self._capacity // 2:
            begin, kept = len(self._written), []
        final = [block.step for block in self._written[:begin] if not block.is_picture]
        self._final_step = final[-1] if final else self._final_step
        self._written, self.unsynced = kept, 0
        return sum(len(block.data) for block in kept)

    def forget_written(self) -> None:
        """Forget the written blocks, because their file is left as it is."""
        self._written, self.unsynced, self._final_step = [], 0, self.last_step

    def restore(self) -> None:
        """Return the written blocks to the head, because they may not be in a file any more."""
        if self._is_abandoned:
            self.dropped += sum(block.values for block in self._written if not block.is_synced)
        else:
            self._blocks.extendleft(reversed(self._written))
            self.nbytes += sum(block.size for block in self._written)
        self.done -= len(self._written)
        self._written, self.unsynced = [], 0

    def replacements(self, replaces_bytes: bool) -> tuple[list[QueuedBlock], list[QueuedBlock]]:
        """Return the blocks that replace those in the file, and the other blocks.

        Where a file names the first step that it replaces, the others are those of steps of which some blocks are not kept:
        pictures of earlier steps, and steps with very large blocks.
        """
        if replaces_bytes:
            return list(self._blocks), []
        steps = [block.step for block in self._blocks if not block.is_picture]
        is_rewound = any(step < self._final_step for step in steps)
        first = min((step for step in steps if is_rewound or step > self._final_step), default=math.inf)
        blocks = list(self._blocks)
        return [block for block in blocks if block.step >= first], [block for block in blocks if block.step < first]

    def mark_rewritten(self, written: list[QueuedBlock], others: list[QueuedBlock], is_clean: bool) -> None:
        """Remove the first blocks, of which those `written` are in a new file.

        The `others` are written later, unless an earlier file may contain them, because it is not `is_clean`; then those that
        are not synchronised count as lost.
        """
        if self._is_abandoned:
            return
        again = [block for block in others if is_clean or not block.is_written]
        self.dropped += sum(block.values for block in others if block not in again and not block.is_synced)
        for _ in range(len(written) + len(others)):
            self._pop()
        self.last_step = next((block.step for block in reversed(written) if not block.is_picture), self.last_step)
        self._written = written
        self._blocks.extendleft(reversed(again))
        self.nbytes += sum(block.size for block in again)
        self.done -= len(again)

    def abandon(self) -> int:
        """Remove all blocks and count them as lost; return the number of their values."""
        values = sum(block.values for block in self._blocks if not block.is_synced)
        self._is_abandoned = True
        self._blocks.clear()
        self.nbytes = 0
        self.dropped += values
        return values


_SMALL_BATCH, _BATCH = 2**10, 2**20  # bytes
_CHECK_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


class FileWriter:
    """One file of this process, and the daemon thread that writes it.

    Each step is one block, written completely or not at all; waiting blocks are written together.
    :meth:`submit` only appends the block to a queue, so a slow, full, failing or blocked disk does not delay the caller.
    Blocks are written at once, or 50 ms after the last ones, so that the thread is woken at most 20 times a second.
    Blocks that do not fit into the queue are dropped, counted in :attr:`dropped`, and logged in two lines.
    After an error the blocks stay in the queue, and writing is tried again every `retry_seconds`.
    Blocks are kept until fsync has succeeded.  If it fails, the operating system may have discarded them, and it reports
    this only once.  They are then written again to a new file, which replaces the end of the old one when its fsync has
    succeeded; in the same way a new file continues one that has been deleted, in a directory that is created again.
    Where neither the format nor a truncation can replace them in the old file, they count as lost instead.
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
        self._replaces_bytes = file_format.replaces_bytes
        self._retry_seconds = retry_seconds
        self._sync_seconds = sync_seconds
        self._capacity = capacity
        self._batch = _BATCH  # bytes that are written together
        self._queue = BlockQueue(capacity, file_format.loss)
        self._worker = Worker(
            "ikkuna-writer",
            self._job,
            due=self._due,
            failed=self._fail,
            finish=self._file.close,
            retry_seconds=retry_seconds,
        )
        self._synced = self._wanted = 0  # numbers of blocks: on the disk, and requested to be
        self._synced_at = time.monotonic()
        self._retry_at = self._write_at = 0.0
        self._failures = 0
        self._failing = False
        self._unsafe = ""  # why the file may lack blocks that were written to it

    @property
    def path(self) -> Path | None:
        """The file being written; ``None`` before it is created."""
        return self._file.path

    @property
    def acked_step(self) -> int:
        """Last step of which the operating system has all submitted values; -1 before, and in a forked child.

        All values up to this step, except those in :attr:`dropped`, survive the death of the process.
        After a failed fsync it is the last step that is on the disk, until the others have been written again.
        """
        if self._worker.process != os.getpid():
            return -1
        with self._worker.lock:
            return self._queue.acked_step

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to write or to synchronise the file failed."""
        return self._failing

    @property
    def dropped(self) -> int:
        """Number of lost values."""
        return self._queue.dropped

    def submit(self, block: bytes, step: int, values: int, is_picture: bool = False) -> None:
        """Queue a block and return at once.

        Parameters
        ----------
        block : bytes
            May be empty.
        step : int
            Its step; only pictures may belong to an earlier one than the block before.
        values : int
            Number of values in the block, to be counted if it is lost.
        is_picture : bool
            Whether it is an image that was drawn later.
        """
        if self._worker.process != os.getpid():
            self._queue.dropped += values
            return
        with self._worker.lock:
            if self._worker.is_closing:
                self._queue.dropped += values
                return
            if not block and not self._queue:
                self._queue.last_step = step
                return
            # otherwise the thread has other blocks to write, or waits for the end of the pause
            is_first = not self._queue.nbytes and time.monotonic() >= self._write_at
            line = self._queue.put(QueuedBlock(block, step, values, is_picture))
        if is_first or self._queue.nbytes > self._capacity // 4 or not self._worker.is_served:
            self._worker.wake()
        if line:
            log.warning("'%s': %s", self._file.label, line)

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything queued so far to the disk, and return whether that was done.

        Return ``False`` after `timeout` seconds, and as soon as the disk reports an error.
        If no thread can be started, this thread writes, and waits for the disk.
        """
        if self._worker.process != os.getpid():
            return False
        target, failures = self._request_sync(), self._failures
        self._worker.wake()
        self._worker.wait_for(lambda: self._synced >= target or self._failures > failures, timeout)
        return self._synced >= target

    def close(self, timeout: float | None = 2.0) -> bool:
        """Flush, release the file, and return whether no value was lost since it was opened.

        Blocks that have not been written after `timeout` seconds are lost.  A second call does nothing.
        If no thread can be started, this thread writes, and waits for the disk.
        In the writer's own thread, the rest is written after the call.
        """
        if self._worker.process != os.getpid():
            return False
        with self._worker.lock:
            line = self._queue.end_losses()
            target = self._request_sync()
        is_finished = self._worker.close(timeout)
        if self._worker.is_current:
            return False
        with self._worker.lock:
            lost = self._queue.abandon()
            stored = is_finished and self._synced >= target and not self._queue.dropped
        if line:
            log.warning("'%s': %s", self._file.label, line)
        if lost:
            log.error("'%s': closed before %d values could be written; they are lost", self._file.label, lost)
        return stored

    def _request_sync(self) -> int:
        """Request that everything queued so far is synchronised; return the number of the last block."""
        with self._worker.lock:
            self._wanted = max(self._wanted, self._queue.accepted)
            self._retry_at = 0.0
            return self._queue.accepted

    def _job(self) -> Callable[[], None] | None:
        """Return the next job that can be done now; ``None`` during the pause after an error."""
        now = time.monotonic()
        if now < self._retry_at:
            return None
        if self._unsafe and self._queue:
            return self._rewrite
        if self._queue.done > self._synced and (
            self._queue.done >= self._wanted > self._synced
            or now >= self._synced_at + self._sync_seconds
            or self._queue.unsynced >= self._capacity
        ):
            return self._sync
        if self._queue and (now >= self._write_at or self._is_urgent()):
            return self._write
        return self._check_directory if self._may_check() and now >= self._check_at else None

    def _may_check(self) -> bool:
        is_open = self._worker.is_served and not self._worker.is_closing and self.path is not None
        return is_open and self._check is not None

    def _due(self) -> float:
        """Return the time of the next job, unless something changes."""
        due = math.inf
        if self._queue or time.monotonic() < self._write_at:
            due = self._write_at
        elif self._queue.done > self._synced:
            due = self._synced_at + self._sync_seconds
        if self._may_check():
            due = min(due, self._check_at)
        return max(due, self._retry_at)  # before, there is no job, and the thread would ask for one all the time

    def _is_urgent(self) -> bool:
        """Whether blocks are written before the pause after the last ones is over."""
        return self._worker.is_closing or self._wanted > self._queue.done or self._queue.nbytes > self._capacity // 4

    def _write(self) -> None:
        """Write waiting blocks; they stay in the queue until that has succeeded."""
        # A write for each step would release the interpreter's lock each time and fall behind a busy training thread,
        # and to wake this thread each time would cost the training thread its processor where others wait for one.
        # After an error only one block is written, because it may fit where many do not, and then twice as many each time.
        with self._worker.lock:
            blocks = self._queue.head(self._batch)
        if not blocks:  # given up by close()
            return
        data = b"".join(block.data for block in blocks)
        if data and not self._file.append(data):
            self._distrust("was deleted while it was being written")
            return
        with self._worker.lock:
            self._queue.mark_written(blocks)
            self._batch = min(2 * max(self._batch, _SMALL_BATCH), _BATCH)
            if not self._queue:
                self._write_at = time.monotonic() + _PAUSE_SECONDS
            recovered, self._failing = self._failing, False
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
        self._check_at = time.monotonic() + _CHECK_SECONDS

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError:
            self._distrust("could not be synchronised")
            raise
        self._mark_synced()

    def _distrust(self, why: str) -> None:
        """Write the blocks that are kept to a new file next."""
        with self._worker.lock:
            self._queue.restore()
            self._unsafe = why

    def _mark_synced(self) -> None:
        with self._worker.lock:
            self._file.finish(self._queue.mark_synced())
            self._synced = self._queue.done
            self._synced_at = time.monotonic()

    def _rewrite(self) -> None:
        """Write all blocks that are kept to a new file."""
        with self._worker.lock:
            written, others = self._queue.replacements(self._replaces_bytes)
        first_step = min((block.step for block in written), default=None)
        is_clean = self._file.replace_end([block.data for block in written], first_step, self._unsafe)
        with self._worker.lock:
            self._queue.mark_rewritten(written, others, is_clean)
            self._failing, self._unsafe = False, ""
            self._mark_synced()

    def _fail(self, error: BaseException) -> None:
        with self._worker.lock:
            self._failures += 1
            is_closing = self._worker.is_closing
            if not is_closing:
                self._wanted = self._synced
            self._synced_at = time.monotonic()
            self._batch = 0
            first, self._failing = not self._failing, True
            is_last_chance = is_closing and self._unsafe and first
            self._retry_at = 0.0 if is_last_chance else self._synced_at + self._retry_seconds
        if first:
            what = "'%s' cannot be written: %s; values wait in memory, and writing is tried again every %g s"
            log.error(what, self._file.label, error, self._retry_seconds)
        if self._fallback and isinstance(error, OSError):
            self._fallback = False
            if self._file.move_to_temporary_directory():
                with self._worker.lock:
                    self._queue.forget_written()
                    self._retry_at, self._unsafe = 0.0, ""
                    self._synced = self._queue.done
