"""A sum over the bits of a tensor that changes with each of them, and with their order."""

from functools import cache

import torch
from torch import Tensor

from ikkuna.numerics.statistics.native.kernels import library

BASE = 6364136223846793005
"""The base of the weights: odd, and 5 modulo 8."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
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
