"""Rows of the inputs: which are equal, which of them have other labels, and how those of evaluations differ."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.export.messages import MeasuredStep, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.numerics.bits import HASHED, mixed, row_bit_sums, row_information, row_words

_ROWS = 64
_FEWEST = 8
_FEWEST_LABELS = 16
_FEWEST_RELABELLED = 3
_UNKNOWN = -1  # no hash
_INFORMATION = 30.0  # bits
_KEPT = 1 << 14  # rows, and a sixteenth of it batches


class InputRowsSubscriber(PlotSubscriber):
    """Which rows of the inputs are equal to others, to the last bit, and which of these have different labels.

    Takes ``input_data`` and ``input_labels`` of all passes; publishes ``input_rows_contradicted``, ``input_rows_known``,
    ``input_batch_age``, ``input_batch_repeats``, ``input_labels_repeats``, ``input_rows_mean`` and ``input_rows_deviation``, in shares,
    steps and the unit of the inputs.
    Up to 64 evenly spaced rows of a batch are hashed, see `ikkuna.numerics.bits.row_words`, and up to 16,384 hashes of rows of the
    training are kept.

    * ``input_rows_contradicted``: the share with another label among the rows that equal another row of the batch;
      labels are classes, one for each row, or zeros and ones; labels that are the same in each batch are left out
    * ``input_rows_known``: the share of the rows that earlier samples of the training have had, if those had a label for each
    * ``input_batch_age``: how many steps ago the last sample had the same rows in the same order; 0 if there was none
    * ``input_batch_repeats``: the number of samples so far whose batch was that of the step before
    * ``input_labels_repeats``: the number of samples in a row with the labels of the sample before and other inputs, as soon as three rows
      among them have come with other labels than before; 0 for labels in blocks or periods, as those of pairs, and of fewer than 16 rows
    * ``input_rows_mean`` and ``input_rows_deviation``: of up to 1,024 elements of each row of the first input, if they are fractions;
      of another pass, of at least 8 rows

    The first two and the labels need rows that are not equal by chance, of at least 30 bits, see `ikkuna.numerics.bits.row_information`.
    Of micro-batches, of ranks, and of the batches of another pass the last one counts.

    Look for: known rows in an evaluation pass, and rows with two labels.

    Parameters
    ----------
    first : int
        The number of steps at the beginning that are all sampled, so that a batch that comes several times in a row is seen.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> InputRowsSubscriber().publishes[:2]
    ('input_rows_contradicted', 'input_rows_known')
    """

    quantity = (
        Quantity(low=0.0, high=1.0, scale="share", zero="good", larger="bad"),
        Quantity(low=0.0, high=1.0, scale="share"),
        *(Quantity("steps", low=0.0), Quantity("samples", low=0.0), Quantity("samples", low=0.0)),
        *(Quantity(scale="signed"), Quantity(low=0.0)),
    )
    merge = "last"
    state = ("_rows", "_batches", "_labels", "_repeats")

    def __init__(self, *, first: int = 8, **options: Any) -> None:
        rows, batches = ("contradicted", "known"), ("input_batch_age", "input_batch_repeats", "input_labels_repeats")
        name_results(
            options, *(f"input_rows_{each}" for each in rows), *batches, "input_rows_mean", "input_rows_deviation"
        )
        options.setdefault("tag", None)
        super().__init__(["input_data", "input_labels"], **options)
        self.subscription = self.subscription.sampled(first=first)
        self._rows: dict[int, int] = {}
        self._batches: dict[int, int] = {}
        self._labels = self._repeats = self._labels_repeats = self._relabelled = 0
        self._last: tuple[int, list[int]] = 0, []

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the sums of the bits of the rows in two halves, and four figures of the batch."""
        x = message.data
        if not x.ndim or not x.numel():
            return None
        rows, is_input = x[:: -(-len(x) // _ROWS)], message.kind == "input_data"
        words = row_words(rows)
        sums = row_bit_sums(words)
        table = torch.full((_ROWS + 2, 2), math.nan, dtype=torch.float64, device=x.device)
        table[: len(rows)] = torch.stack((sums >> 32, sums & 0xFFFFFFFF), 1).double()
        if is_input:
            table[_ROWS, 0] = row_information(words)
        elif x.is_floating_point():
            table[_ROWS, 0] = ((rows == 0) | (rows == 1)).all()
        else:
            table[_ROWS, 0].fill_(x.numel() == len(x))  # an assignment of a number waits for the device
        table[_ROWS, 1].fill_(len(x))
        if is_input and x.is_floating_point():
            values = rows.reshape(len(rows), -1)
            values = values[:, :: -(-values.shape[1] // HASHED)].double()  # all of them would cost more than the hashes
            table[_ROWS + 1] = torch.stack(torch.std_mean(values, correction=0)).flip(0)
        return table

    def compute_step(self, measured: MeasuredStep) -> None:
        """Emit the figures of the step or pass."""
        stamp = measured.stamp
        received = {batch.kind: [np.asarray(row, np.float64) for row in batch.data or ()] for batch in measured}
        inputs, labels = received.get("input_data", []), received.get("input_labels", [])
        if not inputs:
            return
        message, is_training = NetworkMessage(stamp, "input_data"), stamp.pass_name == TRAINING
        contradicted, known, age, repeats, labels_repeats, mean, deviation = self.publishes
        if is_training:
            batch, step = hash(tuple(map(_digest, inputs))), stamp.global_step
            passed = step - self._batches.pop(batch, step)
            self._repeats += passed == 1
            self.emit(message, passed, age)
            self.emit(message, self._repeats, repeats)
            _keep(self._batches, {batch: step}, _KEPT >> 4)
        has_rows = len({table[_ROWS, 1] for table in inputs}) == 1  # inputs of different lengths have no common ones
        if has_rows and sum(table[_ROWS, 0] for table in inputs) >= _INFORMATION:
            hashes = _hashes(inputs)
            self.emit(message, sum(each in self._rows for each in hashes) / len(hashes), known)
            if is_training:
                classes = _classes(labels, len(hashes))
                if classes:
                    self.emit(message, self._count_repeats(batch, hashes, classes), labels_repeats)
                if (share := self._contradicted(hashes, classes)) is not None:
                    self.emit(message, share, contradicted)
                # a graph that is given as a whole has labels of some nodes only
                if not labels or labels[0][_ROWS, 1] >= inputs[0][_ROWS, 1]:
                    _keep(self._rows, dict(zip(hashes, classes or [_UNKNOWN] * len(hashes), strict=True)), _KEPT)
        is_sample = is_training or inputs[0][_ROWS, 1] >= _FEWEST
        if is_sample and not math.isnan(inputs[0][_ROWS + 1, 0]):
            self.emit(message, inputs[0][_ROWS + 1, 0], mean)
            self.emit(message, inputs[0][_ROWS + 1, 1], deviation)

    def _count_repeats(self, batch: int, hashes: list[int], classes: list[int]) -> int:
        """Return how many samples in a row have the labels of the sample before, if three rows among them had others before."""
        before, self._last = self._last, (batch, classes)
        if before[0] == batch or before[1] != classes or _are_regular(classes):
            self._labels_repeats = self._relabelled = 0
            return 0
        self._labels_repeats += 1
        pairs = zip(hashes, classes, strict=True)
        self._relabelled += sum(self._rows.get(row, label) not in (label, _UNKNOWN) for row, label in pairs)
        return self._labels_repeats if self._relabelled >= _FEWEST_RELABELLED else 0

    def _contradicted(self, hashes: list[int], labels: list[int]) -> float | None:
        """Return the share of rows with another label among those with an equal row; ``None`` without such rows."""
        if not labels:
            return None
        before, self._labels = self._labels, hash(tuple(labels))
        if before == self._labels:  # they number the rows of the batch, as in contrastive learning
            return None
        of_row: dict[int, set[int]] = {}
        for row, label in zip(hashes, labels, strict=True):
            of_row.setdefault(row, set()).add(label)
        twice = [row for row, count in Counter(hashes).items() for _ in range(count) if count > 1]
        return sum(len(of_row[row]) > 1 for row in twice) / len(twice) if twice else None


def _digest(table: NDArray[np.float64]) -> int:
    """Return a hash that is the same in other processes, unlike that of bytes."""
    return int.from_bytes(blake2b(table.tobytes(), digest_size=8).digest(), "little")


def _hashes(tables: Sequence[NDArray[np.float64]]) -> list[int]:
    """Return the hashes of the rows of tensors that have common rows."""
    count = int(np.isfinite(tables[0][:_ROWS, 0]).sum())
    total = np.zeros(count, np.uint64)
    for table in tables:
        high, low = table[:count].astype(np.int64).T
        total = mixed(total + (high * (1 << 32) + low).view(np.uint64))
    return [int(each) for each in total]


def _classes(tables: list[NDArray[np.float64]], count: int) -> list[int]:
    """Return the hashes of labels that are classes, one for each of `count` rows; none if they are something else."""
    labels = _hashes(tables) if len(tables) == 1 and tables[0][_ROWS, 0] == 1 else []
    return labels if len(labels) == count else []


def _are_regular(labels: Sequence[int]) -> bool:
    """Return whether labels stand in blocks or periods, as those of pairs, episodes and rotations, or are too few.

    Examples
    --------
    >>> _are_regular([1] * 8 + [0] * 8), _are_regular([0, 1, 2, 3] * 4), _are_regular([0, 1, 1, 0, 1, 0, 0, 0] + [1, 0] * 4)
    (True, True, False)
    """
    blocks = sum(1 for _ in groupby(labels))
    periods = range(1, len(labels) // 2 + 1)
    return len(labels) < _FEWEST_LABELS or blocks == len(set(labels)) or any(labels[p:] == labels[:-p] for p in periods)


def _keep(known: dict[int, int], new: Mapping[int, int], most: int) -> None:
    """Add items, and remove the oldest ones if there are more than `most`."""
    known.update(new)
    for key in list(known)[: len(known) - most] if len(known) > most else ():
        del known[key]
