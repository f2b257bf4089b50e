"""Triton's kernels count the float codes that the host counts; Triton's interpreter runs them."""

import math

import numpy as np
import pytest
import torch

from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.device.triton_launcher import TensorList
from ikkuna.numerics.statistics.float_code import WORTH_SAMPLING, codes, sampled_codes
from tests.numerics.test_measure import with_triton
from tests.statistics_record import row_record

pytestmark = pytest.mark.triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT, BOTH = needed_fields(["codes"]), needed_fields(["codes", "sampled_codes", "sumsq"])
ODD = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 6e-8, 65504.0, -3e38])


@pytest.fixture(autouse=True)
def silent():
    """The interpreter computes with numpy, which warns of infinities."""
    with np.errstate(all="ignore"):
        yield


def random(n, dtype=torch.float32):
    return torch.cat((ODD, torch.randn(n) * torch.randn(n).mul(20).exp()))[:n].to(dtype)


def without_nans(counts):
    """Put all NaN into one bin."""
    return np.concatenate(([counts[:7].sum() + counts[4089:].sum()], counts[7:4089]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 2048, 5001])
def test_codes_of_one_tensor(dtype, n):
    x = random(n, dtype)
    layouts = [x, x[8:], x[::2]] + ([x.view(1667, 3).t(), x.expand(2, n)] if n == 5001 else [])
    for layout in layouts:
        statistics = with_triton()
        statistics.add(0, layout, EXACT)
        counted, expected = row_record(statistics, 0, EXACT).codes, codes(layout).numpy()
        if dtype is torch.float16:  # torch itself converts NaN to different bits, in vectors and alone
            counted, expected = without_nans(counted), without_nans(expected)
        assert (counted == expected).all()
        assert statistics._kernels.kernels.works


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("are_differences", [False, True])
def test_codes_of_a_list(dtype, are_differences):
    xs, ys = ([random(n, dtype) for n in (3, 0, 4100, 33)] for _ in range(2))
    statistics = with_triton()
    if are_differences:
        statistics.add_differences(range(4), xs, ys, BOTH)
    else:
        statistics.add_all(range(4), xs, BOTH)
    assert [type(rows).__name__ for rows in statistics._kernels.written] == ["KernelRows"]
    for i in (0, 2, 3):
        x = xs[i].float() - ys[i].float() if are_differences else xs[i]
        record = row_record(statistics, i, BOTH)
        assert (record.codes == codes(x).numpy()).all()
        assert (record.sampled_codes == record.codes).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_is_copied_while_it_is_measured(dtype):
    xs = [random(n, dtype) for n in (5, 2048, 2500)]
    copies = [torch.zeros_like(x) for x in xs]
    statistics = with_triton()
    statistics.add_all(range(3), xs, EXACT, copies=[copies[0], None, copies[2]])
    assert torch.equal(copies[0].view(torch.uint8), xs[0].view(torch.uint8))
    assert torch.equal(copies[2].view(torch.uint8), xs[2].view(torch.uint8))
    assert not copies[1].any()
    assert (row_record(statistics, 1, EXACT).codes == codes(xs[1]).numpy()).all()


def test_a_sample_of_one_tensor():
    x, fields = random(WORTH_SAMPLING + 77), needed_fields(["sampled_codes"])
    statistics = with_triton()
    for seed in (3, 4):
        statistics.add(0, x, fields, generator=torch.Generator().manual_seed(seed))
    expected = sum(sampled_codes(x, torch.Generator().manual_seed(seed)) for seed in (3, 4))
    assert (row_record(statistics, 0, fields).sampled_codes == expected.numpy()).all()


def test_samples_of_a_list():
    """Every sample of equal elements is the same."""
    xs, ys = [torch.full((n,), 3.0) for n in (9, WORTH_SAMPLING + 9)], [torch.ones(9), torch.ones(WORTH_SAMPLING + 9)]
    kernels, counts = with_triton()._kernels.kernels, torch.zeros(1, 4096, dtype=torch.int32)
    assert kernels.sample_list(TensorList(xs, ys), [1], counts, 2**32 - 1)
    assert kernels.sample_list(TensorList(xs, ys, copies=True), [1], counts, 5)
    assert counts[0].nonzero().flatten().tolist() == codes(torch.tensor([2.0, 3.0])).nonzero().flatten().tolist()
    assert counts.sum() == 2 * 65_536
