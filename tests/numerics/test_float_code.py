"""The float-code histogram against numpy in float64."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics import histogram
from ikkuna.numerics.statistics.float_code import bin_edges, codes, sample
from ikkuna.numerics.statistics.histogram import Histogram, Histograms, together
from ikkuna.numerics.statistics.host import measure
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.record import Records, merge, needed_fields

FLOATS = hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
ANY = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32))


def reference_codes(x: np.ndarray, m: int = 3) -> np.ndarray:
    """Count each bin from its edges."""
    edges = bin_edges(m)
    half = 256 << m
    bins = np.zeros(2 * half, dtype=np.int64)
    for value in x.astype(np.float64):
        if math.isnan(value):
            continue
        if math.isinf(value):
            index = half + (255 << m) if value > 0 else half - 1 - (255 << m)
        elif np.signbit(value):
            index = 2 * half - 1 - (np.searchsorted(edges, -value, side="right") - 1)
        else:
            index = np.searchsorted(edges, value, side="right") - 1
        bins[index] += 1
    return bins


def test_special_numbers_have_their_known_codes():
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45])
    assert codes(x).nonzero().flatten().tolist() == [7, 1031, 2047, 2048, 3064, 4088, 4092]
    h = Histogram.of(x)
    assert h.n == 8


@pytest.mark.fault(212)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "sampled"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_histogram_lies_between_the_extrema_of_its_finite_elements(odd, exact):
    """Without them it lay between the edges of the outermost bins, 96 and 320."""
    name = "codes" if exact else "sampled_codes"
    x = torch.tensor([100.0, 200.0, 300.0, odd])
    for record in (
        measure(x, needed_fields([name, "finite_min", "finite_max"])),
        merge(*(measure(part, needed_fields([name, "finite_min", "finite_max"])) for part in x.split(1))),
    ):
        (buckets,) = Histograms.of_records(Records.of_record(record), exact).tensorboard_buckets(2)
        assert (buckets.min, buckets.max, buckets.num) == (100.0, 300.0, 3)
        assert buckets.bucket_limits == [200.0, 300.0]
    assert Histogram.of(x).tensorboard_buckets(2).bucket_limits == [200.0, 300.0]


@pytest.mark.fault(212)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_a_lazy_negative_is_counted_with_its_sign(dtype, native):
    """The imaginary part of a conjugate shares the memory of the number, and has a bit that negates it."""
    x = torch.tensor([1 + 2j, 3 - 4j, 5 + 0.5j], dtype=dtype).conj().imag
    assert x.is_neg()
    assert torch.equal(codes(x, native=native), codes(torch.tensor([-2.0, 4.0, -0.5])))
    record = measure(x, needed_fields(["codes", "finite_min", "finite_max"]), native=native)
    assert Histograms.of_records(Records.of_record(record), exact=True).quantile([0.0, 1.0]).ravel().tolist() == [
        -2.0,
        4.0,
    ]


@given(ANY, st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_codes_are_the_bins_between_the_edges(x, m):
    counted = codes(torch.from_numpy(x), m).numpy()
    assert counted.sum() == len(x)
    first_nan, half = (255 << m) + 1, 256 << m
    assert counted[half + first_nan :].sum() + counted[: half - first_nan].sum() == np.isnan(x).sum()
    counted[half + first_nan :] = counted[: half - first_nan] = 0
    assert (counted == reference_codes(x, m)).all()


@given(ANY)
@settings(deadline=None, max_examples=30)
def test_the_device_path_counts_the_same(x):
    counted = _through_scatter(torch.from_numpy(x))
    assert (counted == codes(torch.from_numpy(x))).all()


def _through_scatter(x):
    """Run the branch for devices on the CPU, by pretending that a compiler traces it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        return codes(x)


@given(FLOATS, st.lists(st.floats(0, 1), min_size=1, max_size=5))
@settings(deadline=None, max_examples=100)
def test_quantiles_are_within_one_bin_of_numpy(x, q):
    expected = np.quantile(x.astype(np.float64), q)
    h = Histogram.of(torch.from_numpy(x))
    got = h.quantile(q)
    # each of the two order statistics around a rank is misplaced by less than its bin, 1/8 of its value
    rank = np.asarray(q) * (len(x) - 1)
    ordered = np.sort(x.astype(np.float64))
    around = np.maximum(abs(ordered[np.floor(rank).astype(int)]), abs(ordered[np.ceil(rank).astype(int)]))
    assert (abs(got - expected) <= around / 8 + 2e-39).all()
    assert (got >= x.min()).all()
    assert (got <= x.max()).all()


def test_quantiles_of_many_normal_numbers_are_close():
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    q = [0.0013, 0.0228, 0.1587, 0.5, 0.8413, 0.9772, 0.9987]
    got = Histogram.of(x).quantile(q)
    assert np.allclose(got, np.quantile(x.double().numpy(), q), atol=0.015)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([3.7] * 5, 0.3, 3.7),
        ([0.0] * 3 + [1.0], 0.5, 0.0),
        ([-1.0, 1.0], 0.5, 0.0),
        ([5.0], 0.9, 5.0),
        ([-math.inf, 0.0, math.inf], 1.0, math.inf),
        ([-math.inf, 2.0, math.inf], 0.0, -math.inf),
        ([1.0, math.nan], 0.5, math.nan),
        ([], 0.5, math.nan),
    ],
)
def test_quantiles_of_special_sets(values, q, expected):
    got = Histogram.of(torch.tensor(values)).quantile(q)
    assert got == pytest.approx(np.float32(expected).item(), nan_ok=True, abs=0)


def test_finite_only_ignores_elements_that_are_not_finite():
    h = Histogram.of(torch.tensor([math.nan, -math.inf, 1.0, 1.0, 1.0, math.inf]))
    assert h.quantile(0.5, finite_only=True) == pytest.approx(1.0, rel=1 / 8)
    assert math.isnan(h.quantile(0.5))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.bool]
)
def test_other_dtypes_count_as_their_float32_values(dtype):
    x = (torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    assert (codes(x) == codes(x.float())).all()


def test_seven_bits_are_the_exact_distribution_of_bfloat16():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2)).bfloat16()
    held = codes(x, 7).numpy().nonzero()[0]
    edges = bin_edges(7)
    negative = held < 1 << 15
    exact = np.where(negative, edges[held + 1], edges[held])
    assert set(exact) == set(x.double().tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[0, 0].expand(7, 5),
        lambda x: x.requires_grad_(),
        lambda x: x[0, 0],
        lambda x: x.to_sparse(),
        lambda x: torch.complex(x, x),
        lambda x: x.new_empty(0, 3),
    ],
)
def test_layouts_do_not_matter(make):
    x = make(torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).relu())
    dense = x.detach().to_dense() if x.is_sparse else x.detach()
    dense = dense.abs() if dense.is_complex() else dense
    assert (codes(x) == codes(dense.reshape(-1).clone())).all()


def test_a_tensor_without_numbers_has_no_codes():
    assert codes(torch.empty(3, device="meta")).sum() == 0
    assert Histogram.of(torch.empty(3, device="meta")).n == 0
    assert sample(torch.empty(3, device="meta")).numel() == 0


def test_float64_beyond_float32_counts_as_infinite():
    assert torch.equal(codes(torch.tensor([1e300, 1.0], dtype=torch.float64)), codes(torch.tensor([math.inf, 1.0])))


@pytest.mark.parametrize("m", [0, 8, -1])
def test_an_invalid_number_of_bits_raises(m):
    with pytest.raises(ConfigError, match="1 to 7"):
        codes(torch.ones(1), m)


def test_counts_of_a_wrong_size_raise():
    with pytest.raises(ConfigError, match="got the shape"):
        Histogram(np.zeros(100, dtype=np.int64))


@given(FLOATS, st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_buckets_hold_every_finite_element(x, n):
    b = Histogram.of(torch.from_numpy(x)).tensorboard_buckets(n)
    assert b.num == len(x)
    assert sum(b.bucket_counts) == pytest.approx(len(x))
    assert (b.min, b.max) == (x.min(), x.max())
    assert (np.diff(b.bucket_limits) > 0).all()
    assert b.bucket_limits[-1] == pytest.approx(x.max(), abs=1e-38)
    assert min(b.bucket_counts) >= 0


def test_buckets_agree_with_numpy_on_many_elements():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(4))
    b = Histogram.of(x).tensorboard_buckets()
    expected, edges = np.histogram(x.double().numpy(), 30)
    assert b.bucket_limits == pytest.approx(edges[1:])
    assert abs(np.array(b.bucket_counts) - expected).max() < 0.02 * len(x)
    assert b.sum_squares == pytest.approx(len(x), rel=0.02)


@given(FLOATS, st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_a_bin_that_straddles_edges_is_divided_in_proportion(x, n):
    h = Histogram.of(torch.from_numpy(x))
    b = h.tensorboard_buckets(n)
    edges, below = bin_edges(), [0.0] * len(b.bucket_limits)
    for i in h.counts.nonzero()[0]:
        low, high = (0.0, 0.0) if i in (2047, 2048) else edges[i : i + 2]
        low, high = np.clip([low, high], x.min(), x.max())
        for k, limit in enumerate(b.bucket_limits):
            below[k] += h.counts[i] * (np.clip((limit - low) / (high - low), 0, 1) if high > low else limit >= high)
    assert np.cumsum(b.bucket_counts) == pytest.approx(below, rel=1e-6, abs=1e-6)


def test_edges_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        bin_edges()[0] = 0.0


def test_buckets_of_no_elements_and_of_constants():
    nothing = Histogram.of(torch.tensor([math.nan])).tensorboard_buckets()
    assert (nothing.num, nothing.bucket_limits, math.isnan(nothing.min)) == (0, [], True)
    constant = Histogram.of(torch.full((4,), 2.5)).tensorboard_buckets()
    assert (constant.bucket_limits, constant.bucket_counts, constant.sum) == ([2.5], [4.0], 10.0)


@given(st.lists(st.tuples(ANY, st.booleans()), min_size=1, max_size=7), st.booleans())
@settings(deadline=None, max_examples=60)
def test_several_histograms_together_give_what_each_gives_alone(sets, finite_only):
    alone = [Histogram.of(torch.from_numpy(x)) for x, _ in sets]
    alone = [h if is_known else Histogram(h.counts) for h, (_, is_known) in zip(alone, sets, strict=True)]
    q = [0.0, 0.3, 0.5, 1.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram, "_BLOCK", 3)
        found, buckets = together(alone).quantile(q, finite_only), together(alone).tensorboard_buckets(5)
    np.testing.assert_equal(found.T, [h.quantile(q, finite_only) for h in alone])
    for several, h in zip(buckets, alone, strict=True):
        one = h.tensorboard_buckets(5)
        magnitudes = math.sqrt(
            max(one.num, 1) * one.sum_squares
        )  # at least their sum; the order of additions may differ
        assert several.sum == pytest.approx(one.sum, rel=0, abs=1e-12 * magnitudes)
        assert several.sum_squares == pytest.approx(one.sum_squares, rel=1e-12)
        np.testing.assert_equal(
            astuple(replace(several, sum=0.0, sum_squares=0.0)), astuple(replace(one, sum=0.0, sum_squares=0.0))
        )


def spread(seed):
    """Return sets of numbers of many sizes and magnitudes, some of them empty, constant or not finite."""
    draw = torch.Generator().manual_seed(seed)
    sets = [torch.randn(n, generator=draw) * 10.0 ** (n % 9 - 4) for n in (1, 2, 7, 100, 3000, 20_000, 70_000)]
    sets += [torch.zeros(5), -torch.zeros(3), torch.full((4,), 2.5), torch.empty(0), sets[4].relu(), sets[3] + 1e3]
    sets += [torch.tensor([odd, 1.0, -3.0, 0.0]) for odd in (math.nan, math.inf, -math.inf)]
    return [*sets, torch.tensor([math.inf, -math.inf, math.nan]), torch.tensor([1e-45, -1e-45, 3.4e38])]


@pytest.mark.skipif(library() is None, reason="the native library cannot be built here")
@pytest.mark.parametrize("are_known", [True, False])
@pytest.mark.parametrize("m", [1, 3, 7])
def test_the_native_library_computes_the_same_numbers(m, are_known):
    alone = [Histogram.of(x, m) for x in spread(m) * (4 if m == 3 else 1)]  # more than a block
    counts = [h.counts for h in alone]
    low, high = (np.array([getattr(h, name) for h in alone], np.float64) for name in ("min", "max"))
    if not are_known:
        low[::2], high[::3] = math.nan, math.nan
    native, plain = Histograms(counts, low, high), Histograms(counts, low, high, native=False)
    q = [0.0, 0.0013, 0.25, 0.5, 0.9, 1.0]
    for finite_only in (True, False):
        got, want = native.quantile(q, finite_only), plain.quantile(q, finite_only)
        np.testing.assert_array_equal(got, want, strict=True)
    for n in (1, 30, 1000):
        got, want = (numbers_of(each.tensorboard_buckets(n)) for each in (native, plain))
        np.testing.assert_array_equal(got, want, strict=True)


def numbers_of(buckets):
    """Return all numbers of buckets; how many there are depends on the numbers."""
    parts = [[b.min, b.max, b.num, b.sum, b.sum_squares, *b.bucket_limits, *b.bucket_counts] for b in buckets]
    return np.concatenate(parts)


def test_no_element_lies_between_an_extremum_and_the_first_bin_of_a_sample():
    """A sample may lack the extrema, which are known of all elements."""
    b = Histogram(codes(torch.tensor([1.0, 1.5, 2.0])).numpy(), min=-6.0, max=10.0).tensorboard_buckets(4)
    assert b.bucket_limits == [-2.0, 2.0, 6.0, 10.0]
    assert b.bucket_counts == [0.0, 2.0, 1.0, 0.0]


def test_infinite_extrema_do_not_change_the_buckets():
    b = Histogram.of(torch.tensor([-math.inf, 1.0, 1.5, math.nan])).tensorboard_buckets(2)
    assert b.num == 2
    assert 1.0 <= b.min < b.max <= 1.625


def test_a_sample_uses_its_own_generator_and_not_the_global_one():
    x = torch.arange(1000.0)
    before = torch.random.get_rng_state()
    a = sample(x, torch.Generator().manual_seed(7), 100)
    b = sample(x, torch.Generator().manual_seed(7), 100)
    assert torch.equal(a, b)
    assert len(set(a.tolist())) > 50
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(sample(x, size=1000), x)


def test_the_error_of_a_sample_is_as_documented():
    x = torch.arange(100_000.0) / 100_000
    medians = [sample(x, torch.Generator().manual_seed(s), 1000).quantile(0.5).item() for s in range(200)]
    assert np.std(medians) == pytest.approx(math.sqrt(0.25 / 1000), rel=0.2)
