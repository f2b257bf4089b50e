"""Sums over the bits of a tensor, or of each of its rows, that change with each of them and with their order."""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import on_device
from ikkuna.numerics.statistics.native.kernels import library

BASE = 6364136223846793005
"""The base of the weights: odd, and 5 modulo 8."""

HASHED = 1024
"""The largest number of elements of a row that a hash reads; they are evenly spaced."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_WHOLE = {**_WORDS, 1: torch.uint8, 8: torch.int64}
_CHUNK = 1 << 20  # words, which bounds the temporary memory to 8 MiB


def words_of(x: Tensor) -> Tensor:
    """Return the bits of a tensor, in the logical order of its elements, as signed integers of 8, 16 or 32 bits.

    Elements of more than 32 bits become several words.

    Examples
    --------
    >>> words_of(torch.tensor([0.0, -0.0])), words_of(torch.tensor(1.0, dtype=torch.float64))
    (tensor([          0, -2147483648], dtype=torch.int32), tensor([         0, 1072693248], dtype=torch.int32))
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    x = x.resolve_neg().contiguous().reshape(-1)
    return x.view(_WORDS[min(x.element_size(), 4)])


def bit_sum(x: Tensor) -> Tensor:
    r"""Return a fingerprint of the bits of a tensor, as its high and low 32 bits.

    .. math:: F = \sum_{i=0}^{n-1} g^i e_i \bmod 2^{64}

    for the words :math:`e_i` of `words_of`, which are signed integers of at most 32 bits, and :math:`g = 6364136223846793005`.
    Two tensors of the same shape and dtype have different fingerprints if they differ

    * in one bit: it changes a word by :math:`\pm 2^k, k < 32`, and :math:`g^i` is odd;
    * in one word, such as a zero of the other sign;
    * by the exchange of two words, up to a distance of :math:`2^{29}`:
      :math:`g^i - g^j` has exactly two factors of 2 more than :math:`i - j`, and the difference of two words has at most 31.

    Other differences are missed with a probability of about :math:`2^{-64}`, if they do not depend on :math:`g`.
    Each byte of the tensor is read once, and no number is rounded.  A tensor without elements, or of zeros, has 0.

    Parameters
    ----------
    x : Tensor
        ``(…)``, any strided tensor with memory, on any device; the result does not depend on its strides.

    Returns
    -------
    Tensor
        ``(2,)``, float64, on the device of `x`: ``F >> 32``, which is signed, and ``F & 0xFFFFFFFF``.

    Examples
    --------
    >>> bit_sum(torch.tensor([1, 0], dtype=torch.int8)).tolist(), bit_sum(torch.tensor([0, 1], dtype=torch.int8)).tolist()
    ([0.0, 1.0], [1481765933.0, 1284865837.0])
    """
    words = words_of(x)
    if words.is_cpu and (kernels := library()) is not None:
        total = torch.tensor(kernels.bit_sum(words), device="cpu")
    else:
        total = _sum_by_torch(words)
    return torch.stack((total >> 32, total & 0xFFFFFFFF)).double()


def _sum_by_torch(words: Tensor) -> Tensor:
    """Return the sum as an integer of 64 bits, computed by operators, which wrap around."""
    powers, step = _powers(words.device), _signed(pow(BASE, _CHUNK, 1 << 64))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in reversed(range(0, words.numel(), _CHUNK)):
        chunk = words[begin : begin + _CHUNK]
        total = total * step + (chunk * powers[: chunk.numel()]).sum()
    return total


@cache
def _powers(device: torch.device) -> Tensor:
    """Return the weights of one chunk, computed there, because a copy would wait."""
    weights = torch.full((_CHUNK,), _signed(BASE), dtype=torch.int64, device=device)
    weights[:1].fill_(1)
    return weights.cumprod(0)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


# -- rows -------------------------------------------------------------------------------------------------------------


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of SplitMix64, a bijection (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_words(rows: Tensor) -> Tensor:
    """Return the bits of up to 1,024 evenly spaced elements of each row: ``(rows, elements)``, int64, on their device.

    Examples
    --------
    >>> row_words(torch.tensor([[0.0, 1.0], [1.0, 0.0]])).tolist()
    [[0, 1065353216], [1065353216, 0]]
    """
    rows = rows.detach()
    rows = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    flat = rows.resolve_neg().reshape(len(rows), -1) if rows.numel() else rows.new_zeros((len(rows), 0))
    if (size := flat.shape[1]) > HASHED:
        flat = flat[:, torch.arange(HASHED, device=flat.device) * size // HASHED]
    return flat.contiguous().view(_WHOLE[flat.element_size()]).long()


def row_bit_sums(words: Tensor) -> Tensor:
    r"""Return :math:`\sum_j w_j b_{ij} \bmod 2^{64}` for each row :math:`i` of `row_words`, with fixed odd weights :math:`w_j`.

    Rows with equal sums have equal bits, but for a probability of about :math:`2^{-64}` a pair.

    Examples
    --------
    >>> a, b, c = row_bit_sums(row_words(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))).tolist()
    >>> a == c, a == b
    (True, False)
    """
    return (words * _weights_of_elements(words.device)[: words.shape[1]]).sum(1)


@cache
def _weights_of_elements(device: torch.device) -> Tensor:
    weights = mixed(np.arange(1, HASHED + 1, dtype=np.uint64)) | np.uint64(1)
    return on_device(torch.from_numpy(weights.view(np.int64)), device)


def row_information(words: Tensor) -> Tensor:
    r"""Return the information in a row whose elements are independent, :math:`-\sum_j \log_2 p_j` in bits.

    :math:`p_j` is the share of pairs of rows that agree in element :math:`j`: of successive rows, or of those a third of all rows apart,
    whichever is smaller, so that rows which come twice do not count.
    Two rows are equal by chance with a probability of 2 to minus this.
    A share of 0 counts as half a pair.  The information is 0 for less than 2 rows.

    Examples
    --------
    >>> row_information(torch.tensor([[0, 5, 1], [0, 5, 2], [0, 6, 3]]))
    tensor(3., dtype=torch.float64)
    """
    if (count := len(words)) < 2:
        return torch.zeros((), dtype=torch.float64, device=words.device)
    shares = [(words[apart:] == words[:-apart]).double().mean(0) for apart in (1, max(count // 3, 1))]
    return -torch.minimum(*shares).clamp(min=0.5 / (count - 1)).log2().sum()
