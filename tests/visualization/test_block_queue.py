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
