"""Fingerprints of the bits of parameters, gradients and optimizer states: of a run, and compared between ranks."""

import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.export.messages import MessageBatch, ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.bits import bit_sum
from ikkuna_subscribers._helpers import require_integers, require_parameter_kind

log = logging.getLogger("ikkuna")

_STATES = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step"),
)
REPLICATED = (
    *("weights", "biases", "weight_gradients", "bias_gradients"),
    *(f"{role}_state_{field}" for field in _STATES for role in ("weight", "bias")),
)
"""The kinds that replicas have in common: parameters, reduced gradients, and the state of the optimizers of torch."""

_MOST_TURNS = 8
_BUDGET = 1 << 30


class _BitsSubscriber(PlotSubscriber):
    """Reads the bits of tensors of parameters, those of optimizer states and of large models by turns.

    Parameters
    ----------
    kinds : str or sequence of str
        The kinds.
    results : tuple of str
        The endings of the published kinds.
    budget : int
        The number of bytes that a sample may read of each kind of a parameter or gradient.
    **options : Any
        See `Subscriber`.
    """

    merge = "ranks"

    def __init__(self, kinds: str | Iterable[str], results: tuple[str, ...], budget: int, **options: Any) -> None:
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        require_integers(type(self).__name__, budget=budget)
        for kind in kinds:
            require_parameter_kind(type(self).__name__, kind)
        name_results(options, *(f"{kind}_{result}" for kind in kinds for result in results))
        super().__init__(kinds, **options)
        self.budget = budget
        self._results = len(results)
        self._sample, self._step = -1, -1
        self._turns: int | None = None

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the fingerprint of the tensor; ``None`` if it is not its turn."""
        if message.global_step != self._step:
            self._sample, self._step = self._sample + 1, message.global_step
        turns = _MOST_TURNS if "_state_" in message.kind else self._turns_of_weights()
        if turns > 1 and (_number(message) + self._sample) % turns:
            return None
        return bit_sum(message.data)

    def _turns_of_weights(self) -> int:
        if self._turns is None:
            sizes = [math.prod(shape) for entry in self.network for _, shape in entry.parameters if shape is not None]
            self._turns = min(max(math.ceil(4 * sum(sizes) / self.budget), 1), _MOST_TURNS)
            if self._turns > 1:
                log.info("%r reads each parameter in one of %d samples, within its budget", self, self._turns)
        return self._turns

    def _published(self, kind: str) -> Sequence[str]:
        begin = self._results * self.kinds.index(kind)
        return self.publishes[begin : begin + self._results]


def _number(message: ModuleMessage) -> int:
    return zlib.crc32(f"{message.kind} {message.series_name}".encode())


class FingerprintSubscriber(_BitsSubscriber):
    """A number that changes with each bit of a tensor, for the comparison of runs that should be equal.

    Takes parameters, their gradients and optimizer states; publishes ``{kind}_fingerprint``, 53 bits of `ikkuna.numerics.bits.bit_sum`
    that depend on all of its 64.  Files of TensorBoard keep 24 of these bits, JSON lines all of them.
    Of shards the fingerprints of all ranks are added; replicas count once.
    States of the optimizer, and large models, are read by turns over at most eight samples.

    Look for: the first step and tensor that differ between two runs, which ``ikkuna diff`` names.  The numbers have no other meaning.

    Parameters
    ----------
    kinds : str or sequence of str
        What to read.
    budget : int
        The number of bytes that a sample may read of the parameters of the network; larger networks are read by turns.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> FingerprintSubscriber("weights").publishes
    ('weights_fingerprint',)
    """

    quantity = Quantity(is_exact=True)

    def __init__(self, kinds: str | Iterable[str] = "weights", budget: int = _BUDGET, **options: Any) -> None:
        super().__init__(kinds, ("fingerprint",), budget, **options)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the number of a tensor that was read."""
        table = np.asarray(message.data, np.float64)
        if table.ndim == 1:  # one process
            table = np.concatenate(([-1.0], table))[None]
        table = table[~np.isnan(table).any(1)]
        first = {number: row for number, *row in table[::-1].tolist() if number >= 0}
        rows = [*first.values(), *(row for number, *row in table.tolist() if number < 0)]
        if rows:
            total = sum((int(high) << 32) + int(low) for high, low in rows)
            self.emit(message, _mixed(total), *self._published(message.kind))


def _mixed(number: int) -> float:
    """Return 53 bits, each of which depends on all bits of a number modulo 2^64 (the finaliser of SplitMix64)."""
    number &= (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ (number >> shift)) * factor & ((1 << 64) - 1)
    return float((number ^ (number >> 31)) >> 11)


_AVERAGED = 3  # samples


class ReplicaSubscriber(_BitsSubscriber):
    """How many ranks hold other bits of a tensor than the other replicas, and which.

    The 64 bits of `ikkuna.numerics.bits.bit_sum` of each tensor are compared between ranks that hold replicas:

    * the parameters of a ``DistributedDataParallel``, and the state of their optimizers;
      their gradients if the last forward was not in ``no_sync()``
    * the same shard of a DTensor on several ranks, as with FSDP2 on a mesh with replicas
    * tensors whose gradients were equal to the bit, and not zero, on all ranks in three samples in a row: the program averages them

    Other tensors may differ, and are not compared: shards, experts, stages, the models of an ensemble, those of local SGD.

    Takes parameters, their gradients and optimizer states.  For each tensor with replicas it publishes ``{kind}_ranks_unequal``,
    the number of ranks outside of the largest set of replicas with equal bits;
    if this is not 0, also ``{kind}_ranks_unequal_first`` and ``{kind}_ranks_unequal_last``, the lowest and the highest of these ranks,
    or of all replicas if there are several such sets, as with two replicas.
    States of the optimizer, and large models, are read by turns over at most eight samples.

    Look for: any value but 0.

    Parameters
    ----------
    kinds : str or sequence of str
        What to compare.
    budget : int
        The number of bytes that a sample may read of the parameters of the network; larger networks are read by turns.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ReplicaSubscriber("weights").publishes
    ('weights_ranks_unequal', 'weights_ranks_unequal_first', 'weights_ranks_unequal_last')
    """

    quantity = Quantity(low=0.0, zero="good", larger="bad")

    def __init__(self, kinds: str | Iterable[str] = REPLICATED, budget: int = _BUDGET, **options: Any) -> None:
        super().__init__(kinds, ("ranks_unequal", "ranks_unequal_first", "ranks_unequal_last"), budget, **options)
        self._equal: dict[tuple[str | None, bool], int] = {}

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the numbers of all tensors that have replicas; those that all ranks hold and that are equal are compared together."""
        tables: list[Any] = [] if batch.data is None else list(batch.data)
        if not tables or tables[0].ndim == 1:  # one process
            return
        stacked = np.stack(tables)
        is_equal = (stacked[:, 0, 0] >= 0) & (stacked == stacked[:, :1]).all((1, 2))
        if is_equal.any():
            positions = np.flatnonzero(is_equal)
            equal = batch if is_equal.all() else batch.select(positions, batch.names.select(positions))
            self.emit_batch(equal, 0.0, self._published(batch.kind)[0])
        for i in np.flatnonzero(~is_equal).tolist():
            self._compare(batch[i], stacked[i])

    def _compare(self, message: ModuleMessage, table: NDArray[np.float64]) -> None:
        is_read = ~np.isnan(table).any(1)
        if (table[:, 0] == -1).all():  # nothing is declared
            groups = [np.arange(len(table))] if is_read.all() and self._are_averaged(message, table[:, 1:]) else []
        else:
            numbers = set(table[is_read & (table[:, 0] >= 0), 0].tolist())
            groups = [np.flatnonzero(is_read & (table[:, 0] == number)) for number in sorted(numbers)]
        if groups := [ranks for ranks in groups if len(ranks) > 1]:
            self._emit_odd(message, [_odd(ranks, table[ranks, 1:]) for ranks in groups])

    def _are_averaged(self, message: ModuleMessage, bits: NDArray[np.float64]) -> bool:
        """Return whether the gradients of a tensor, of which nothing is declared, have been equal on all ranks."""
        key = message.series_name, message.kind.startswith("bias")
        count = self._equal.get(key, 0)
        if message.kind.endswith("_gradients") and count < _AVERAGED:
            is_equal = bool((bits == bits[0]).all() and bits[0].any())
            count = self._equal[key] = count + 1 if is_equal else 0
        return count >= _AVERAGED

    def _emit_odd(self, message: ModuleMessage, odd: list[tuple[int, list[int]]]) -> None:
        _emit_odd(self, message, odd, self._published(message.kind))


def _emit_odd(
    subscriber: PlotSubscriber, message: ModuleMessage, odd: list[tuple[int, list[int]]], kinds: Sequence[str]
) -> None:
    """Emit how many replicas differ, and the lowest and the highest of their ranks."""
    count = sum(number for number, _ in odd)
    subscriber.emit(message, count, kinds[0])
    if count:
        ranks = [rank for _, ranks in odd for rank in ranks]
        subscriber.emit(message, min(ranks), kinds[1])
        subscriber.emit(message, max(ranks), kinds[2])


def _odd(ranks: NDArray[np.int64], bits: NDArray[np.float64]) -> tuple[int, list[int]]:
    """Return how many replicas differ from the largest set of equal ones, and which of them may be wrong.

    Examples
    --------
    >>> bits = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 1.0]])
    >>> _odd(np.arange(3), bits), _odd(np.arange(2), bits[:2]), _odd(np.arange(2), bits[[0, 2]])
    ((1, [1]), (1, [0, 1]), (0, []))
    """
    _, which, sizes = np.unique(bits, axis=0, return_inverse=True, return_counts=True)
    largest = sizes.max()
    count = len(ranks) - int(largest)
    is_clear = (sizes == largest).sum() == 1
    odd = ranks[sizes[which.reshape(-1)] < largest] if is_clear else ranks
    return count, odd.tolist() if count else []


_MOST_ELEMENTS = 1 << 20


def _is_compared(buffer: Tensor) -> bool:
    is_small = buffer.is_floating_point() and 0 < buffer.numel() <= _MOST_ELEMENTS
    return is_small and buffer.layout is torch.strided and type(buffer) is Tensor


class BufferReplicaSubscriber(PlotSubscriber):
    """How many ranks hold other bits of a buffer than the others, and which, if the program keeps it equal on all ranks.

    No program says that buffers are replicas: the running statistics of a batch norm are different on each rank in a healthy training,
    and a data-parallel wrapper broadcasts those of the first rank before each forward, after which each rank changes its own.
    So a buffer is compared once it was equal to the bit on all ranks in three samples in a row, and had changed between them:
    a ``SyncBatchNorm`` does so, and so do buffers that are broadcast, if they are read after that.

    Takes ``input_data`` as the sign of a call; publishes ``buffers_ranks_unequal``, ``buffers_ranks_unequal_first`` and
    ``buffers_ranks_unequal_last``, as `ReplicaSubscriber` does.  Floating-point buffers of up to 2^20 elements are read in the first
    forward of a step: before a later micro-batch, after one in ``no_sync()``, nothing is broadcast.
    Counters are not compared, because ranks may have different numbers of batches.

    Look for: any value but 0.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> BufferReplicaSubscriber().publishes
    ('buffers_ranks_unequal', 'buffers_ranks_unequal_first', 'buffers_ranks_unequal_last')
    """

    quantity = Quantity(low=0.0, zero="good", larger="bad")
    merge = "ranks"
    reads_model = True

    def __init__(self, **options: Any) -> None:
        name_results(options, *(f"buffers_ranks_unequal{end}" for end in ("", "_first", "_last")))
        super().__init__("input_data", **options)
        self._step = -1
        self._names: list[tuple[str, str]] = []
        self._before: NDArray[np.float64] | None = None
        self._equal = np.zeros(0, np.int64)

    def _buffers(self) -> Iterator[tuple[str, str, Tensor]]:
        for named in self.modules:
            for name, buffer in named.module._buffers.items():
                if buffer is not None and _is_compared(buffer):
                    yield named.name, name, buffer

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the fingerprints of all buffers at the first call in a step; later micro-batches may follow one in ``no_sync()``."""
        if message.path or message.global_step == self._step or not (found := list(self._buffers())):
            return None
        self._step = message.global_step
        self._names = [(module, name) for module, name, _ in found]
        return torch.cat([bit_sum(buffer).to(found[0][2].device) for *_, buffer in found])

    def compute(self, message: NetworkMessage) -> None:
        """Emit the numbers of the buffers that are compared."""
        table = np.asarray(message.data, np.float64)
        count = len(self._names)
        if table.ndim == 1 or table.shape[1] != 1 + 2 * count or np.isnan(table).any():  # one process, or other buffers
            return
        bits = table[:, 1:].reshape(len(table), count, 2)
        if self._before is None or self._before.shape != bits.shape:
            self._equal = np.zeros(count, np.int64)
        else:
            is_expected = self._equal >= _AVERAGED
            for i in np.flatnonzero(is_expected).tolist():
                module, name = self._names[i]
                place = ModuleMessage(message.stamp, message.kind, module=module, path=name, name=f"{module}.{name}")
                _emit_odd(self, place, [_odd(np.arange(len(bits)), bits[:, i])], self.publishes)
            is_equal = (bits == bits[:1]).all((0, 2)) & (bits != self._before).any((0, 2))
            self._equal = np.where(is_expected, self._equal, np.where(is_equal, self._equal + 1, 0))
        self._before = bits
