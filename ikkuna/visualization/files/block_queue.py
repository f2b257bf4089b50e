"""The queue of blocks that wait to be written: bounded in bytes; lost values are counted exactly."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BlockQueue", "QueuedBlock"]

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
