"""The rows of a batch: which tensors have them, their hashes, their losses, and what is unusual in one of them."""

import copy
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.numerics.bits import HASHED, mixed, row_bit_sums, row_words
from ikkuna.support.failures import switched
from ikkuna.support.torch_internals import pytree
from ikkuna.support.undisturbed import gradients

_AT_ONCE = 1 << 20  # elements


def row_hashes(rows: Tensor) -> NDArray[np.uint64]:
    r"""Return :math:`m(\sum_j w_j b_{ij} \bmod 2^{64})` for each row :math:`i`, with :math:`b_{ij}` the bits of its elements.

    The odd weights :math:`w_j` are fixed and :math:`m` is a bijection, so that the order of elements counts.
    Of more than 1,024 elements of a row, 1,024 evenly spaced ones are read: rows that agree in them have equal hashes.

    Parameters
    ----------
    rows : Tensor
        ``(rows, ...)``, any dtype; at most 8 MiB are needed in addition.

    Examples
    --------
    >>> a, b, c = row_hashes(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).tolist()
    >>> a == c, a == b
    (True, False)
    """
    size, found = np.uint64(rows[:1].numel()), [np.zeros(0, np.uint64)]
    for piece in rows.split(max(_AT_ONCE // max(min(int(size), HASHED), 1), 1)):
        found.append(mixed(row_bit_sums(row_words(piece)).cpu().numpy().view(np.uint64) + size))
    return np.concatenate(found)


def item_hashes(item: Any) -> set[int]:
    """Return the hash of each tensor, array, or list of numbers in an item of a dataset.

    Examples
    --------
    >>> x = torch.arange(4.0)
    >>> item_hashes({"x": x.numpy(), "name": "a"}) == {int(row_hashes(x[None])[0])}
    True
    """
    if isinstance(item, Mapping):
        return set().union(*map(item_hashes, item.values()))
    if isinstance(item, list | tuple) and not (item and all(isinstance(each, numbers.Number) for each in item)):
        return set().union(*map(item_hashes, item))
    if isinstance(item, Tensor | np.ndarray | list | tuple):
        if isinstance(item, np.ndarray) and item.dtype.kind not in "biufc":
            return set()
        return {int(row_hashes(torch.as_tensor(item)[None])[0])}
    return set()


class BatchRows:
    """The rows of a micro-batch: what the model and the loss module were called with.

    The number of rows is `count` if that is the length of a tensor that the model was called with along one of its first two axes, and
    fits the labels.  Otherwise it is the length of the first tensor along its first axis, or along its second one if that is the number
    of labels, and the first is not, and not 1.  A tensor has rows along the axis of this length; labels may have several elements for
    each row, as those of tokens, in the order of the first tensor with rows.  All other tensors belong to all rows.

    Parameters
    ----------
    model_call, loss_call : pair
        Positional and named arguments; those of the loss module without the output of the model.
    count : int, optional
        The number of rows, as far as it is known, as that of the ids that were given.

    Attributes
    ----------
    count : int
        The number of rows; 0 if there is none.

    Examples
    --------
    >>> batch = BatchRows([(torch.ones(3, 2),), {}], [(torch.tensor([0, 1, 2]),), {}])
    >>> batch.count, batch.of([1])[1][0][0].tolist()
    (3, [1])
    >>> words = torch.arange(6).reshape(2, 3)  # two positions of three sequences
    >>> BatchRows([(words,), {}], [(words.flatten(),), {}], count=3).of([1])
    [[(tensor([[1],
            [4]]),), {}], [(tensor([1, 4]),), {}]]
    """

    def __init__(self, model_call: Any, loss_call: Any = None, count: int | None = None) -> None:
        self._leaves, self._tree = pytree.tree_flatten([model_call, loss_call])
        self._names, self._is_label = _names(model_call, loss_call), _label_flags(model_call, loss_call)
        self.count = self._number(count)
        self._axes = [self._axis(leaf, flag) for leaf, flag in zip(self._leaves, self._is_label, strict=True)]
        of_inputs = zip(self._axes, self._is_label, strict=True)
        self._behind = int(next((axis for axis, flag in of_inputs if axis is not None and not flag), 0))

    def _number(self, count: int | None) -> int:
        both = [
            (x, flag) for x, flag in zip(self._leaves, self._is_label, strict=True) if isinstance(x, Tensor) and x.ndim
        ]
        inputs, labels = ([x for x, flag in both if flag is wanted] for wanted in (False, True))
        if not inputs:
            return 0
        is_axis = count is not None and any(count in x.shape[:2] for x in inputs)
        if count and is_axis and all(count in y.shape[:2] or len(y) % count == 0 for y in labels):
            return count
        first, second = len(inputs[0]), inputs[0].shape[1] if inputs[0].ndim > 1 else -1
        of_labels = len(labels[0]) if labels else first
        return second if of_labels == second != first != 1 else first

    def _axis(self, leaf: Any, is_label: bool) -> int | None:
        """Return the axis of the rows; -1 if each row has several elements of the first axis, ``None`` without rows."""
        if not isinstance(leaf, Tensor) or not leaf.ndim or not self.count:
            return None
        if self.count in leaf.shape[:2]:
            return leaf.shape.index(self.count)
        return -1 if is_label and len(leaf) and len(leaf) % self.count == 0 else None

    def leaves(self) -> list[tuple[str, Tensor]]:
        """Return the names of the tensors with rows, and the tensors with the rows along their first axis."""
        found = zip(self._names, self._leaves, self._axes, strict=True)
        return [(name, self._first(leaf, axis)) for name, leaf, axis in found if axis is not None]

    def _first(self, leaf: Tensor, axis: int) -> Tensor:
        if axis == -1:
            sizes = (-1, self.count) if self._behind else (self.count, -1)
            return leaf.reshape(*sizes, *leaf.shape[1:]).movedim(self._behind, 0)
        return leaf.movedim(axis, 0)

    def call(self, tensors: Iterable[Tensor]) -> Any:
        """Return the calls of the model and of the loss module with other tensors in place of :meth:`leaves`.

        Parameters
        ----------
        tensors : iterable of Tensor
            The rows along their first axes; any number of rows.
        """
        given, leaves = iter(tensors), list(self._leaves)
        for i, axis in enumerate(self._axes):
            if axis is not None:
                rows = next(given)
                leaves[i] = rows.movedim(0, self._behind).flatten(0, 1) if axis == -1 else rows.movedim(0, axis)
        return pytree.tree_unflatten(leaves, self._tree)

    def of(self, rows: Sequence[int]) -> Any:
        """Return the calls of the model and of the loss module with some of the rows."""
        return self.call(leaf[list(rows)] for _, leaf in self.leaves())

    def hashes(self) -> NDArray[np.uint64]:
        """Return the hash of each row in the first tensor with rows that the model was called with."""
        return row_hashes(self.leaves()[0][1]) if self.count else np.zeros(0, np.uint64)


def _names(model_call: Any, loss_call: Any) -> list[str]:
    """Return the names of all leaves: those of named arguments, and ``input`` or ``labels`` of the others."""
    found = []
    for call, name in ((model_call, "input"), (loss_call, "labels")):
        for path, _ in pytree.tree_flatten_with_path(call)[0]:
            keys = [key.key for key in path if isinstance(key, pytree.MappingKey)]
            found.append(str(keys[-1]) if keys else name)
    return found


def _label_flags(model_call: Any, loss_call: Any) -> list[bool]:
    return [flag for call, flag in ((model_call, False), (loss_call, True)) for _ in pytree.tree_leaves(call)]


def losses_of_rows(loss: nn.Module, output: Tensor, loss_call: Any, count: int) -> NDArray[np.float64] | None:
    """Return the loss of each row of an output, the mean over its elements; ``None`` if the module has no ``reduction``.

    A shallow copy of the module without hooks is called, so nothing else sees the call.

    Examples
    --------
    >>> losses_of_rows(nn.MSELoss(), torch.zeros(2, 2), [(torch.tensor([[0.0, 0.0], [1.0, 3.0]]),), {}], 2)
    array([0., 5.])
    """
    if not isinstance(getattr(loss, "reduction", None), str):
        return None
    twin: Any = copy.copy(loss)
    twin._forward_hooks, twin._forward_pre_hooks, twin.reduction = {}, {}, "none"
    args, kwargs = loss_call
    values = switched([gradients(False)], lambda: twin(output, *args, **kwargs))
    if not isinstance(values, Tensor) or not values.ndim or values.numel() % count:
        return None
    found: NDArray[np.float64] = values.double().cpu().reshape(count, -1).mean(1).numpy()
    return found


# -- what is unusual ----------------------------------------------------------------------------------------------

_FAR = 8.0  # robust deviations
_LARGER = 4.0  # times the largest value of the other rows


def unusual(batch: BatchRows) -> list[list[str]]:
    """Return for each row what no other row has: values that are not finite, far, or repeated, a rare label, another length.

    A value is far if it is 4 times as large as those of all other rows, or if the mean or the deviation of the row is more than
    8 robust deviations from the median of all rows.

    Examples
    --------
    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4).clone()
    >>> x[2, 1], x[5] = 50.0, x[4]
    >>> [(row, *texts) for row, texts in enumerate(unusual(BatchRows([(x,), {}]))) if texts]
    [(2, 'input has values up to 50, in the other rows up to 1'), (4, 'its content is that of row 5'), (5, 'its content is that of row 4')]
    """
    found: list[list[str]] = [[] for _ in range(batch.count)]
    if not batch.count:
        return found
    for name, leaf in batch.leaves():
        values = leaf.detach().reshape(batch.count, -1).cpu()
        if leaf.is_floating_point():
            _unusual_numbers(name, values.double().numpy(), found)
        elif not leaf.is_complex():
            _unusual_codes(name, values.long().numpy(), found)
    hashes = batch.hashes()
    first: dict[int, int] = {}
    for row, value in enumerate(hashes.tolist()):
        if (other := first.setdefault(value, row)) != row:
            found[row].append(f"its content is that of row {other}")
            if not any("its content" in text for text in found[other]):
                found[other].append(f"its content is that of row {row}")
    return found


def _unusual_numbers(name: str, values: NDArray[np.float64], found: list[list[str]]) -> None:
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0.0)
    for row in np.flatnonzero(~is_finite.all(1)).tolist():
        found[row].append(f"{name} has {int((~is_finite[row]).sum())} values that are NaN or infinite")
    if len(values) < 4 or not values.shape[1]:
        return
    largest = np.abs(finite).max(1)
    order = np.argsort(largest)
    top, others = int(order[-1]), float(largest[order[-2]])
    if largest[top] > _LARGER * others:
        found[top].append(f"{name} has values up to {largest[top]:.4g}, in the other rows up to {others:.4g}")
    for what, numbers_of_rows in (("mean", finite.mean(1)), ("standard deviation", finite.std(1))):
        for row in _far(numbers_of_rows):
            if row != top or largest[top] <= _LARGER * others:
                rest = np.delete(numbers_of_rows, row)
                span = f"{rest.min():.4g} to {rest.max():.4g}"
                found[row].append(f"the {what} of {name} is {numbers_of_rows[row]:.4g}, of the other rows {span}")


def _far(numbers_of_rows: NDArray[np.float64]) -> list[int]:
    distance = np.abs(numbers_of_rows - np.median(numbers_of_rows))
    deviation = 1.4826 * float(np.median(distance))
    return np.flatnonzero((distance > _FAR * deviation) & (deviation > 0)).tolist()


def _unusual_codes(name: str, values: NDArray[np.int64], found: list[list[str]]) -> None:
    """Name a label that no other row has, if most rows share theirs, and rows of another length."""
    if values.shape[1] == 1:
        counts = Counter(values[:, 0].tolist())
        alone = [value for value, count in counts.items() if count == 1]
        if len(alone) <= len(values) // 16:
            for row, value in enumerate(values[:, 0].tolist()):
                if value in alone:
                    found[row].append(f"no other row has the value {value} of {name}")
        return
    padding, count = Counter(values[:, -1].tolist()).most_common(1)[0]
    if count < 2 or len(values) < 4:
        return
    lengths = values.shape[1] - np.argmax(values[:, ::-1] != padding, axis=1)
    lengths = np.where((values == padding).all(1), 0, lengths).astype(np.float64)
    for row in _far(lengths):
        found[row].append(
            f"the length of {name} is {lengths[row]:.0f}, the median of all rows {np.median(lengths):.0f}"
        )
