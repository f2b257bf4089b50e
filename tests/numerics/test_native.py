"""The C++ kernels: which tensors they accept, differences and samples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.numerics.statistics import FIELDS, merge, native, needed_fields
from ikkuna.numerics.statistics.float_code import codes, sampled_codes
from ikkuna.numerics.statistics.host import measure
from ikkuna.numerics.statistics.native.kernels import VARIANTS
from ikkuna.numerics.statistics.record import record_of
from ikkuna.numerics.statistics.table import empty_rows
from ikkuna.testing import RecordingBackend

ALL = needed_fields(f for f in FIELDS if "codes" not in f)
PAIRS = hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(1, 3000)), elements=st.floats(width=32))


@given(PAIRS)
@settings(deadline=None, max_examples=100)
def test_the_statistics_of_a_difference_are_those_of_the_subtraction(pair):
    x, y = torch.from_numpy(pair.copy())
    want = measure(x - y, ALL)
    assert repr(difference(x, y, ALL)) == repr(want)


def difference(x, y, fields):
    (row,) = table = empty_rows(1)
    if native.library().accepts_difference(x, y):
        native.library().add_difference(x, y, fields, table.ctypes.data)
    return record_of(row, fields)


@pytest.fixture(params=[name for name in VARIANTS if name != "portable"])
def variant(request):
    kernels = native.library()
    if not kernels.use(request.param):
        pytest.skip("this processor lacks it")
    yield request.param
    next(filter(kernels.use, VARIANTS))


def rows_of_all(x, y):
    """Return the bytes of all statistics of a tensor and of a difference, and of the histograms."""
    kernels, table = native.library(), empty_rows(8)
    for i, fields in enumerate(map(needed_fields, (["sumsq"], ["max"], ["m2", "l1"], ["m4"]))):
        kernels.add(x, fields, table[i : i + 1].ctypes.data)
        kernels.add_difference(x, y, fields, table[4 + i : 5 + i].ctypes.data)
    counts = codes(x, 3).numpy(), sampled_codes(x, torch.Generator().manual_seed(1)).numpy()
    return [part.tobytes() for part in (table, *counts)]


NUMBERS = {
    "normal": lambda n: torch.randn(n),
    "far from zero": lambda n: torch.randn(n) + 1e4,
    "sorted": lambda n: torch.arange(n) - 100.0,
    "half zero": lambda n: torch.randn(n).relu(),
    "tiny": lambda n: torch.randn(n) * 1e-20,
    "huge": lambda n: torch.randn(n) * 1e30,
    "not finite": lambda n: torch.randn(n).index_fill(0, torch.tensor([n // 2]), torch.inf).log(),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_processors_have_the_same_bits(variant, dtype, numbers):
    for n in (1, 7, 16, 1000, 4096, 4097, 70_001):
        torch.manual_seed(n)
        x, y = NUMBERS[numbers](n).to(dtype), torch.randn(n).to(dtype)
        got = rows_of_all(x, y)
        assert native.library().use("portable")
        want = rows_of_all(x, y)
        assert native.library().use(variant)
        assert got == want


@pytest.mark.parametrize("name", [*VARIANTS, "sse9"])
def test_a_variable_of_the_environment_chooses_the_kernels(monkeypatch, caplog, name):
    used = []
    monkeypatch.setenv("IKKUNA_KERNELS", name)
    monkeypatch.setattr(native.Library, "use", lambda self, variant: used.append(variant) or use(self, variant))
    native.library.__wrapped__()
    next(filter(native.library().use, VARIANTS))
    assert used[0] == (name if name in VARIANTS else "avx512")
    assert ("IKKUNA_KERNELS=sse9" in caplog.text) == (name not in VARIANTS)


use = native.Library.use


JUMPS = {
    "between runs": lambda: torch.cat([torch.randn(4096) + 1000, torch.randn(40_960)]),
    "within a run": lambda: torch.cat([torch.randn(50) + 1000, torch.randn(5000)]),
    "small after large": lambda: torch.cat([torch.randn(4096) + 1e3, torch.randn(4096) * 1e-3]),
    "sorted": lambda: torch.randn(30_000).sort().values,
}


@pytest.mark.parametrize("numbers", JUMPS)
def test_deviations_from_the_mean_of_the_run_before_lose_no_digits(numbers):
    x = JUMPS[numbers]()
    d = x.double() - x.double().mean()
    record, n, deviation = measure(x, ALL), len(x), d.square().mean().sqrt().item()
    assert record.center == pytest.approx(x.double().mean().item(), abs=1e-7 * deviation)
    assert record.m2 == pytest.approx(d.square().sum().item(), rel=1e-6)
    assert record.m3 == pytest.approx(d.pow(3).sum().item(), abs=2e-6 * n * deviation**3, rel=1e-6)
    assert record.m4 == pytest.approx(d.pow(4).sum().item(), rel=2e-6)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.view(2, 20, 5, 10).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_difference_of_any_dense_layout(dtype, layout):
    x, y = (LAYOUTS[layout](torch.randn(40, 50).to(dtype)) for _ in range(2))
    wide = torch.promote_types(dtype, torch.float32)
    want, got = measure((x.to(wide) - y.to(wide)).contiguous(), ALL), difference(x, y, ALL)
    assert got.n == 2000
    assert got.mean == pytest.approx(want.mean, rel=1e-5, abs=1e-7)
    assert got.m2 == pytest.approx(want.m2, rel=1e-5)


def test_tensors_of_different_layout_or_dtype_are_not_subtracted():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    kernels = native.library()
    assert kernels.accepts_difference(x, y)
    for other in (y.t(), y.double(), y[:2], y[:, ::2].repeat(1, 2).t()):
        assert not kernels.accepts_difference(x, other)


@given(st.lists(hnp.arrays(np.float32, st.integers(1, 3000), elements=st.floats(width=32)), min_size=1, max_size=4))
@settings(deadline=None, max_examples=60)
def test_calls_add_up(arrays):
    """The outputs of several calls of a module are measured as if they were one tensor."""
    (row,) = table = empty_rows(1)
    for array in arrays:
        native.library().add(torch.from_numpy(array), ALL, table.ctypes.data)
    got, want = record_of(row, ALL), merge(*(measure(torch.from_numpy(array), ALL) for array in arrays))
    assert (got.n, got.zeros, got.nans, got.infs) == (want.n, want.zeros, want.nans, want.infs)
    # sums that may cancel are as exact as the numbers that they add
    added = {"center": want.l1 / max(want.n, 1), "m2": want.sumsq}
    for name in ("min", "max", "l1", "sumsq", "center", "m2"):
        error = 1e-9 * added.get(name, 0.0) + 1e-30
        error = error if math.isfinite(error) else 0.0
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-6, abs=error, nan_ok=True)


def test_kernels_accept_only_tensors_whose_memory_holds_their_elements():
    kernels = native.library()
    plain = torch.randn(4, 4)
    assert kernels.accepts(plain)
    lazy_negative = torch.complex(plain, plain).conj().imag
    assert lazy_negative.is_neg()
    lazy_zero = torch._efficientzerotensor(4, 4)
    for x in (plain.t(), nn.Parameter(plain), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        assert kernels.accepts(x)
    gaps = plain[:, ::2], plain[:1].expand(4, 4), plain.unfold(1, 2, 1)
    for x in (*gaps, lazy_negative, lazy_zero, plain.half(), plain.to_sparse(), plain.to("meta"), torch.empty(0)):
        assert not kernels.accepts(x)
    assert measure(lazy_negative, ALL).mean == pytest.approx(-plain.mean().item(), rel=1e-5)
    assert measure(lazy_zero, ALL).zeros == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 3, 7])
def test_codes_are_those_of_torchs_operators(dtype, m):
    x = torch.randn(300_001, dtype=torch.float64)
    x[::7] *= 1e-30
    x[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    x = x.to(dtype)
    assert (codes(x, m) == codes(x, m, native=False)).all()


def test_a_sample_is_stratified_and_has_a_smaller_error_than_drawing_with_replacement():
    x = torch.arange(1_000_000.0)
    counts, exact = sampled_codes(x, torch.Generator().manual_seed(1)), codes(x)
    assert counts.sum() == pytest.approx(len(x), rel=1e-4)
    share, want = counts.cumsum(0) / len(x), exact.cumsum(0) / len(x)
    assert (share - want).abs().max() < 2e-5  # of sorted data; with replacement it would be 2e-3
    assert (sampled_codes(x, torch.Generator().manual_seed(2)) != counts).any()


def test_the_error_of_a_sample_of_shuffled_data_is_as_documented():
    x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    below = [
        float(sampled_codes(x, torch.Generator().manual_seed(seed))[: 2048 + (126 << 3)].sum()) / len(x)
        for seed in range(40)
    ]
    assert np.mean(below) == pytest.approx((x < 0.5).float().mean().item(), abs=5 * 0.002 / 40**0.5)
    assert np.std(below) == pytest.approx((0.25 / 65_536) ** 0.5, rel=0.5)


def test_the_number_of_threads_does_not_change_the_result():
    x = torch.randn(3_000_000) + 1
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = measure(x, ALL)
        torch.set_num_threads(3)
        assert measure(x, ALL) == want
    finally:
        torch.set_num_threads(threads)
    assert want.mean == pytest.approx(x.double().mean().item(), abs=1e-9)  # standard deviations
    assert want.m2 == pytest.approx(x.double().var(correction=0).item() * len(x), rel=1e-7)


@pytest.mark.parametrize("kernels", ["native", "eager"])
def test_an_exporter_uses_the_kernels_of_its_argument(kernels, monkeypatch):
    calls = []
    monkeypatch.setattr(native.Library, "add", lambda self, x, *rest: calls.append(x) or original(self, x, *rest))
    if (library := native.library()) is not None:
        monkeypatch.setattr(library, "reader", None)
    model = torch.nn.Linear(3, 2)
    recording = RecordingBackend()
    with Exporter(message_bus=MessageBus(), kernels=kernels, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=recording))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        want = model.weight.norm().item()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert bool(calls) == (kernels == "native")
    assert [value for _, value, _ in recording.values] == [pytest.approx(want, rel=1e-6)]


original = native.Library.add


def test_unknown_kernels_raise():
    from ikkuna.errors import ConfigError

    with pytest.raises(ConfigError, match="kernels must be .native. or .eager., got .fast."):
        Exporter(message_bus=MessageBus(), kernels="fast")
