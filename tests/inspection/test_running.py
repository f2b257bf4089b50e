"""Running moments: exact merges, empty and single groups, weights, ranks."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.running import RunningMoments, combine_mean_std


def moments(values, **options):
    return RunningMoments(**options).update(values)


def test_two_groups_merge_to_the_moments_of_all_elements():
    """E21."""
    merged = moments([1, 2, 3, 4]).merge(moments([10, 20, 30]))
    assert (merged.n, merged.mean, merged.m2) == (7, 10.0, 730.0)
    assert merged.std == pytest.approx(11.030261405182864, rel=1e-12)
    population = moments([1, 2, 3, 4], correction=0) + moments([10, 20, 30], correction=0)
    assert population.std == pytest.approx(10.212037714663724, rel=1e-12)


def test_combining_means_and_deviations():
    """E22."""
    mean, std, n = combine_mean_std(2.5, 1.2909944487358056, 4, 20, 10, 3)
    assert (mean, n) == (10.0, 7)
    assert std == pytest.approx(11.030261405182864, rel=1e-12)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_and_tree_gives_the_same(order):
    """E23."""
    groups = [[1, 2, 3, 4], [10, 20, 30], [5, 5]]
    a, b, c = (moments(groups[i]) for i in order)
    for merged in ((a + b) + c, a + (b + c)):
        assert merged.n == 9
        assert merged.mean == pytest.approx(8.88888888888889, rel=1e-12)
        assert merged.var == pytest.approx(96.1111111111111, rel=1e-12)
        assert merged.std == pytest.approx(9.803627446568495, rel=1e-12)


def test_groups_of_one_have_no_deviation_to_read():
    """E24."""
    merged = moments([3]) + moments([7])
    assert (merged.mean, merged.std) == (5.0, pytest.approx(2.8284271247461903))
    assert combine_mean_std(3, math.nan, 1, 7, math.nan, 1) == (5.0, pytest.approx(2.8284271247461903), 2)


@pytest.mark.parametrize(("mean", "std"), [(math.nan, math.nan), (2.0, 2.0), (math.inf, 5.0)])
def test_an_empty_group_changes_nothing(mean, std):
    """E25."""
    expected = (2.5, pytest.approx(1.2909944487358056), 4)
    assert combine_mean_std(2.5, 1.2909944487358056, 4, mean, std, 0) == expected
    assert combine_mean_std(mean, std, 0, 2.5, 1.2909944487358056, 4) == expected
    assert (moments([1, 2, 3, 4]) + RunningMoments()).std == pytest.approx(1.2909944487358056)


def test_one_and_no_element():
    """E26."""
    assert moments([7]).mean == 7.0
    assert math.isnan(moments([7]).std)
    assert moments([7], correction=0).std == 0.0
    nothing = moments([])
    assert nothing.n == 0
    assert all(math.isnan(value) for value in (nothing.mean, nothing.std, nothing.min, nothing.max))
    mean, std, n = combine_mean_std(math.nan, math.nan, 0, math.nan, math.nan, 0)
    assert math.isnan(mean)
    assert math.isnan(std)
    assert n == 0


@pytest.mark.parametrize("offset", [0, 1e6, 1e8, 1e9, 1e12])
def test_a_large_mean_does_not_cancel(offset):
    """E27."""
    merged = moments(np.array([4.0, 7]) + offset) + moments(np.array([13.0, 16]) + offset)
    assert merged.var == pytest.approx(30.0, abs=1e-9)


def test_rows_of_an_array():
    """E29."""
    running = RunningMoments()
    for row in np.arange(12).reshape(3, 4):
        running.update(row)
    assert (running.mean, running.m2, running.var) == (5.5, 143.0, 13.0)
    assert running.std == pytest.approx(3.605551275463989)


def test_one_state_per_position():
    """E30."""
    running = RunningMoments(per_element=True)
    for row in ([1, 2], [3, 6], [5, 1]):
        running.update(row)
    assert running.mean.tolist() == [3.0, 3.0]
    assert running.std.tolist() == pytest.approx([2.0, 2.6457513110645907])
    assert running.n.tolist() == [3, 3]
    with pytest.raises(ConfigError, match="one shape"):
        running.update([1, 2, 3])


def test_ranks_folded_in_order():
    """E31, without processes."""
    ranks = [np.arange(5), [10, 11, 12], [], [100]]
    for correction, expected in ((1, 1015.3611111111112), (0, 902.5432098765433)):
        total = RunningMoments(correction)
        for rank in ranks:
            total += moments(rank, correction=correction)
        assert total.n == 9
        assert total.mean == pytest.approx(15.88888888888889)
        assert total.var == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "correction", "variance"),
    [
        ("frequency", 0, 1.472222222222222),
        ("frequency", 1, 1.7666666666666664),
        ("reliability", 1, 2.4090909090909087),
        ("reliability", 0, 1.472222222222222),
    ],
)
def test_kinds_of_weights(weights, correction, variance):
    """E32."""
    whole = RunningMoments(correction, weights=weights).update([1, 2, 4], [1, 2, 3])
    parts = RunningMoments(correction, weights=weights).update([1], [1]).update([2, 4], [2, 3])
    for running in (whole, parts):
        assert running.mean == pytest.approx(2.8333333333333335)
        assert running.var == pytest.approx(variance)


def test_weights_need_an_option():
    with pytest.raises(TypeError, match="weights"):
        RunningMoments().update([1, 2], [1, 1])
    with pytest.raises(TypeError, match="weights"):
        RunningMoments(weights="frequency").update([1, 2])


def test_small_integers_do_not_overflow():
    """E34."""
    running = moments(torch.full((1000,), 255, dtype=torch.uint8))
    assert (running.mean, running.std) == (255.0, 0.0)


def test_nonfinite_elements_are_counted_and_propagate_or_not():
    """E35."""
    running = moments([1, math.inf])
    assert (running.mean, running.n_nonfinite, running.max, running.min) == (math.inf, 1, math.inf, 1.0)
    assert math.isnan(running.var)
    omitted = moments([1, 3, math.inf, math.nan], nan="omit")
    assert (omitted.mean, omitted.n, omitted.n_nonfinite, omitted.max) == (2.0, 2, 2, 3.0)
    assert math.isnan(moments([1, math.nan]).mean)
    assert math.isnan((moments([math.inf]) + moments([-math.inf])).mean)


def test_a_saved_state_continues_where_it_was():
    """E37."""
    whole = moments([1.0, 2, 3]).update([9.0])
    first = moments([1.0, 2, 3])
    second = RunningMoments(0)
    second.load_state_dict(first.state_dict())
    first.update([100.0])  # the state was copied
    second.update([9.0])
    assert (second.n, second.mean, second.std, second.min) == (whole.n, whole.mean, whole.std, whole.min)


def test_a_stream_in_growing_chunks():
    """E38."""
    values, running, start = np.random.default_rng(0).normal(3, 2, 1000), RunningMoments(), 0
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        running.update(values[start : start + size])
        start += size
    assert running.mean == pytest.approx(2.903943446474026, rel=1e-12)
    assert running.std == pytest.approx(1.9544834108522946, rel=1e-12)
    assert (running.min, running.max) == pytest.approx((-4.798843460108678, 9.132073478097794), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=6), min_size=1, max_size=6), st.randoms())
def test_merging_is_associative_and_commutative(groups, chance: random.Random):
    expected = np.concatenate([np.array(group, dtype=float) for group in groups])
    parts = [moments(group) for group in groups]
    chance.shuffle(parts)
    while len(parts) > 1:
        parts.append(parts.pop(0) + parts.pop(0))
    assert parts[0].n == expected.size
    if expected.size > 1:
        assert parts[0].mean == pytest.approx(expected.mean(), rel=1e-9, abs=1e-6)
        assert parts[0].var == pytest.approx(expected.var(ddof=1), rel=1e-9, abs=1e-6)


def test_a_loop_over_batches_gives_the_exact_deviation():
    """The blog's own loop feeds population deviations; with ``correction=1`` throughout the result is exact."""
    rng, total, everything = np.random.default_rng(0), (math.nan, math.nan, 0), []
    for _ in range(10):
        x = rng.integers(0, 100, rng.integers(1, 100))
        std = x.std(ddof=1) if len(x) > 1 else math.nan
        total = combine_mean_std(*total, x.mean(), std, len(x))
        everything.append(x)
    true = np.concatenate(everything)
    assert total == (pytest.approx(true.mean()), pytest.approx(true.std(ddof=1)), len(true))


def _rank(rank, size, path, queue):
    torch.distributed.init_process_group("gloo", f"file://{path}", rank=rank, world_size=size)
    parts = [np.arange(5), [10, 11, 12], [], [100]]
    running = moments(parts[rank]).all_reduce()
    queue.put((running.n, running.mean, running.var))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_rank_ends_with_the_same(tmp_path):
    """E31."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(r, 4, tmp_path / "store", queue)) for r in range(4)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert len(set(results)) == 1
    assert results[0] == (9, pytest.approx(15.88888888888889), pytest.approx(1015.3611111111112))


def test_without_a_process_group_nothing_happens():
    assert moments([1, 2]).all_reduce().n == 2


def test_complex_numbers_count_by_their_magnitudes():
    for values in (torch.tensor([3 + 4j, 0j]), np.array([3 + 4j, 0])):
        found = moments(values)
        assert (found.mean, found.max) == (2.5, 5)


def test_the_extremes_of_a_group_known_by_its_moments_are_unknown():
    group = RunningMoments.from_moments(0.0, 1.0, 100)
    assert all(
        math.isnan(x) for x in (group.min, group.max, (group + moments([5.0])).max, (group + moments([math.inf])).min)
    )
