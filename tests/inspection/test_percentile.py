"""Percentiles of tensors of any size and dtype."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics.histogram import percentiles


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
)
def test_it_is_numpy_s_linear_percentile(values, q):
    expected = np.percentile(np.array(values), q)
    assert percentiles(torch.tensor(values), q) == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)


def test_several_tensors_are_pooled_and_unchanged():
    parts = [torch.tensor([[3.0, 1.0]]), torch.tensor([2], dtype=torch.int64), torch.tensor([], dtype=torch.float16)]
    assert percentiles(parts, [0, 50, 100]) == [1.0, 2.0, 3.0]
    assert parts[0].tolist() == [[3.0, 1.0]]


def test_no_elements_and_nan_give_nan():
    assert math.isnan(percentiles(torch.tensor([]), [50])[0])
    assert math.isnan(percentiles(torch.tensor([1.0, math.nan]), [50])[0])
    assert percentiles(torch.tensor([-math.inf, 1.0, math.inf]), [0, 50, 100]) == [-math.inf, 1.0, math.inf]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_every_dtype(dtype):
    assert percentiles(torch.tensor([1.0, 2.0, 4.0]).to(dtype), [50]) == [2.0]


def test_sparse_zeros_count():
    assert percentiles(torch.tensor([[0.0, 0.0], [0.0, 5.0]]).to_sparse(), [50, 100]) == [0.0, 5.0]


def test_there_is_no_limit_of_elements():
    x = torch.arange(2**24 + 2, dtype=torch.float32)
    assert percentiles(x, [100])[0] == float(x[-1])


def test_a_percentile_out_of_range():
    with pytest.raises(ConfigError, match="0 and 100"):
        percentiles(torch.ones(3), [101])
