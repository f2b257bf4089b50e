"""Statistics of several tensors as arrays equal the records of the single tensors."""

import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics import FIELDS, HISTOGRAMS, Record, needed_fields
from ikkuna.numerics.statistics.host import HostStatistics, measure
from ikkuna.numerics.statistics.record import Records, merge, record_of
from ikkuna.numerics.statistics.table import COLUMN, EMPTY, row_of, rows_of

PROPERTIES = (
    *("n", "count", "nonfinite", "mean", "skewness", "kurtosis", "rms", "sparsity", "l0_norm", "l1_norm", "l2_norm"),
    *("linf_norm", "min", "max", "finite_min", "finite_max", "m2", "m3", "m4", "l1", "sumsq", "zeros", "nans", "infs"),
)
TENSORS = (
    *([3.0, -4.0, 0.0], [1.5], [2.0, 2.0, 2.0], [0.0, 0.0], [1e200, -1e200], [1e-300, 0.0], [0.1, 0.2, 0.7, -3.0]),
    *([math.nan, 1.0], [math.inf, 1.0, 2.0], [math.nan], [math.inf, -math.inf], [math.nan, math.inf, 0.0]),
)


def table_of(tensors, fields):
    statistics = HostStatistics()
    for row, values in enumerate(tensors):
        statistics.add(row, torch.tensor(values, dtype=torch.float64), fields)
    return statistics


@pytest.mark.parametrize("finite_only", [False, True])
@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[:7], TENSORS[7:8]], ids=["mixed", "finite", "one"])
def test_each_property_equals_that_of_the_records(tensors, finite_only):
    fields = needed_fields(set(FIELDS) - HISTOGRAMS)
    statistics = table_of(tensors, fields)
    records = Records(statistics.values[: len(tensors)], fields, finite_only)
    for i in range(len(tensors)):
        own = statistics.record(i, fields)
        own.finite_only = finite_only
        assert records[i].finite_only == finite_only
        with np.errstate(all="ignore"):
            for name in PROPERTIES:
                np.testing.assert_equal(getattr(records, name)[i], float(getattr(own, name)), err_msg=f"{name} of {i}")
            for correction in (0, 1):
                np.testing.assert_equal(records.variance(correction)[i], own.variance(correction))


def test_records_of_numbers_equal_those_of_single_numbers():
    values = [0.0, -0.5, 3.0, math.nan, math.inf, -math.inf, 1e300]
    np.testing.assert_array_equal(rows_of(np.array(values)), [row_of(value) for value in values])
    records = Records.of(np.array(values))
    for i, value in enumerate(values):
        for name in ("mean", "l2_norm", "min", "n", "nonfinite"):
            np.testing.assert_equal(getattr(records, name)[i], float(getattr(Record.of(value), name)))


def test_a_field_that_was_not_measured_is_an_error():
    records = Records(rows_of(np.array([1.0, 2.0])), needed_fields(["sumsq"]))
    assert records.l2_norm.tolist() == [1.0, 2.0]
    for name in ("mean", "max", "zeros", "sparsity"):
        with pytest.raises(ConfigError, match="was not measured"):
            getattr(records, name)
    with pytest.raises(ConfigError, match="'nans' and 'infs' were not measured"):
        _ = Records(rows_of(np.array([1.0])), needed_fields(["min"])).nonfinite


def test_elements_that_are_not_finite_count_for_those_who_do_not_read_their_number():
    """Subscribers of other fields share the table."""
    table = rows_of(np.array([math.nan, math.inf, 1.0]))
    assert Records(table, needed_fields(["min"])).count.tolist() == [1, 1, 1]
    assert Records(table, needed_fields(["mean"])).count.tolist() == [0, 0, 1]
    assert Records(table, needed_fields(["mean"]), is_finite=True).count.tolist() == [1, 1, 1]


@pytest.mark.parametrize("values", [[0.0, -0.0], [-0.0], [0.0]])
def test_the_largest_magnitude_of_zeros_is_a_positive_zero(values):
    statistics, fields = table_of([values], frozenset(COLUMN)), frozenset(COLUMN)
    found = Records(statistics.values[:1], fields).linf_norm
    assert (found[0], np.signbit(found[0])) == (0.0, False)


@pytest.mark.parametrize("names", [(), ("codes",), ("sampled_codes",), ("codes", "sampled_codes")])
def test_the_records_of_one_record_have_its_histograms(names):
    record = Record.of(2.0)
    for i, name in enumerate(names):
        setattr(record, name, np.arange(i, i + 3))
    records = Records.of_record(record)
    assert records.fields == frozenset((*COLUMN, *names))
    assert {name: counts[0].tolist() for name, counts in records.counts.items()} == {
        name: [i, i + 1, i + 2] for i, name in enumerate(names)
    }
    assert records[0].mean == 2.0
    for name in HISTOGRAMS - {*names}:
        with pytest.raises(ConfigError, match=f"'{name}' was not measured"):
            getattr(records, name)


@pytest.mark.parametrize("name", ["mean", "m2", "m3", "m4"])
def test_a_moment_that_exceeds_float64_is_infinite(name):
    """Sums of opposite infinite terms are NaN in a table, in which only elements that are NaN are counted as such."""
    row = row_of(1.0)
    row[COLUMN[name]] = math.nan
    assert getattr(record_of(row, frozenset([name])), {"mean": "center"}.get(name, name)) == math.inf


def test_the_records_of_ranks_are_those_of_their_rows():
    rows = [row_of(2.0), None, row_of(5.0)]
    records = Records(rows_of(np.array([3.5])), frozenset(COLUMN), ranks=[rows])
    assert records[0].ranks == (Record.of(2.0), None, Record.of(5.0))


@pytest.mark.parametrize("count", [0, 1, 64, 65, 128, 129, 500])
def test_as_many_rows_are_taken_as_are_requested(count):
    statistics, fields = HostStatistics(), needed_fields(["mean"])
    statistics.add(0, torch.tensor([3.0]), fields)
    assert [record_of(row, fields).n for row in statistics.take(count)[0]] == [1, *[0] * count][:count]


def test_selected_records_keep_their_fields():
    records = Records.of(np.array([1.0, math.nan, 3.0]))
    assert records.select(np.array([2, 0])).mean.tolist() == [3.0, 1.0]
    assert math.isnan(records.l1_norm[1])
    finite = Records(records.table, records.fields, finite_only=True)
    assert finite.l1_norm.tolist() == [1.0, 0.0, 3.0]
    assert finite.select(np.array([1])).finite_only


def properties_of(x, finite_only):
    """Return the properties of an array by their definitions."""
    f = x[np.isfinite(x)]
    n, k = len(x), len(f)
    is_unknown = k < n and not finite_only
    d = f - (f.mean() if k else 0.0)
    m2, m3, m4 = (float((d**power).sum()) for power in (2, 3, 4))
    of_all = {
        "n": n,
        "count": k,
        "nonfinite": n - k,
        "zeros": int((x == 0).sum()),
        "nans": int(np.isnan(x).sum()),
        "infs": int(np.isinf(x).sum()),
        "sparsity": (x == 0).sum() / n if n else math.nan,
        "min": x.min() if n else math.nan,
        "max": x.max() if n else math.nan,
        "finite_min": f.min() if k else math.nan,
        "finite_max": f.max() if k else math.nan,
    }
    screened = {
        "mean": f.mean() if k else math.nan,
        "skewness": k**0.5 * m3 / m2**1.5 if m2 > 0 else math.nan,
        "kurtosis": k * m4 / m2**2 - 3 if m2 > 0 else math.nan,
        "l0_norm": (f != 0).sum(),
        "l1_norm": abs(f).sum(),
        "l2_norm": (f * f).sum() ** 0.5,
        "linf_norm": abs(f).max() if k else math.nan,
        "rms": (f * f).mean() ** 0.5 if k else math.nan,
        "variance": m2 / k if k else math.nan,
        "variance of a sample": m2 / (k - 1) if k > 1 else math.nan,
    }
    return of_all | {name: math.nan if is_unknown else value for name, value in screened.items()}


@pytest.mark.parametrize("finite_only", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_each_property_is_that_of_its_definition(finite_only, alone):
    """The first tensors are finite, so that no column needs to be screened, unless the others are in the same table."""
    tensors = [*([3.0, -4.0, 0.0], [1.5], [2.0, 2.0], [0.0, 0.0], [-0.1, -0.2, -0.7, 3.0], [0.25, 0.5, 0.75]), []]
    tensors += [] if alone else TENSORS[7:]
    fields = needed_fields(set(FIELDS) - HISTOGRAMS)
    statistics = table_of(tensors, fields)
    records = Records(statistics.values[: len(tensors)], fields, finite_only)
    assert records.is_finite is alone
    for i, values in enumerate(tensors):
        own = records[i]
        for name, value in properties_of(np.array(values), finite_only).items():
            if name.startswith("variance"):
                correction = int(name != "variance")
                found = [records.variance(correction)[i], own.variance(correction)]
            else:
                found = [getattr(records, name)[i], getattr(own, name)]
            assert found == pytest.approx([value] * 2, nan_ok=True), (name, values)


@pytest.mark.parametrize("value", [0.0, -0.5, 3.0, math.nan, math.inf, -math.inf])
def test_the_record_of_a_number_is_that_of_a_tensor_with_it(value):
    fields = needed_fields(set(FIELDS) - HISTOGRAMS)
    measured, record = table_of([[value]], fields).record(0, fields), Record.of(value)
    assert record.fields == measured.fields == fields
    for name in PROPERTIES:
        np.testing.assert_equal(getattr(record, name), getattr(measured, name), err_msg=name)


def test_selected_records_keep_their_codes_and_ranks():
    codes, ranks = [np.array([i]) for i in range(3)], [[row_of(float(i)), None] for i in range(3)]
    records = Records(rows_of(np.arange(3.0)), frozenset((*COLUMN, "codes")), counts={"codes": codes}, ranks=ranks)
    chosen = records.select(np.array([2, 0]))
    assert len(chosen) == 2
    assert [each.tolist() for each in chosen.codes] == [[2], [0]]
    assert [chosen[i].codes.tolist() for i in range(2)] == [[2], [0]]
    assert [chosen[i].ranks for i in range(2)] == [(Record.of(2.0), None), (Record.of(0.0), None)]
    assert records.select(np.array([], int)).codes == []
    with pytest.raises(ConfigError, match="'sampled_codes' was not measured"):
        _ = records.sampled_codes


def test_a_merge_needs_elements_and_keeps_the_common_fields():
    assert merge() == Record()
    assert merge(empty := Record(m2=1.0), Record()) is empty
    assert merge(Record(), some := Record(n=1, l1=2.0), Record()) is some
    merged = merge(Record(n=1, l1=2.0, zeros=0, finite_only=True), Record(n=2, l1=3.0), Record(zeros=5))
    assert merged == Record(n=3, l1=5.0, finite_only=True)
    parts = [np.array([1.0, math.nan]), np.array([math.inf, -3.0, 0.0]), np.array([math.nan])]
    fields = needed_fields(set(FIELDS) - HISTOGRAMS)
    table = table_of([*parts, np.concatenate(parts)], fields)
    *records, whole = (table.record(i, fields) for i in range(4))
    found = merge(*records)
    for name in PROPERTIES:
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), err_msg=name)


# -- the table of the host

EVERY = needed_fields(set(FIELDS) - HISTOGRAMS)


@pytest.mark.parametrize("empty", [lambda table: table.take(1), lambda table: table.clear()])
def test_addresses_are_those_of_the_rows_and_a_table_that_was_outgrown_lives_until_the_rows_are_taken(empty):
    table = HostStatistics()
    outgrown, first = weakref.ref(table.values), len(table.values)
    rows = np.array([0, 3, first + 2])
    addresses = table.addresses(rows)
    assert len(table.values) == 2 * first
    assert addresses.tolist() == [table.address(row) for row in rows.tolist()]
    assert table.location.tolist() == [table.values.ctypes.data] == [table.address(0)]
    assert table.addresses(rows[:2]).tolist() == [table.values[row].ctypes.data for row in (0, 3)]
    assert table.address(2 * first - 1) == table.values[-1].ctypes.data
    assert len(table.values) == 2 * first
    table.reserve(2 * first)
    assert len(table.values) == 2 * first
    table.reserve(2 * first + 1)
    assert len(table.values) == 4 * first
    assert outgrown() is not None
    empty(table)
    assert outgrown() is None


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", sorted({*FIELDS} - HISTOGRAMS))
def test_each_field_alone_has_the_value_of_its_definition(name, native):
    for values in ([], [2.0], [1.0, -3.0, 0.0, 4.5], [math.nan, 1.0], [math.inf, -2.0], [-math.inf, math.nan, 1.0]):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.tensor(values, dtype=dtype)
            record = measure(x, needed_fields([name]), native=native)
            own, finite = x.double().numpy(), x[x.isfinite()].double().numpy()
            d = finite - (finite.mean() if len(finite) else 0.0)
            expected = {
                "n": len(own),
                "nans": np.isnan(own).sum(),
                "infs": np.isinf(own).sum(),
                "zeros": (own == 0).sum(),
                "l1": np.abs(finite).sum(),
                "sumsq": (finite**2).sum(),
                "mean": finite.mean() if len(finite) else math.nan,
                **{f"m{power}": (d**power).sum() for power in (2, 3, 4)},
                "min": own.min() if len(own) else math.nan,
                "max": own.max() if len(own) else math.nan,
                "finite_min": finite.min() if len(finite) else math.nan,
                "finite_max": finite.max() if len(finite) else math.nan,
            }[name]
            found = getattr(record, {"mean": "center"}.get(name, name))
            assert found == pytest.approx(expected, nan_ok=True, rel=1e-6, abs=1e-6), (values, dtype)


ROW = st.integers(0, 70)
CEVERYS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            ROW,
            st.lists(st.sampled_from([-2.0, 0.0, 1.0, 3.0]), max_size=5),
            st.sampled_from([1, 1, 2]),
        ),
        st.tuples(st.just("merge"), ROW, st.lists(st.sampled_from([-1.0, 5.0]), max_size=3)),
        st.tuples(st.just("clear"), st.none() | st.lists(ROW, max_size=3)),
        st.tuples(st.just("take"), st.integers(0, 90)),
    ),
    max_size=12,
)


def check_rows(rows, values, codes):
    """Compare rows of a table with the elements, and those that histograms have counted."""
    for row, (elements, counted) in rows.items():
        record = record_of(values[row], EVERY) if row < len(values) else record_of(EMPTY, EVERY)
        assert (record.n, record.sumsq, record.zeros) == (
            len(elements),
            sum(x * x for x in elements),
            elements.count(0.0),
        )
        assert (record.min, record.m2) == pytest.approx(
            (min(elements), np.var(elements) * len(elements)) if elements else (math.nan, 0.0), nan_ok=True
        )
        assert sum(int(each.sum()) for each in codes.get(row, {}).values()) == counted


@given(calls=CEVERYS, native=st.booleans())
@settings(max_examples=60)
def test_a_table_has_the_elements_that_were_added_and_not_taken(calls, native):
    table, fields, rows = HostStatistics(native), EVERY | {"codes"}, {row: ([], 0) for row in range(91)}
    for name, *arguments in calls:
        if name == "add":
            row, elements, weight = arguments
            table.add(row, torch.tensor(elements, dtype=torch.float64), fields, weight)
            rows[row] = rows[row][0] + elements * weight, rows[row][1] + len(elements)
        elif name == "merge":
            (row, elements), other = arguments, HostStatistics(native)
            other.add(row, torch.tensor(elements, dtype=torch.float64), fields)
            table.merge(other)
            rows[row] = rows[row][0] + elements, rows[row][1] + len(elements)
        elif name == "clear":
            table.clear(arguments[0])
            rows |= {row: ([], 0) for row in (rows if arguments[0] is None else arguments[0])}
        else:
            values, codes = table.take(arguments[0])
            assert len(values) == arguments[0]
            check_rows({row: rows[row] for row in range(arguments[0])}, values, codes)
            rows = {row: ([], 0) for row in rows}
        check_rows(rows, table.values, table.codes)
