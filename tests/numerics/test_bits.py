"""The weighted sum of bits: its definition, and the differences that it must show."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ikkuna.numerics import bits
from ikkuna.numerics.bits import BASE, bit_sum, words_of

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
)


def number(x):
    high, low = bit_sum(x).tolist()
    return ((int(high) << 32) + int(low)) % (1 << 64)


def bytes_of(x):
    """Return the memory of a contiguous tensor as bytes that can be changed."""
    return x.view(-1).view(torch.uint8)


def made(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(2 if dtype is torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


shapes = st.lists(st.integers(0, 9), max_size=3)
tensors = st.builds(made, st.sampled_from(DTYPES), shapes, st.integers(0, 1000))
filled = tensors.filter(lambda x: x.numel())


@given(tensors)
def test_it_is_the_sum_of_its_definition(x):
    signed, size = bytes_of(x).numpy().tobytes(), min(x.element_size(), 4)
    words = [int.from_bytes(signed[i : i + size], "little", signed=True) for i in range(0, len(signed), size)]
    assert number(x) == sum(pow(BASE, i, 1 << 64) * word for i, word in enumerate(words)) % (1 << 64)


@given(filled, st.data())
def test_each_flipped_bit_changes_it(x, data):
    before, raw = number(x), bytes_of(x)
    place = data.draw(st.integers(0, raw.numel() - 1))
    bit = 0 if x.dtype is torch.bool else data.draw(st.integers(0, 7))
    raw[place] ^= 1 << bit
    assert number(x) != before


@given(filled, st.data())
def test_two_exchanged_elements_change_it(x, data):
    i, j = (data.draw(st.integers(0, x.numel() - 1)) for _ in range(2))
    flat = x.view(-1)
    raw = bytes_of(x).view(x.numel(), -1)
    are_equal = torch.equal(raw[i], raw[j])
    before = number(x)
    flat[i], flat[j] = flat[j].clone(), flat[i].clone()
    assert (number(x) == before) == are_equal


@pytest.mark.parametrize("distance", [1, 2, 1 << 10, 1 << 20, 3 << 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_of_the_other_sign_changes_it_wherever_it_is(distance, dtype):
    """Signs are the highest bits, which an even difference of weights would push out of the sum."""
    x = torch.zeros(distance + 1, dtype=dtype)
    x[0] = -0.0
    y = torch.zeros_like(x)
    y[distance] = -0.0
    assert len({number(torch.zeros_like(x)), number(x), number(y)}) == 3


@pytest.mark.parametrize("count", [1, 2, 1000, 1 << 17, 1 << 20])
def test_all_signs_at_once_change_it(count):
    assert len({number(torch.ones(count)), number(-torch.ones(count)), number(-torch.zeros(count)), 0}) == 4


@given(tensors)
def test_operators_and_the_native_function_agree(x):
    words = words_of(x)
    total = bits._sum_by_torch(words)
    assert bit_sum(x).tolist() == [float(total >> 32), float(total & 0xFFFFFFFF)]


def test_operators_and_the_native_function_agree_on_several_chunks():
    words = words_of(made(torch.float32, ((2 << 20) + 7,), 0))
    assert int(bits._sum_by_torch(words)) % (1 << 64) == number(words)


@given(st.sampled_from(DTYPES), st.integers(0, 1000))
def test_strides_do_not_change_it(dtype, seed):
    x = made(dtype, (3, 4, 5), seed)
    other = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not other.is_contiguous()
    assert number(other) == number(x)
    assert number(x[:, ::2]) == number(x[:, ::2].contiguous())


def test_lazy_conjugates_and_negatives_are_read_as_they_are():
    x = made(torch.complex64, (7,), 1)
    assert number(x.conj()) == number(x.conj().resolve_conj()) != number(x)
    assert number(x.conj().imag) == number(x.conj().imag.clone())


def test_empty_tensors_and_zeros_have_zero():
    assert number(torch.empty(0, 3)) == number(torch.zeros(4)) == 0
