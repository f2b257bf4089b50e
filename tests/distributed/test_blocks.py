"""Blocks and their merge in one process: numbers against numpy, replicas, shards and missing rows."""

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ikkuna.distributed import merge as merge_module
from ikkuna.distributed.block import OWN, Gather, Layouts, RankBlock, RankRows, build
from ikkuna.distributed.merge import Alignment, Alignments, merge_blocks
from ikkuna.numerics.statistics import Record, needed_fields
from ikkuna.numerics.statistics.host import HostStatistics, measure
from ikkuna.numerics.statistics.record import record_of
from ikkuna.numerics.statistics.table import merge_rows

STAMP = (3, 1, 2, "training")
EVERYTHING = needed_fields(("m4", "min", "max", "l1", "sumsq", "zeros", "codes"))


@dataclass
class Row:
    """One row of a rank, as the tests write it; `values` are its elements."""

    values: list
    name: str = "fc"
    part: int = OWN
    fields: frozenset = EVERYTHING
    own: tuple = ()
    kind: str = "activations"
    reduction: str = ""


@dataclass
class Merged:
    """One row of all ranks."""

    record: Record
    own: dict
    ranks: tuple


row = Row


def rows_of(rows):
    statistics = HostStatistics()
    for i, one in enumerate(rows):
        statistics.add(i, torch.as_tensor(one.values, dtype=torch.float64), one.fields)
    values, codes = statistics.take(len(rows))
    return RankRows(
        [(one.kind, one.name, "") for one in rows],
        [one.part for one in rows],
        [one.fields for one in rows],
        values,
        {i: {name: counts.numpy() for name, counts in found.items()} for i, found in codes.items()},
        {i: one.reduction for i, one in enumerate(rows) if one.reduction},
        [(i, *own) for i, one in enumerate(rows) for own in one.own],
    )


def merged(*ranks, groups=None, per_rank=()):
    """Return the merged rows of ranks by name, after packing and unpacking."""
    groups = groups or range(len(ranks))
    payloads = [
        build(STAMP, rows_of(rows), group, layouts := Layouts()).pack(layouts)
        for rows, group in zip(ranks, groups, strict=True)
    ]
    return {name: merged_row(found, i) for i, name, found in unpacked(payloads, per_rank)}


def unpacked(payloads, per_rank):
    known = Layouts()
    blocks = [RankBlock.unpack(rank, payload, known) for rank, payload in enumerate(payloads)]
    found = merge_blocks(blocks, Alignments(), per_rank)
    return [(i, name, found) for i, (_, name, _) in enumerate(found.keys)]


def merged_row(found, i):
    record = record_of(found.values[i], EVERYTHING)
    for name, counts in found.codes.get(i, {}).items():
        setattr(record, name, counts)
    ranks = [None if values is None else record_of(values, EVERYTHING) for values in found.ranks.get(i, ())]
    return Merged(record, found.own.get(i, {}), tuple(ranks))


PARTS = {
    "uneven": ([1.0, 2.5, -3.0], [4.0], [0.0, 0.5, 7.0, -1.0]),
    "an empty one": ([1.0, 2.0], [], [5.0]),
    "a large offset": ([1e6 + 1, 1e6 + 2], [1e6 + 3.5], [1e6]),
    "one of one element": ([2.0], [2.0], [2.0]),
    "all zero": ([0.0, 0.0], [0.0], [0.0]),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_merged_statistics_agree_with_numpy(parts):
    record = merged(*([row(part)] for part in parts))["fc"].record
    x = np.concatenate([np.asarray(part, float) for part in parts])
    assert record.n == len(x)
    assert record.mean == pytest.approx(x.mean(), rel=1e-14)
    assert record.variance() == pytest.approx(x.var(), rel=1e-9, abs=1e-300)
    assert record.l2_norm == pytest.approx(np.linalg.norm(x), rel=1e-12)
    assert (record.l1_norm, record.min, record.max) == (pytest.approx(np.abs(x).sum()), x.min(), x.max())
    assert record.zeros == (x == 0).sum()
    if x.var():
        assert record.skewness == pytest.approx(stats.skew(x), rel=1e-6, abs=1e-9)
        assert record.kurtosis == pytest.approx(stats.kurtosis(x), rel=1e-6)
    assert np.array_equal(record.codes, measure(torch.from_numpy(x), EVERYTHING).codes)


def test_rows_without_elements_merge_to_one_without_elements():
    record = merged([row([])], [row([])])["fc"].record
    assert record.n == 0
    assert math.isnan(record.mean)
    assert math.isnan(record.min)


def test_a_row_without_elements_is_in_no_table():
    rows = rows_of([row([], own=[("mine", "sum", OWN, np.ones(2))]), row([1.0], "other")])
    block = build(STAMP, rows, 0, Layouts())
    assert [table.rows for table in block.layout.tables] == [(1,)]
    assert block.own.tolist() == [1, 1]


def test_elements_that_are_not_finite_are_counted():
    record = merged([row([1.0, math.nan])], [row([3.0, -math.inf])], [row([math.nan])])["fc"].record
    assert (record.n, record.nans, record.infs, record.count) == (5, 2, 1, 2)
    assert math.isnan(record.mean)
    record.finite_only = True
    assert (record.mean, record.variance(), record.l2_norm) == (2.0, 1.0, pytest.approx(math.sqrt(10)))


def test_counts_are_exact_where_floats_are_not():
    big = np.array([[2**52 + 1.0, 0, 0, 2**52 + 1.0, *[0.0] * 10]])
    small = np.array([[1.0, 0, 0, 1.0, *[0.0] * 10]])
    record = record_of(merge_rows(np.stack([big, small]))[0], EVERYTHING)
    assert (record.n, record.zeros) == (2**52 + 2, 2**52 + 2)


def test_ranks_that_have_the_same_part_count_once():
    """Replicas: the first rank's row alone; shards: each once, on however many ranks."""
    ranks = [[row([1.0], part=0)], [row([9.0], part=1)], [row([1.5], part=0)], [row([8.0], part=1)]]
    assert merged(*ranks)["fc"].record.mean == 5.0
    assert merged(*ranks)["fc"].record.n == 2


def test_equal_rows_of_a_group_are_replicas_and_others_slices():
    same, other = row([1.0, 2.0]), row([1.0, 2.0, 3.0])
    found = merged([same], [same], [other], [other], groups=(0, 0, 2, 2))["fc"]
    assert found.record.n == 5
    assert merged([same], [other], groups=(0, 0))["fc"].record.n == 5
    assert merged([same], [same])["fc"].record.n == 4, "no group: data of its own"


@pytest.mark.fault(217)
def test_an_activation_that_does_not_depend_on_the_data_counts_once():
    """Such as the embedding of positions, which every rank computes; it is recognised where other activations differ."""
    positions = [("mine", "sum", OWN, np.array([7.0]))]
    first = [row([1.0, 2.0], "positions", own=positions), row([1.0, 5.0], "fc")]
    second = [row([1.0, 2.0], "positions", own=positions), row([3.0], "fc")]
    found = merged(first, second)
    assert found["positions"].record.n == 2
    assert found["positions"].own["mine"].tolist() == [7]
    assert found["fc"].record.n == 3
    alike = merged(first, first)
    assert alike["positions"].record.n == 4, "the same data on both ranks"
    assert alike["positions"].own["mine"].tolist() == [14]
    three = merged(first, second, [row([9.0], "fc")])
    assert three["positions"].record.n == 2, "a rank without it"


def test_slices_with_equal_numbers_of_elements_differ_by_their_histograms():
    fields = needed_fields(("codes",))
    a, b = row([1.0, 2.0], fields=fields), row([3.0, 4.0], fields=fields)
    assert merged([a], [b], groups=(0, 0))["fc"].record.codes.sum() == 4
    assert merged([a], [a], groups=(0, 0))["fc"].record.codes.sum() == 2


def test_ranks_may_have_different_rows():
    found = merged([row([1.0], "a"), row([2.0], "b")], [row([3.0], "c"), row([4.0], "b")])
    assert list(found) == ["a", "b", "c"], "those of rank 0 first"
    assert [one.record.n for one in found.values()] == [1, 2, 1]
    assert found["b"].record.mean == 3.0


def test_rows_of_different_fields_are_in_different_tables():
    found = merged(
        [row([1.0], "a"), row([2.0], "b", fields=needed_fields(("sumsq",)))],
        [row([3.0], "b", fields=needed_fields(("sumsq",)))],
    )
    assert found["a"].record.mean == 1.0
    assert found["b"].record.sumsq == 13.0
    assert found["b"].record.l1 == 0, "not measured"


@pytest.mark.parametrize(
    ("merge", "expected"), {"sum": [6, 60], "min": [1, 10], "max": [3, 30], "last": [3, 30]}.items()
)
def test_results_of_subscribers_merge_as_declared(merge, expected):
    rows = ([1.0, 10.0], [2.0, 20.0], [3.0, 30.0])
    ranks = [[row([0.0], own=[("mine", merge, OWN, np.array(values))])] for values in rows]
    assert merged(*ranks)["fc"].own["mine"].tolist() == expected
    first = [[row([0.0], own=[("mine", merge, 0, np.array(values))])] for values in rows]
    assert merged(*first)["fc"].own["mine"].tolist() == [1, 10], "replicas"


def test_results_of_another_shape_are_ignored():
    ranks = [[row([0.0], own=[("mine", "sum", OWN, np.ones(shape))])] for shape in (2, 3, 2)]
    assert merged(*ranks)["fc"].own["mine"].tolist() == [2, 2]


def test_rows_of_each_rank_are_kept_on_request():
    ranks = [row([1.0])], [row([2.0, 4.0], "other")], [row([5.0])]
    key = ("activations", "fc", "")
    first, second, third = merged(*ranks, per_rank=(key,))["fc"].ranks
    assert (first.mean, second, third.mean) == (1.0, None, 5.0)
    assert merged(*ranks)["fc"].ranks == ()


# -- any ranks, against a merge of their elements

FIELDS = {"a": EVERYTHING, "b": EVERYTHING, "w": EVERYTHING, "plain": needed_fields(("m4", "min", "max", "zeros"))}
KINDS = {"w": "weights"}
REDUCTIONS = {"plain": "sum"}
ELEMENTS = st.sampled_from([[], [0.5], [1.0, 2.0], [1.0, 2.0], [-4.0, 0.0, 3.0]])
RESULTS = st.none() | st.tuples(st.sampled_from([OWN, OWN, 0, 1]), st.sampled_from([[1.0, 10.0], [7.0, -2.0]]))
RANK = st.fixed_dictionaries(
    {}, optional={name: st.tuples(st.sampled_from([OWN, OWN, OWN, 0, 1]), ELEMENTS, RESULTS) for name in FIELDS}
)
RANKS = st.lists(st.tuples(st.integers(0, 2), RANK), min_size=1, max_size=4)
HOW = {"a": "sum", "b": "sum", "w": "sum", "plain": "last"}
MERGES = {"sum": np.sum, "last": lambda found, axis: found[-1]}


def counting(found, groups, is_activation, data_differ):
    """Return the ranks that count in a row: `found` has part and numbers of each rank that has it."""
    parts = {}
    for rank, (part, _) in found.items():
        parts.setdefault(rank if part == OWN else ("part", part), rank)
    ranks = set(parts.values())
    for group in groups:
        numbers = [found[rank][1] for rank in group if rank in ranks and found[rank][0] == OWN]
        if len(numbers) == len(group) and all(each == numbers[0] for each in numbers):
            ranks -= {*group[1:]}
    numbers = [found[rank][1] for rank in sorted(ranks)]
    is_own = all(found[rank][0] == OWN for rank in ranks)
    if ranks and is_activation and data_differ and is_own and all(each == numbers[0] for each in numbers):
        ranks = {min(ranks)}
    return sorted(ranks)


@settings(max_examples=60)
@given(ranks=RANKS, at_once=st.sampled_from([1, 1 << 21]))
def test_the_merge_of_any_ranks_is_that_of_the_elements_that_count(ranks, at_once):
    groups = {}
    for rank, (group, _) in enumerate(ranks):
        groups.setdefault(group, []).append(rank)
    first_of_group = {group: members[0] for group, members in groups.items()}
    several = [members for members in groups.values() if len(members) > 1]
    rows = [
        [
            row(
                elements,
                name,
                part,
                FIELDS[name],
                () if own is None else [("mine", HOW[name], own[0], np.array(own[1]))],
                KINDS.get(name, "activations"),
                REDUCTIONS.get(name, ""),
            )
            for name, (part, elements, own) in found.items()
        ]
        for _, found in ranks
    ]
    known, layouts = Layouts(), [Layouts() for _ in ranks]
    payloads = [
        build(STAMP, rows_of(own), first_of_group[group], layout).pack(layout)
        for (group, _), own, layout in zip(ranks, rows, layouts, strict=True)
    ]
    blocks = [RankBlock.unpack(rank, payload, known) for rank, payload in enumerate(payloads)]
    keys = {(KINDS.get(name, "activations"), name, ""): name for name in ("b", "w")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "_AT_ONCE", at_once)
        found = merge_blocks(blocks, Alignments(), keys)
    assert [name for _, name, _ in found.keys] == [*dict.fromkeys(name for _, each in ranks for name in each)]

    def those(name, i):
        """Return part and numbers of the ranks that have the statistics (1) or the own result (2) of a row."""
        every = {rank: each[name] for rank, (_, each) in enumerate(ranks) if name in each}
        if i == 1:
            return {rank: (part, elements) for rank, (part, elements, _) in every.items() if elements}
        return {rank: own for rank, (*_, own) in every.items() if own is not None}

    def differs(name):
        own = {rank: elements for rank, (part, elements) in those(name, 1).items() if part == OWN}
        return len({tuple(elements) for elements in own.values()}) > 1

    data_differ = any(differs(name) for name in FIELDS if name not in KINDS)
    for i, (kind, name, _) in enumerate(found.keys):
        is_activation = kind == "activations"
        stored = those(name, 1)
        elements = [x for rank in counting(stored, several, is_activation, data_differ) for x in stored[rank][1]]
        merged_one = merged_row(found, i).record
        assert merged_one.n == len(elements)
        if elements:
            expected = measure(torch.tensor(elements, dtype=torch.float64), EVERYTHING)
            assert (merged_one.center, merged_one.m2) == (pytest.approx(expected.center), pytest.approx(expected.m2))
            assert (merged_one.min, merged_one.zeros) == (expected.min, expected.zeros)
            if "codes" in FIELDS[name]:
                assert np.array_equal(merged_one.codes, expected.codes)
        assert found.reductions.get(i, "") == (REDUCTIONS.get(name, "") if stored else "")
        results = those(name, 2)
        if results:
            used = [results[rank][1] for rank in counting(results, several, is_activation, data_differ)]
            assert found.own[i]["mine"].tolist() == MERGES[HOW[name]](np.array(used), axis=0).tolist()
        else:
            assert found.own.get(i, {}) == {}
        if (kind, name, "") in keys and stored:
            numbers = [None if each is None else each.n for each in merged_row(found, i).ranks]
            assert numbers == [len(stored[rank][1]) if rank in stored else None for rank in range(len(ranks))]
        else:
            assert i not in found.ranks


def test_results_are_kept_by_ranks_with_their_parts_on_request():
    def own(part, *values):
        return [("mine", "ranks", part, np.array(values))]

    other = row([0.0], "other", own=own(OWN, 9.0, 9.0, 9.0))
    ranks = [[other, row([0.0], own=own(3, 1.0, 10.0))], [row([0.0])], [row([0.0], own=own(OWN, 2.0, 20.0)), other]]
    table = merged(*ranks)["fc"].own["mine"]
    np.testing.assert_equal(table, [[3.0, 1.0, 10.0], [np.nan] * 3, [OWN, 2.0, 20.0]])


def test_the_groups_of_an_alignment_are_those_of_several_ranks():
    layouts = [build(STAMP, rows_of([row([1.0])]), group, Layouts()).layout for group in (0, 1, 0, 3, 1, 5)]
    assert [ranks.tolist() for ranks in Alignment(layouts).groups] == [[0, 2], [1, 4]]


def test_the_last_16_alignments_are_kept_those_that_were_used_last():
    layouts = [build(STAMP, rows_of([row([1.0], f"layer{i}")]), 0, Layouts()).layout for i in range(18)]
    known = Alignments()
    first = [known.of([layout]) for layout in layouts[:16]]
    assert [known.of([layout]) for layout in layouts[:16]] == first
    assert known.of(layouts[:1]) is first[0]
    known.of(layouts[16:17])
    assert known.of(layouts[:1]) is first[0]
    assert known.of(layouts[2:3]) is first[2]
    assert known.of(layouts[1:2]) is not first[1]


def test_a_layout_is_sent_once_and_forgotten_on_both_sides():
    ours, theirs = Layouts(), Layouts()
    sizes = []
    for i in [*range(40), 39, 0]:
        block = build(STAMP, rows_of([row([float(i)], f"layer{i}")]), 0, ours, skipped=True)
        packed = block.pack(ours)
        sizes.append(len(packed))
        found = RankBlock.unpack(5, packed, theirs)
        assert (found.stamp, found.skipped, found.layout.keys[0][1]) == (STAMP, True, f"layer{i}")
        assert found.values[0].tolist() == block.values[0].tolist()
    assert sizes[40] < sizes[39], "known already"
    assert sizes[41] > sizes[40], "forgotten"


def test_a_layout_that_was_not_sent_is_an_error():
    layouts = Layouts()
    block = build(STAMP, rows_of([row([1.0])]), 0, layouts)
    block.pack(layouts)
    with pytest.raises(KeyError):
        RankBlock.unpack(0, block.pack(layouts), Layouts())


@pytest.fixture
def alone():
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    gather = Gather(group, 1)
    yield gather
    gather.close()


def test_blocks_grow_with_the_payload_and_shrink_again(alone):
    assert alone.is_idle
    for payload in (b"small", b"x" * 100_000):
        alone.begin(payload)
        assert [bytes(found) for found in alone.poll(5.0)] == [payload]
    assert alone.block == 1 << 17
    for _ in range(16):
        alone.begin(b"small")
        alone.poll(5.0)
    assert alone.block == 1 << 12
