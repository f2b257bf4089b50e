"""Tables of numbers that the Triton kernels read: addresses, chunks, and which rows belong together."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ikkuna.numerics.elements import on_device

__all__ = ["BLOCK", "Chunks", "KernelTables", "Order", "TensorList", "histograms_of", "shares_of"]

BLOCK = 2048
"""Elements of a tile; with twice as many, kernels for sm_90 do not fit into the registers."""

_CHUNK = 16 * BLOCK  # elements that a program reads at least
_PROGRAMS = 396  # three for each multiprocessor of an H100
_PER_HISTOGRAM = 16  # programs that add to one histogram
_HISTOGRAMS = 16  # of a tensor, at most
_MOST_TABLES = 16
_MOST_ADDRESSES = 24  # gradients may have new addresses at every step
T = TypeVar("T")


class TensorList(NamedTuple):
    """Tensors of one dtype that a kernel measures together.

    Parameters
    ----------
    xs : sequence of Tensors
        The tensors.
    others : sequence of Tensors or None
        As many others, or none: what is subtracted, or with `copies`, where to copy each tensor to.
    copies : bool
        Whether `xs` are copied to `others`.
    counts : Tensor, optional
        Histograms ``(histograms, codes)``: `histograms_of` each tensor that has at most `most_counted` elements, in their order.
    most_counted : int
        See `counts`.
    """

    xs: Sequence[Tensor]
    others: Sequence[Tensor | None] = ()
    copies: bool = False
    counts: Tensor | None = None
    most_counted: float = -1


class Chunks(NamedTuple):
    """The chunks of a list of tensors on the device, and the tensor of each; see the kernel ``measure_list``."""

    values: Tensor
    tensors: tuple[int, ...]


class Order(NamedTuple, Generic[T]):
    """Which rows or histograms belong together: the owners, each once, and on the device the numbers of those of each."""

    names: tuple[T, ...]
    order: Tensor
    begin: Tensor


class KernelTables:
    """Tables on one device; those of the last steps are kept, because a step is like the one before.

    Parameters
    ----------
    device : torch.device
        The device.

    Examples
    --------
    >>> tables = KernelTables(torch.device("cpu"))
    >>> names, order, begin = tables.order_of((7, 8, 7))
    >>> names, order.tolist(), begin.tolist()
    ((7, 8), [0, 2, 1], [0, 2, 3])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: dict[tuple[tuple[int, ...], float], Chunks] = {}
        self._drawn: dict[tuple[int, ...], Tensor] = {}
        self._addresses: dict[tuple[int, ...], Tensor] = {}
        self._orders: dict[tuple[Any, ...], Order[Any]] = {}
        self._scales: dict[tuple[float, ...], Tensor] = {}

    def addresses_of(self, tensors: TensorList) -> tuple[Tensor, bool]:
        """Return the addresses of tensors, and whether loads of 16 bytes can read them."""
        addresses = tuple(0 if x is None else x.data_ptr() for x in (*tensors.xs, *tensors.others))
        if (found := self._addresses.get(addresses)) is None:
            found = _keep(self._addresses, addresses, self._send(addresses), _MOST_ADDRESSES)
        return found, all(address % 16 == 0 for address in addresses)

    def chunks_of(self, tensors: TensorList) -> Chunks:
        """Return the chunks ``(tensor, start / BLOCK, stop, histogram)`` that the programs read; -1 for no histogram."""
        key = tuple(x.numel() for x in tensors.xs), tensors.most_counted
        if (known := self._chunks.get(key)) is not None:
            return known
        chunks, first = [], 0
        for tensor, size in enumerate(key[0]):
            starts = range(0, size, _CHUNK)
            histograms = _histograms(len(starts)) if size <= tensors.most_counted else 0
            for i, start in enumerate(starts):
                counted = first + i % histograms if histograms else -1
                chunks.append((tensor, start // BLOCK, min(start + _CHUNK, size), counted))
            first += histograms
        found = Chunks(self._send([x for chunk in chunks for x in chunk]), tuple(c[0] for c in chunks))
        return _keep(self._chunks, key, found)

    def order_of(self, owners: tuple[T, ...]) -> Order[T]:
        """Return the owners, each once, and the numbers of those that belong to each."""
        if (known := self._orders.get(owners)) is not None:
            return known
        names = tuple(dict.fromkeys(owners))
        number = {name: i for i, name in enumerate(names)}
        order = sorted(range(len(owners)), key=lambda i: number[owners[i]])
        ends = [i for i, (a, b) in enumerate(pairwise(order), 1) if owners[a] != owners[b]]
        found = Order(names, self._send(order), self._send((0, *ends, len(order))))
        return _keep(self._orders, owners, found)

    def drawn_of(self, tensors: TensorList, drawn: Sequence[int]) -> Tensor:
        """Return the table ``(number of the tensor, size, histogram)`` of the tensors that are sampled."""
        sizes = [tensors.xs[i].numel() for i in drawn]
        table = tuple(x for entry in zip(drawn, sizes, range(len(drawn)), strict=True) for x in entry)
        if (known := self._drawn.get(table)) is not None:
            return known
        return _keep(self._drawn, table, self._send(table))

    def scales_of(self, scales: tuple[float, ...]) -> Tensor:
        """Return numbers in float64."""
        if (known := self._scales.get(scales)) is not None:
            return known
        return _keep(self._scales, scales, self._send(scales, torch.float64))

    def _send(self, numbers: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return on_device(torch.tensor(numbers, dtype=dtype, device="cpu"), self._device)


K = TypeVar("K")
V = TypeVar("V")


def _keep(tables: dict[K, V], key: K, table: V, most: int = _MOST_TABLES) -> V:
    """Add a table to the others, which are dropped if there are many."""
    if len(tables) > most:
        tables.clear()
    tables[key] = table
    return table


def histograms_of(n: int, in_list: bool = False) -> int:
    """Return how many histograms a kernel uses for a tensor of `n` elements, so that few programs add to the same counts."""
    return _histograms(-(-n // _CHUNK) if in_list else shares_of(n)[1])


def _histograms(programs: int) -> int:
    return min(max(programs // _PER_HISTOGRAM, 1), _HISTOGRAMS) if programs else 0


def shares_of(n: int) -> tuple[int, int]:
    """Return how many elements of a tensor each program reads, and the number of programs."""
    if n <= _CHUNK:
        return _CHUNK, 1
    share = max(_CHUNK, -(-n // _PROGRAMS // BLOCK) * BLOCK)
    return share, -(-n // share)
