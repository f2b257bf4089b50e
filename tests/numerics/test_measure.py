"""The statistics of host (native and numpy) and device against numpy in float64, over shapes, dtypes and layouts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from ikkuna.numerics.elements import CHUNK, flatten, readable
from ikkuna.numerics.statistics import FIELDS, native, needed_fields
from ikkuna.numerics.statistics.device import DeviceStatistics, operators
from ikkuna.numerics.statistics.device.buffers import CodeCounts
from ikkuna.numerics.statistics.device.statistics import KernelStatistics
from ikkuna.numerics.statistics.device.triton_launcher import TritonKernels
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.record import record_of
from tests.statistics_record import row_record


class OnCuda(DeviceStatistics):
    """Moves the tensors of the tests to the device."""

    def __init__(self):
        super().__init__(torch.device("cuda"))

    def add(self, row, x, fields, weight=1, generator=None):
        x = x if x.is_meta or x.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(x) else x.cuda()
        return super().add(row, x, fields, weight, None if generator is None else torch.Generator("cuda"))


def with_triton():
    """Return statistics for which Triton's interpreter runs the kernels on tensors of the host."""
    host = torch.device("cpu")
    statistics = DeviceStatistics(host)
    statistics._kernels = KernelStatistics(TritonKernels(host), CodeCounts(host))
    return statistics


MAKERS = {
    "triton": with_triton,
    "native": HostStatistics,
    "numpy": lambda: HostStatistics(native=False),
    "device": lambda: DeviceStatistics(torch.device("cpu")),
    "cuda": OnCuda,
}
MARKS = {"cuda": pytest.mark.gpu, "triton": pytest.mark.triton}
PARAMETERS = [pytest.param(name, marks=MARKS.get(name, ())) for name in MAKERS]


@pytest.fixture(scope="module", autouse=True, params=PARAMETERS)
def implementation(request):
    """Run every test of this file with each class.

    Norms in float32 lose digits on the host; accelerators add in a tree.
    """
    global make, steps
    make = MAKERS[request.param]
    steps = 2 if request.param in ("device", "cuda", "triton") else 1
    assert native.library() is not None, "these tests need a C++ compiler"
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param in ("device", "triton"):
            monkeypatch.setattr(
                operators, "_norm", lambda x, order: torch.linalg.vector_norm(x.double(), order).float()
            )
        yield request.param


LARGE = pytest.mark.usefixtures("no_interpreter")


@pytest.fixture
def no_interpreter(implementation):
    if implementation == "triton":
        pytest.skip("takes Triton's interpreter minutes")


def measure(x, fields, generator=None):
    """Measure a tensor as often as is needed: a device uses float64 from the second step on, where float32 is not enough."""
    statistics, record = make(), None
    for _ in range(steps):
        statistics.clear()
        record = row_record(statistics, 0, fields) if statistics.add(0, x, fields, generator=generator) else None
    return record


NAMES = [f for f in FIELDS if "codes" not in f]
ALL = needed_fields(NAMES)
WILD = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), elements=st.floats(width=32)
)
TAME = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=6), elements=st.floats(-1e4, 1e4, width=32))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(x):
    x = np.asarray(x, dtype=np.float64).ravel()
    finite = x[np.isfinite(x)]
    d = finite - finite.mean() if len(finite) else finite
    return {
        "n": len(x),
        "center": finite.mean() if len(finite) else math.nan,
        "m2": (d**2).sum(),
        "m3": (d**3).sum(),
        "m4": (d**4).sum(),
        "min": x.min() if len(x) else math.nan,
        "max": x.max() if len(x) else math.nan,
        "finite_min": finite.min() if len(finite) else math.nan,
        "finite_max": finite.max() if len(finite) else math.nan,
        "l1": abs(finite).sum(),
        "sumsq": (finite**2).sum(),
        "zeros": (x == 0).sum(),
        "nans": np.isnan(x).sum(),
        "infs": np.isinf(x).sum(),
    }


POWER = {"center": 1, "m2": 2, "m3": 3, "m4": 4, "l1": 1, "sumsq": 2}


def check(record, x, rel=2e-6):
    want = reference(x)
    finite = np.asarray(x, dtype=np.float64)
    size = abs(finite[np.isfinite(finite)]).max(initial=0)
    for name, value in want.items():
        slack = rel * max(1, want["n"]) * size ** POWER.get(name, 0) if name in POWER else 0
        assert getattr(record, name) == pytest.approx(value, rel=rel, abs=slack + 1e-37, nan_ok=True), name


@given(TAME)
@settings(deadline=None, max_examples=100)
def test_finite_data_of_any_shape(x):
    check(measure(torch.from_numpy(x), ALL), x)


@pytest.mark.fault(47, 51)
@given(WILD)
@settings(deadline=None, max_examples=150)
def test_any_data_of_any_shape(x):
    with np.errstate(over="ignore", invalid="ignore"):
        check(measure(torch.from_numpy(x), ALL), x)


@given(WILD, st.sets(st.sampled_from(NAMES)))
@settings(deadline=None, max_examples=150)
def test_a_subset_of_fields_has_the_values_of_all(x, names):
    with np.errstate(over="ignore", invalid="ignore"):
        fields = needed_fields(names)
        got, want = measure(torch.from_numpy(x), fields), reference(x)
        finite = x[np.isfinite(x)].astype(np.float64)
        size = abs(finite).max(initial=0)
        for name in fields:
            attribute = "center" if name == "mean" else name
            slack = 2e-6 * max(1, len(finite)) * size ** POWER.get(attribute, 0) if attribute in POWER else 0
            assert getattr(got, attribute) == pytest.approx(
                want[attribute], rel=2e-6, abs=slack + 1e-37, nan_ok=True
            ), name
        if "mean" not in fields:
            assert got.center is None


@pytest.mark.fault(50)
@pytest.mark.fault(49)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
)
def test_dtypes_are_widened(dtype):
    x = (random(300) * 20).abs().to(dtype)
    check(measure(x, ALL), x.double().numpy())


@pytest.mark.fault(49)
def test_half_precision_sums_do_not_overflow():
    x = torch.full((300_000,), 1000.0, dtype=torch.float16)
    record = measure(x, ALL)
    assert record.l1 == pytest.approx(3e8)
    assert record.l2_norm == pytest.approx(1000 * math.sqrt(300_000))


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x[:, 0].expand(4, 6),
        lambda x: x[0, 0].expand(4, 6),
        lambda x: x.reshape(1, 2, 3, 5).to(memory_format=torch.channels_last),
        lambda x: x.requires_grad_().detach(),
        lambda x: x[0, 0],
        lambda x: x.flip(0),
        lambda x: torch.nn.Parameter(x).detach(),
    ],
)
def test_layouts(make):
    x = make(random(6, 5))
    check(measure(x, ALL), x.numpy())


@pytest.mark.fault(50)
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_counts_the_zeros_it_does_not_store(layout):
    x = random(8, 9).relu()
    check(measure(x.to_sparse(layout=layout), ALL), x.numpy())
    check(measure(torch.zeros(3, 4).to_sparse(layout=layout), ALL), np.zeros((3, 4)))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_an_uncoalesced_tensor_adds_up_its_duplicates():
    x = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, -3.0]), (4,))
    check(measure(x, ALL), x.to_dense().numpy())


@pytest.mark.fault(50)
def test_complex_numbers_give_magnitudes():
    x = torch.complex(random(20), random(20, seed=1))
    check(measure(x, ALL), x.abs().numpy())


@pytest.mark.fault(50)
def test_tensors_without_numbers():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert measure(torch.empty(3, device="meta"), ALL) is None
    with FakeTensorMode():
        fake = torch.empty(3)
    assert measure(fake, ALL) is None
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert measure(nested, ALL) is None
    seen = []
    torch.vmap(lambda t: seen.append(measure(t, ALL)) or t)(torch.ones(3, 2))
    assert seen == [None]


@pytest.mark.fault(50)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_quantised_tensors_are_read():
    x = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, -2.0]), 0.5, 8, torch.quint8)
    check(measure(x, ALL), x.dequantize().numpy())


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 1e30, -1e30, 1e-30, 1e-45])
@pytest.mark.parametrize("n", [1, 7])
def test_constants(value, n):
    x = torch.full((n,), value)
    record = measure(x, ALL)
    exact = x.double()[0].item()
    assert record.center == pytest.approx(exact)
    assert record.l2_norm == pytest.approx(abs(exact) * math.sqrt(n))
    assert record.rms == pytest.approx(abs(exact))
    assert record.variance() == pytest.approx(0, abs=1e-12 * exact**2)
    assert record.zeros == (n if value == 0 else 0)


@pytest.mark.parametrize("n", [4, 1023, 5000])
def test_a_mean_between_two_neighbouring_numbers_costs_no_moment(n):
    """Deviations are taken from the mean that was rounded to float32, which is a quarter of their distance away."""
    x = torch.full((n,), 10_000.0)
    x[::4] += 2.0**-10  # the next number
    record, exact = measure(x, ALL), x.double().numpy() - x.double().mean().item()
    assert x.unique().numel() == 2
    for name, power in (("m2", 2), ("m3", 3), ("m4", 4)):
        assert getattr(record, name) == pytest.approx((exact**power).sum(), rel=1e-5)
    assert measure(x, needed_fields(["m2"])).m2 == pytest.approx((exact**2).sum(), rel=1e-5)


def test_a_mean_far_from_zero_costs_no_variance():
    """The difference of mean square and squared mean is wrong by 17 % here."""
    x = 1 + 1e-3 * random(1_000_000)
    want = x.double().var(correction=0).item()
    assert measure(x, ALL).variance() == pytest.approx(want, rel=1e-5)
    assert measure(x, needed_fields(["m2"])).variance() == pytest.approx(want, rel=1e-5)
    assert measure(x, needed_fields(["m2", "sumsq"])).variance() == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e-11, 1e-15, 1e-25, 1e10])
def test_shape_does_not_depend_on_scale(scale):
    """Fourth powers of gradients around 1e-12 vanish in float32; their kurtosis must not read -3."""
    x = random(5000) ** 2 * scale
    record = measure(x, needed_fields(["m4"]))
    assert record.skewness == pytest.approx(stats.skew(x.double().numpy()), rel=1e-5)
    assert record.kurtosis == pytest.approx(stats.kurtosis(x.double().numpy()), rel=1e-5)
    assert record.variance() == pytest.approx(x.double().var(correction=0).item(), rel=1e-5)


def test_data_over_several_chunks():
    x = random(3 * CHUNK + 17) * 3 + 0.5
    x[CHUNK + 5] = 0.0
    check(measure(x, ALL), x.numpy())
    x[-1], x[0], x[5] = math.inf, math.nan, -math.inf
    record = measure(x, ALL)
    assert (record.nans, record.infs, record.count) == (1, 2, x.numel() - 3)
    assert math.isnan(record.mean)
    assert math.isnan(record.min)


@LARGE
@pytest.mark.fault(60)
@pytest.mark.parametrize("fields", [NAMES, ["sumsq"], ["l1"], ["mean"], ["zeros"]])
def test_more_than_two_to_the_24_elements(fields):
    """Beyond 2**24 a float32 counter stands still, and torch's own norm is wrong."""
    n = (1 << 24) + 3 * CHUNK + 1
    x = torch.ones(n, dtype=torch.bfloat16)
    x[-5:] = 0
    record = measure(x, needed_fields(fields))
    assert record.n == n
    known = {"l1": n - 5, "sumsq": n - 5, "zeros": 5, "center": (n - 5) / n, "m2": (n - 5) * 5 / n}
    for name, value in known.items():
        if getattr(record, name) is not None:
            assert getattr(record, name) == pytest.approx(value, rel=1e-6)


@LARGE
def test_large_norms_are_right_where_torch_is_not():
    x = random(5_000_000)
    record = measure(x, needed_fields(["l1", "sumsq"]))
    exact = x.double()
    assert record.l2_norm == pytest.approx(exact.square().sum().sqrt().item(), rel=1e-6)
    assert record.l1_norm == pytest.approx(exact.abs().sum().item(), rel=1e-6)


@given(WILD)
@settings(deadline=None, max_examples=40)
def test_flattening_keeps_every_element(x):
    t = torch.from_numpy(x)
    for view in (t, t.permute(tuple(reversed(range(t.ndim)))), t.expand(2, *t.shape)):
        flat = flatten(view)
        assert flat.shape == (view.numel(),)
        assert torch.equal(flat.sort().values.nan_to_num(), view.reshape(-1).sort().values.nan_to_num())


def test_flattening_copies_only_what_is_expanded():
    x = random(4, 5, 6)
    for view in (x, x.permute(2, 0, 1), x.mT):
        assert flatten(view).data_ptr() == x.data_ptr()


def test_what_is_read_of_a_plain_tensor_is_itself():
    x = random(3)
    values, implied = readable(x)
    assert values is x
    assert implied == 0


@pytest.mark.parametrize("name", ["min", "max"])
def test_an_extremum_that_is_measured_without_the_other_is_nan_if_an_element_is(name):
    assert math.isnan(getattr(measure(torch.tensor([1.0, math.nan, 2.0]), needed_fields([name, "l1"])), name))


def test_kernels_are_used_unless_numpy_is_wanted():
    assert HostStatistics().kernels is native.library()
    assert HostStatistics(native=False).kernels is None


def test_no_fields_measure_nothing():
    record = measure(torch.ones(3), needed_fields([]))
    assert record.n == 3
    assert record.sumsq is record.center is record.min is None


@LARGE
@pytest.mark.parametrize("value", [0.1, 1000.0, 7.7, 1 / 3, 1e-4])
@pytest.mark.parametrize("n", [1000, 100_000, 1_500_001])
def test_constant_data_does_not_make_sums_drift(value, n):
    x = torch.full((n,), value)
    record = measure(x, ALL)
    exact = float(x[0])
    assert record.l2_norm == pytest.approx(exact * math.sqrt(n), rel=1e-6)
    assert record.l1 == pytest.approx(exact * n, rel=1e-6)
    assert record.mean == pytest.approx(exact, rel=1e-6)
    assert measure(x, needed_fields(["sumsq"])).l2_norm == pytest.approx(exact * math.sqrt(n), rel=1e-6)


# -- rows ---------------------------------------------------------------------------------------------------------------

CLOSE = {"center": 1e-12, "m2": 1e-9, "m3": 1e-7, "m4": 1e-7, "l1": 1e-6, "sumsq": 1e-6}


def assert_record(record, x):
    """Compare with numpy in float64, relative to the size of the deviations rather than of the elements."""
    want = reference(x)
    k, spread = max(1, len(x)), np.std(np.asarray(x, np.float64))
    for name, value in want.items():
        power = {"m2": 2, "m3": 3, "m4": 4}.get(name)
        slack = CLOSE[name] * k * spread**power if power else 0
        assert getattr(record, name) == pytest.approx(value, rel=CLOSE.get(name, 0), abs=slack, nan_ok=True), name


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OFFSETS = {
    "1e4 +- 1": 1e4 + normal(50_000),
    "a million deviations": 1e6 + normal(50_000),
    "1e9 +- 1": 1e9 + normal(5000),
    "float32 at 1e4": (1e4 + normal(50_000)).float(),
    "1e-25": 1e-25 * normal(5000),
    "1e-25 in float32": (1e-25 * normal(5000)).float(),
    "1e19 in float32": (1e19 * normal(5000)).float(),
    "1e30 in float32": (1e30 * normal(5000)).float(),
    "gamma": torch.from_numpy(np.random.default_rng(0).gamma(2, size=5000)) + 100,
}


@pytest.mark.parametrize("name", OFFSETS)
def test_the_first_call_has_all_digits_of_all_moments(name):
    x = OFFSETS[name]
    record, want = measure(x, ALL), reference(x)
    rel = 1e-5 if x.dtype is torch.float32 else 1e-6 if name == "1e9 +- 1" else 1e-9  # a mean of 1e9 is rounded to 1e-7
    d = x.double() - x.double().mean()
    for field, power in (("m2", 2), ("m3", 3), ("m4", 4)):
        size = d.abs().pow(power).sum().item()
        assert getattr(record, field) == pytest.approx(want[field], rel=rel, abs=rel * size), field
    assert record.mean == pytest.approx(want["center"], rel=1e-7, abs=1e-7 * d.abs().max().item())


@pytest.mark.parametrize("name", OFFSETS)
def test_many_calls_merge_to_the_statistics_of_all_elements(name):
    x = OFFSETS[name]
    statistics = make()
    for part in x.split([1, 2, 30] + [1] * 100 + [len(x) - 133]):
        assert statistics.add(3, part, ALL)
    got, want = row_record(statistics, 3, ALL), measure(x, ALL)
    for field in ("n", "zeros", "nans", "infs", "min", "max", "finite_min", "finite_max"):
        assert getattr(got, field) == getattr(want, field), field
    d = x.double() - x.double().mean()
    for field, power in (("center", 1), ("m2", 2), ("m3", 3), ("m4", 4)):
        size = d.abs().pow(power).sum().item()
        assert getattr(got, field) == pytest.approx(getattr(want, field), rel=1e-5, abs=1e-6 * size), field


def test_a_row_of_another_step_starts_anew():
    """A row that is used again keeps nothing, whatever its mean was."""
    statistics = make()
    for offset in (0.0, 1e6, -3.0):
        x = offset + normal(1000)
        statistics.add(0, x, ALL)
        assert_record(row_record(statistics, 0, ALL), x.numpy())
        statistics.clear()
        assert row_record(statistics, 0, ALL).n == 0


@pytest.mark.parametrize("weight", [1, 2, 3.0])
def test_an_element_with_a_weight_counts_as_many(weight):
    statistics, fields, x = make(), needed_fields(["mean", "m2", "l1"]), normal(6)
    for calls in (1, 2):
        statistics.add(0, x, fields, weight)
        record = row_record(statistics, 0, fields)
        assert record.n == 6 * weight * calls
        assert record.m2 == pytest.approx(weight * calls * float(((x - x.mean()) ** 2).sum()))
        assert record.l1 == pytest.approx(weight * calls * float(x.abs().sum()))


def test_rows_that_are_cleared_lose_their_histograms_and_others_do_not():
    statistics, fields = make(), needed_fields(FIELDS)
    for row in (0, 2):
        statistics.add(row, normal(50), fields)
    statistics.clear([0, 7])
    assert row_record(statistics, 0, fields).codes is None
    assert row_record(statistics, 2, fields).codes.sum() == 50
    statistics.add(0, normal(30), fields)
    assert row_record(statistics, 0, fields).codes.sum() == 30


def test_a_table_grows_to_what_is_needed_and_at_least_to_twice_its_size():
    table = HostStatistics()
    first = len(table.values)
    table.add(5 * first, normal(3), ALL)
    assert len(table.values) == 5 * first + 1
    table.add(5 * first + 1, normal(4), ALL)
    assert len(table.values) == 2 * (5 * first + 1)
    assert [row_record(table, row, ALL).n for row in (5 * first, 5 * first + 1)] == [3, 4]
    for last in (len(table.values) - 1, len(table.values)):
        addresses = table.addresses(np.array([last, 0]))
        assert addresses.tolist() == [table.values[last:].ctypes.data, table.values.ctypes.data]
        assert last < len(table.values)
    table.reserve(100 * first)
    assert len(table.values) == 100 * first


def test_rows_that_are_taken_are_the_statistics_and_leave_nothing():
    statistics, fields = make(), needed_fields(FIELDS)
    for step in range(3):
        x, y = 1e4 * step + normal(500, seed=step), normal(70, seed=step)
        statistics.add(1, x, fields)
        statistics.add(1, y[:20], fields)
        statistics.add(66, y, fields)
        if isinstance(statistics, DeviceStatistics):
            taken, codes = statistics.take()
            numbers, values = taken.rows({name: x.cpu().double().numpy() for name, x in taken.tensors.items()})
        else:
            numbers, (values, codes) = range(67), statistics.take(67)
        rows = dict(zip(numbers, values, strict=True))
        for row, whole in ((1, torch.cat([x, y[:20]])), (66, y)):
            assert_record(record_of(rows[row], ALL), whole.numpy())
            assert codes[row]["codes"].sum() == len(whole)
        assert sum(row[0] for row in rows.values()) == 590, "no other row has elements"
        assert row_record(statistics, 1, fields).n == row_record(statistics, 66, fields).n == 0
        assert row_record(statistics, 1, fields).codes is None


def test_an_empty_call_changes_nothing():
    """An expert that gets no tokens has neither a minimum nor a maximum."""
    statistics, x = make(), random(20)
    for part in (x[:0], x[:10], x[:0].bfloat16(), x[10:], x[:0]):
        assert statistics.add(0, part, ALL)
    check(row_record(statistics, 0, ALL), x.numpy())
    assert statistics.add(1, x[:0], ALL)
    empty = row_record(statistics, 1, ALL)
    assert (empty.n, empty.l1, empty.zeros) == (0, 0, 0)
    assert all(math.isnan(value) for value in (empty.min, empty.max, empty.mean))


def test_rows_do_not_depend_on_each_other_and_the_table_grows():
    statistics = make()
    rows = [0, 5, 63, 64, 1000]
    for row in rows:
        statistics.add(row, torch.tensor([float(row)]), ALL)
    for row in rows:
        statistics.add(row, torch.tensor([row + 2.0]), ALL)
    for row in rows:
        record = row_record(statistics, row, ALL)
        assert (record.n, record.mean, record.m2) == (2, row + 1, 2)
    statistics.clear([5, 64])
    assert [row_record(statistics, row, ALL).n for row in rows] == [2, 0, 2, 0, 2]
    assert row_record(statistics, 7, ALL).n == row_record(statistics, 10**6, ALL).n == 0


@pytest.mark.parametrize("weight", [4, 0.25, torch.tensor(4), torch.tensor(0.25, dtype=torch.float64)])
def test_a_mean_stands_for_as_many_elements_as_its_weight(weight):
    statistics = make()
    statistics.add(0, torch.tensor(3.0), ALL, weight)
    statistics.add(0, torch.tensor(8.0), ALL, 1)
    statistics.add(0, torch.tensor(math.nan), ALL, torch.zeros(()))
    record, w = row_record(statistics, 0, needed_fields(["m2", "l1"])), float(weight)
    assert record.center == pytest.approx((3 * w + 8) / (w + 1))
    assert record.l1 == pytest.approx(3 * w + 8)
    assert record.m2 == pytest.approx(w / (w + 1) * 25)
    assert record.nans == 0


def test_histograms_of_several_calls_add_up():
    fields, x = needed_fields(FIELDS), random(200_000)
    statistics = make()
    for part in x.split(70_000):
        statistics.add(0, part, fields, generator=torch.Generator().manual_seed(1))
    record, whole = row_record(statistics, 0, fields), measure(x, fields)
    assert (record.codes == whole.codes).all()
    assert record.sampled_codes.sum() == pytest.approx(200_000, rel=1e-3)
    check(record, x.numpy())


@pytest.mark.parametrize(
    "values", [[1e200], [1e200, 1e200], [1e200, -1e200, 3e200], [1e200, 1.0], [1e300, -1e300, 5.0], [1e308] * 3]
)
def test_values_whose_powers_exceed_float64_give_infinity_and_no_error(values):
    x = torch.tensor(values, dtype=torch.float64)
    statistics = make()
    for part in (x, x[:1], x):
        statistics.add(0, part, ALL)
    record = row_record(statistics, 0, ALL)
    assert (record.n, record.nans, record.infs) == (2 * len(x) + 1, 0, 0)
    assert (record.min, record.max) == (x.min().item(), x.max().item())
    assert record.sumsq == math.inf
    with np.errstate(all="ignore"):
        want = reference(torch.cat([x, x[:1], x]))
    for field in ("center", "m2", "m3", "m4"):
        value = getattr(record, field)
        assert abs(value) == math.inf or value == pytest.approx(want[field], rel=1e-6), field
    for read in (record.variance, lambda: record.skewness, lambda: record.kurtosis, lambda: record.l2_norm):
        assert isinstance(read(), float)


def test_two_statistics_merge():
    a, b, x = make(), make(), normal(3000) + 5
    for row, part in ((0, x[:1000]), (2, x[:10])):
        a.add(row, part, needed_fields(FIELDS))
    for row, part in ((0, x[1000:]), (1, x[:7])):
        b.add(row, part, needed_fields(FIELDS))
    a.merge(b)
    for row, whole in ((0, x), (1, x[:7]), (2, x[:10])):
        record = row_record(a, row, needed_fields(FIELDS))
        assert_record(record, whole.numpy())
        assert record.codes.sum() == len(whole)
    assert row_record(b, 1, ALL).n == 7


@given(st.lists(WILD, min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_any_calls_merge_as_one(arrays):
    statistics = make()
    for x in arrays:
        statistics.add(0, torch.from_numpy(x), ALL)
    with np.errstate(over="ignore", invalid="ignore"):
        check(row_record(statistics, 0, ALL), np.concatenate([x.ravel() for x in arrays]), rel=1e-5)
