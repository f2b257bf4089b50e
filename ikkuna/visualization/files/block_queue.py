"""The blocks that wait to be written: bounded in bytes, and exact about what did not fit."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BlockQueue", "QueuedBlock"]

_OVERHEAD = 200  # bytes a waiting block costs besides its data, so that empty ones are bounded too


@dataclass(frozen=True, slots=True)
class QueuedBlock:
    """What one step adds to a file: its bytes, the step, and how many values the bytes hold."""

    data: bytes
    step: int
    values: int


class BlockQueue:
    """A first-in-first-out queue of blocks, at most `capacity` bytes long.

    A block that does not fit is lost and its values are counted.
    An episode of losses ends when a block is taken again, which happens only once half of the queue is free,
    so that a disk on the edge does not cause a line of log per step.
    In front of that block the queue puts one that tells the reader of the file what is missing.

    Parameters
    ----------
    capacity : in bytes; a single block that is larger is taken by an empty queue
    describe : makes that telling block from the number of values and the first and last step
    """

    def __init__(self, capacity: int, describe: Callable[[int, int, int], bytes]) -> None:
        self._capacity = capacity
        self._describe = describe
        self._blocks: deque[QueuedBlock] = deque()
        self._size = 0
        self._lost: tuple[int, int, int] | None = None  # values, first step, last step
        self.dropped = 0
        """Values lost so far."""
        self.accepted = 0
        """Blocks taken so far."""
        self.done = 0
        """Blocks written so far."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def head(self, size: int = 0) -> list[QueuedBlock]:
        """Return the oldest blocks: one, and those behind it that fit into `size` bytes with it."""
        blocks: list[QueuedBlock] = []
        for block in self._blocks:
            size -= len(block.data) + _OVERHEAD
            if blocks and size < 0:
                break
            blocks.append(block)
        return blocks

    def put(self, block: QueuedBlock) -> str | None:
        """Take or lose `block`; return a line for the log if an episode of losses has begun or ended."""
        limit = self._capacity // 2 if self._lost else self._capacity
        if self._blocks and self._size + len(block.data) + _OVERHEAD > limit:
            return self._lose(block)
        news = self.end_losses()
        self._take(block)
        return news

    def end_losses(self) -> str | None:
        """End the episode of losses if there is one: write down what is missing, and return a line for the log."""
        if self._lost is None:
            return None
        values, first, last = self._lost
        self._lost = None
        self._take(QueuedBlock(self._describe(values, first, last), last, 0))
        return f"{values} values of steps {first} to {last} are lost; values are kept again"

    def _take(self, block: QueuedBlock) -> None:
        self._blocks.append(block)
        self._size += len(block.data) + _OVERHEAD
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
        return f"writing is too slow, {self._size} bytes wait; values are lost from step {block.step} on"

    def remove(self, blocks: list[QueuedBlock]) -> None:
        """Take `blocks`, which have been written, off the head; they may be gone already (see :meth:`abandon`)."""
        for block in blocks:
            if self._blocks and self._blocks[0] is block:
                self._blocks.popleft()
                self._size -= len(block.data) + _OVERHEAD
                self.done += 1

    def abandon(self) -> int:
        """Lose everything that waits; return how many values that is."""
        values = sum(block.values for block in self._blocks)
        self._blocks.clear()
        self._size = 0
        self.dropped += values
        return values
