"""Tensors of every shape, type and layout a hook may meet."""

import math

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2),
    *(torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64),
)
SHAPES = ((), (1,), (7,), (3, 4), (2, 3, 4), (2, 3, 2, 2), (1, 1), (130_000,))
EMPTY = ((0,), (3, 0), (0, 2, 2))
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, 1e30, -1e30, 1.0)


def contiguous(x):
    return x


def transposed(x):
    return x.transpose(0, -1) if x.ndim else x


def strided(x):
    return torch.stack([x, x + x], -1)[..., 0] if x.ndim else x


def expanded(x):
    return x.unsqueeze(0).expand(3, *x.shape)


def channels_last(x):
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else x


def sparse(x):
    return x.to_sparse() if x.ndim and x.dtype in (torch.float32, torch.float64, torch.int64) else x


LAYOUTS = (contiguous, transposed, strided, expanded, channels_last, sparse)


@st.composite
def tensors(draw, special=True, empty=False):
    """A tensor of normal numbers at some scale and offset, a few of them special."""
    shape = draw(st.sampled_from(SHAPES + EMPTY if empty else SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([1e-12, 1.0, 3.0, 50.0]))
    x = x + draw(st.sampled_from([0.0, 0.0, 5.0]))
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)) if special and x.numel() else []:
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    if not dtype.is_floating_point and not dtype.is_complex:
        x = x.nan_to_num(0, 0, 0).clamp(0, 100)
    layout = draw(st.sampled_from(LAYOUTS))
    return layout(x.to(dtype)) if dtype is not torch.float8_e5m2 else x.to(dtype)


def numbers(x):
    """Return the elements of a tensor as float64, in any order: what a reference is computed from."""
    x = x.to_dense() if x.layout is not torch.strided else x
    x = x.abs() if x.is_complex() else x
    return np.asarray(x.double().tolist(), dtype=np.float64).ravel()
