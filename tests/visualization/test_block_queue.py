import math

from hypothesis import given
from hypothesis import strategies as st

from ikkuna.store.writer import BlockQueue, QueuedBlock


def describe(values, first, last):
    return f"lost {values} {first}-{last}".encode()


def fill(queue, steps, size=800):
    return [queue.put(QueuedBlock(b"x" * size, step, 5)) for step in steps]


def drain(queue, count):
    out = []
    for _ in range(count):
        out += queue.head()
        queue.mark_written(queue.head())
    return out


def test_blocks_leave_in_the_order_in_which_they_came():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(5))
    assert [block.step for block in drain(queue, 5)] == [0, 1, 2, 3, 4]
    assert not queue
    assert queue.head() == []


def test_blocks_are_taken_together_up_to_a_size():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(5))
    assert [block.step for block in queue.head(3000)] == [0, 1, 2]
    assert [block.step for block in queue.head(2999)] == [0, 1]
    assert [block.step for block in queue.head(10)] == [0]


def test_an_episode_of_losses_is_two_lines_and_one_record():
    queue = BlockQueue(10_000, describe)
    began = fill(queue, range(13))
    assert [line is None for line in began] == [True] * 10 + [False] + [True] * 2
    assert "lost from step 10 on" in began[10]
    assert queue.dropped == 15
    drain(queue, 6)
    [ended] = fill(queue, [13])
    assert ended == "15 values of steps 10 to 12 are lost"
    assert [block.step for block in drain(queue, 4)] == [6, 7, 8, 9]
    assert [block.data[:12] for block in drain(queue, 2)] == [b"lost 15 10-1", b"x" * 12]


def test_the_episode_goes_on_until_half_of_the_queue_is_free():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(11))
    drain(queue, 5)
    assert fill(queue, [11]) == [None]
    assert queue.dropped == 10
    drain(queue, 1)
    assert fill(queue, [12]) != [None]
    assert queue.dropped == 10


def test_a_block_larger_than_the_queue_passes_when_nothing_waits():
    queue = BlockQueue(100, describe)
    assert fill(queue, [0], size=1000) == [None]
    assert queue.dropped == 0


def test_empty_blocks_are_bounded_too_and_cause_no_episode():
    queue = BlockQueue(10_000, describe)
    news = [queue.put(QueuedBlock(b"", step, 0)) for step in range(1000)]
    assert queue.accepted == 50
    assert set(news) == {None}


def test_what_is_abandoned_is_counted():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(3))
    blocks = queue.head()
    assert queue.abandon() == 15
    queue.mark_written(blocks)
    assert (queue.dropped, queue.done) == (15, 0)


def test_written_blocks_return_in_order_if_they_cannot_be_synchronised():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(5))
    drain(queue, 2)
    assert queue.mark_synced() == 800  # the bytes of the last step, of which a further block may come
    drain(queue, 2)
    assert (queue.done, queue.unsynced, queue.acked_step) == (4, 2000, 3)
    queue.restore()
    assert (queue.done, queue.unsynced, queue.acked_step) == (1, 0, 1)
    assert [block.step for block in queue.head(10_000)] == [1, 2, 3, 4]
    assert fill(queue, range(5, 12))[6] is not None  # they take up room again


def test_blocks_that_return_after_the_end_are_counted():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(3))
    drain(queue, 2)
    assert queue.abandon() == 5
    queue.restore()
    assert not queue
    assert queue.dropped == 15


def test_steps_of_which_blocks_are_not_kept_are_not_replaced():
    """A new file would hide their other blocks, and pictures belong to earlier steps."""
    queue = BlockQueue(10_000, describe)
    fill(queue, [2])
    fill(queue, [3], size=6000)
    drain(queue, 2)
    assert queue.mark_synced() == 0  # too large to be kept
    fill(queue, [3, 4])
    queue.put(QueuedBlock(b"picture", 1, 1, is_picture=True))
    drain(queue, 3)
    queue.restore()
    queue.put(QueuedBlock(b"waiting", 2, 1, is_picture=True))
    written, others = queue.replacements(replaces_bytes=False)
    assert ([block.step for block in written], [block.step for block in others]) == ([4], [3, 1, 2])
    assert [block.step for block in queue.replacements(replaces_bytes=True)[0]] == [3, 4, 1, 2]
    queue.mark_rewritten(written, others, is_clean=False)
    assert queue.dropped == 5 + 1
    assert [block.data for block in queue.head(10_000)] == [b"waiting"]


def test_blocks_after_a_return_to_an_earlier_step_are_all_replaced():
    queue = BlockQueue(10_000, describe)
    fill(queue, range(5))
    drain(queue, 5)
    queue.mark_synced()
    fill(queue, [2, 3])
    drain(queue, 2)
    queue.restore()
    written, others = queue.replacements(replaces_bytes=False)
    assert ([block.step for block in written], others) == ([4, 2, 3], [])


def size(blocks):
    return sum(len(block.data) + 200 for block in blocks)


def values(blocks):
    return sum(block.values for block in blocks)


CALLS = st.one_of(
    st.tuples(
        st.just("put"), st.sampled_from([0, 100, 600, 900]), st.sampled_from([0, 3]), st.sampled_from([0, 1, 1, -2])
    ),
    st.tuples(st.just("picture"), st.sampled_from([100, 600]), st.just(1), st.sampled_from([0, -1, -2])),
    st.tuples(st.just("write"), st.sampled_from([0, 700, 5000])),
    st.tuples(st.sampled_from(["sync", "sync", "restore", "end", "forget"])),
    st.tuples(st.just("rewrite"), st.booleans()),
)


class Lists:
    """A queue beside two lists: of blocks that wait, and of those that are written and kept."""

    def __init__(self):
        self.queue, self.step = BlockQueue(2000, describe), 4
        self.waiting, self.kept, self.every, self.synced = [], [], [], set()
        self.done = self.accepted = self.dropped = self.unsynced = 0
        self.last, self.final, self.lost = -1, -1, None

    def accept(self, block):
        self.every.append(block)  # so that no other block has its id
        self.waiting.append(block)
        self.accepted += 1

    def end_losses(self):
        if self.lost is None:
            return None
        self.accept(QueuedBlock(describe(*self.lost), self.lost[2], 0))
        (number, first, last), self.lost = self.lost, None
        return f"{number} values of steps {first} to {last} are lost"

    def lose(self, block):
        if not block.values:
            return None
        self.dropped += block.values
        number, first, _ = self.lost or (0, block.step, 0)
        is_first, self.lost = self.lost is None, (number + block.values, first, block.step)
        begun = (
            f"writing is too slow, {size(self.waiting)} bytes are waiting; values are lost from step {block.step} on"
        )
        return begun if is_first else None

    def put(self, nbytes, number, further, picture=False):
        self.step += 0 if picture else further
        block = QueuedBlock(b"x" * nbytes, self.step + further * picture, number, picture)
        if self.waiting and size([*self.waiting, block]) > (1000 if self.lost else 2000):
            line = self.lose(block)
        else:
            line = self.end_losses()
            self.accept(block)
        assert self.queue.put(block) == line

    def picture(self, *arguments):
        self.put(*arguments, picture=True)

    def end(self):
        line = self.end_losses()
        assert self.queue.end_losses() == line

    def write(self, nbytes):
        fit = sum(size(self.waiting[: i + 1]) <= nbytes for i in range(len(self.waiting)))
        number = max(fit, min(len(self.waiting), 1))
        head, self.waiting = self.waiting[:number], self.waiting[number:]
        assert [block.data for block in self.queue.head(nbytes)] == [block.data for block in head]
        self.queue.mark_written(self.queue.head(nbytes))
        self.pop(head)
        self.kept, self.unsynced = self.kept + head, self.unsynced + size(head)

    def pop(self, blocks):
        self.done += len(blocks)
        self.last = next((block.step for block in reversed(blocks) if not block.is_picture), self.last)

    def sync(self):
        steps = [(i, block.step) for i, block in enumerate(self.kept) if not block.is_picture]
        others = [i for i, step in steps if step != self.last]
        begin = min((i for i, _ in steps if i > max(others, default=-1)), default=len(self.kept))
        begin = begin if size(self.kept[begin:]) <= 1000 else len(self.kept)
        self.synced |= {*map(id, self.kept)}
        self.final = next((b.step for b in reversed(self.kept[:begin]) if not b.is_picture), self.final)
        self.kept, self.unsynced = self.kept[begin:], 0
        assert self.queue.mark_synced() == sum(len(block.data) for block in self.kept)

    def forget(self):
        self.queue.forget_written()
        self.kept, self.unsynced, self.final = [], 0, self.last

    def restore(self):
        self.queue.restore()
        self.waiting, self.done = self.kept + self.waiting, self.done - len(self.kept)
        self.kept, self.unsynced = [], 0
        steps = [block.step for block in self.waiting if not block.is_picture]
        first = min((step for step in steps if step > self.final or min(steps) < self.final), default=math.inf)
        parts = [[b.data for b in self.waiting if (b.step >= first) is is_new] for is_new in (True, False)]
        found = self.queue.replacements(replaces_bytes=False)
        assert [[block.data for block in part] for part in found] == parts
        every, others = self.queue.replacements(replaces_bytes=True)
        assert ([block.data for block in every], others) == ([block.data for block in self.waiting], [])
        return found

    def rewrite(self, is_clean):
        written, others = self.restore()
        again = [block for block in others if is_clean or not block.is_written]
        self.dropped += values(b for b in others if b.is_written and not is_clean and id(b) not in self.synced)
        self.queue.mark_rewritten([*written], others, is_clean)
        self.pop(self.waiting)
        self.last = next((block.step for block in reversed(written) if not block.is_picture), self.last)
        self.waiting, self.kept, self.done = again, written, self.done - len(again)
        self.every += written  # the queue's own reports of losses

    def check(self):
        queue = self.queue
        assert (bool(queue), queue.nbytes, queue.unsynced) == (bool(self.waiting), size(self.waiting), self.unsynced)
        counts = queue.done, queue.accepted, queue.dropped, queue.last_step
        assert counts == (self.done, self.accepted, self.dropped, self.last)
        missing = [b.step - 1 for b in self.waiting if b.values and id(b) not in self.synced]
        assert queue.acked_step == min([self.last, *missing])


@given(st.lists(CALLS, max_size=60))
def test_a_queue_is_two_lists(calls):
    lists = Lists()
    for call, *arguments in calls:
        getattr(lists, call)(*arguments)
        lists.check()
    lost = values(block for block in lists.waiting if id(block) not in lists.synced)
    assert lists.queue.abandon() == lost
    assert (bool(lists.queue), lists.queue.nbytes, lists.queue.dropped) == (False, 0, lists.dropped + lost)
