"""A model with a batch, a loss and optimizers, as training would use them, and what one step of them records."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from ikkuna.errors import ConfigTypeError
from ikkuna.numerics.layers import dead_share, unit_counters
from ikkuna.support.modules import class_name, named_modules, named_parameters
from ikkuna.support.random_states import RandomReader, RandomStates
from ikkuna.support.torch_internals import BATCH_NORMS, pytree
from ikkuna.support.undisturbed import isolated, run_model, undisturbed, without_replica_wrappers

__all__ = [
    "Batch",
    "CallRecord",
    "CannotJudgeError",
    "Classification",
    "Evaluation",
    "FirstStep",
    "ForwardRecord",
    "Gradient",
    "IndexOutsideError",
    "RectifierRecord",
    "Stopped",
    "TrainingSetup",
    "arranged_scores",
    "by_sample",
    "common_module",
    "counted",
    "inner_loss",
    "labels_outside",
    "last_operations",
    "listed",
    "main_output",
    "module_of",
    "recorded",
    "restored",
    "sample_axis",
    "share_between_samples",
    "split_batch",
    "summarised",
    "tensors_of",
    "train_norms",
    "unobserved",
    "widened",
    "without_labels",
]


def module_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter.

    Examples
    --------
    >>> module_of("encoder.0.weight"), module_of("scale")
    ('encoder.0', '')
    """
    return parameter.rpartition(".")[0]


def common_module(parameters: Sequence[str]) -> str | None:
    """Return the name of the innermost module that contains all parameters; ``None`` if that is the whole model.

    Examples
    --------
    >>> common_module(["encoder.0.weight", "encoder.0.bias"]), common_module(["encoder.0.weight", "encoder.10.weight"])
    ('encoder.0', 'encoder')
    """
    modules = [module_of(name).split(".") for name in parameters]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in shared) or None


def listed(names: Collection[str], most: int = 4) -> str:
    """Return the first names, and how many more there are.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    first = ", ".join(list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 parameters``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_LABELS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one batch.

    Parameters
    ----------
    inputs : object
        What the model is called with: one value, a tuple of arguments, or a dictionary of named arguments.
    labels : object
        What the loss is called with, besides the output; ``None`` without labels.
    loss_inside : bool
        Whether the labels are among the named inputs, because the model computes the loss.
    """

    inputs: Any
    labels: Any = None
    loss_inside: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the inputs, without the labels."""
        return tensors_of(self.inputs if not self.loss_inside else without_labels(self.inputs))

    @property
    def size(self) -> int | None:
        """The number of samples; ``None`` if no tensor shows it.

        The labels decide whether the first or the second axis of the inputs is that of the samples.
        """
        inputs, labels = ([t for t in tensors if t.ndim] for tensors in (self.tensors, tensors_of(self.labels)))
        if not inputs:
            return labels[0].shape[0] if labels else None
        known = labels[0].shape[0] if labels else None
        return known if sample_axis(inputs[0], known) is not None else inputs[0].shape[0]

    def copy(self, device: torch.device | None = None) -> Batch:
        """Return a batch with copies of the tensors, because a model may change its inputs in place."""
        return self.map(lambda tensor: tensor.detach().to(device or tensor.device, copy=True))

    def map(self, function: Callable[[Tensor], Tensor], labels: bool = True) -> Batch:
        """Return a batch with `function` of each tensor; ``labels=False`` leaves separate labels unchanged."""
        changed = _map(function, self.labels) if labels else self.labels
        return replace(self, inputs=_map(function, self.inputs), labels=changed)

    def unlabelled(self) -> Batch:
        """Return a batch with which the model does not compute the loss."""
        return replace(self, inputs=without_labels(self.inputs), loss_inside=False)


def split_batch(batch: Any, has_loss: bool) -> Batch:
    """Return the inputs and the labels of `batch`.

    Parameters
    ----------
    batch : object
        A tensor, ``(inputs, labels)``, ``(input, input, …, labels)``, or a dictionary of named inputs.
    has_loss : bool
        Whether there is a loss function.  Without one, a model with named inputs computes its loss itself.

    Raises
    ------
    ConfigTypeError
        If `batch` is a data loader or another iterator.

    Examples
    --------
    >>> x, y = torch.zeros(2, 3), torch.zeros(2)
    >>> split_batch((x, y), True).labels.shape
    torch.Size([2])
    >>> split_batch({"input_ids": x, "labels": y}, False).loss_inside
    True
    """
    if isinstance(batch, Mapping):
        named = dict(batch)
        name = next((name for name in _LABELS if named.get(name) is not None), "")
        if not has_loss:
            return Batch(named, named.get("labels"), loss_inside=True)
        return Batch({key: value for key, value in named.items() if key != name}, named.get(name))
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and not isinstance(batch, PackedSequence):
        *inputs, labels = batch if len(batch) > 1 else (*batch, None)
        return Batch(inputs[0] if len(inputs) == 1 else tuple(inputs), labels)
    if isinstance(batch, Iterator) or hasattr(batch, "batch_sampler"):
        raise ConfigTypeError(f"batch must be one batch, got a {type(batch).__name__}; pass next(iter(loader))")
    return Batch(batch)


def sample_axis(tensor: Tensor, size: int | None) -> int | None:
    """Return the axis of samples: the first or the second one that has `size` elements."""
    return next((axis for axis in range(min(tensor.ndim, 2)) if tensor.shape[axis] == size), None)


def by_sample(tensor: Tensor, size: int | None, preferred: int = 0) -> Tensor | None:
    """Return `tensor` with the axis of samples first, or ``None`` if it has none.

    Parameters
    ----------
    tensor : Tensor
        (sample, …), (…, sample, …) or, with samples and positions in one axis, (sample · position, …).
    size : int, optional
        The number of samples.
    preferred : int
        The axis of samples if several fit: 0 or 1.

    Examples
    --------
    >>> by_sample(torch.zeros(6, 5), 2).shape
    torch.Size([2, 3, 5])
    """
    if not size or not tensor.ndim:
        return None
    if tensor.ndim > preferred and tensor.shape[preferred] == size:
        return tensor.movedim(preferred, 0)
    axis = sample_axis(tensor, size)
    if axis is not None:
        return tensor.movedim(axis, 0)
    if tensor.shape[0] % size or not tensor.shape[0]:
        return None
    if preferred:
        return tensor.reshape(-1, size, *tensor.shape[1:]).movedim(1, 0)
    return tensor.reshape(size, -1, *tensor.shape[1:])


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value."""
    found: list[Tensor] = []
    _map(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def without_labels(inputs: Any) -> Any:
    """Return named inputs without labels."""
    return {name: value for name, value in inputs.items() if name not in _LABELS}


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    def one(item: Any) -> Any:
        if isinstance(item, PackedSequence):
            return item._replace(data=function(item.data))
        return function(item) if isinstance(item, Tensor) else item

    return pytree.tree_map(one, value, is_leaf=lambda item: isinstance(item, PackedSequence))


_CONTAINERS = ("_parameters", "_buffers", "_modules")


@contextmanager
def restored(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Restore attributes, parameters and buffers of every module in `owners` after the body.

    Some modules initialise their parameters from the first batch, count their calls, or keep tensors for later.
    Attributes are restored by identity; a change inside a user's list or dictionary stays.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> with restored([model]):
    ...     model.calls = 3
    ...     _ = nn.init.zeros_(model.weight)
    >>> hasattr(model, "calls"), bool(model.weight == 0)
    (False, False)
    """
    modules = {id(module): module for owner in owners for module in owner.modules()}.values()
    attributes = [(module, dict(vars(module)), _contents(module)) for module in modules]
    tensors = {id(t): t for module in modules for t in module._parameters.values() if t is not None}.values()
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for module, before, contents in attributes:
            _restore(vars(module), before)
            for name, content in contents.items():
                _restore(before[name], content)
        for tensor, value in values:
            _restore_values(tensor, value)


def _contents(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(module)[name]) for name in _CONTAINERS}


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
        now.clear()
        now.update(before)


def _restore_values(tensor: Tensor, value: Tensor) -> None:
    a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, value))
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.nan_to_num(), b.nan_to_num()):
        with torch.no_grad():
            tensor.copy_(value)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def unobserved(owners: Iterable[nn.Module]) -> Iterator[None]:
    """Remove the forward hooks of ikkuna for the duration of the body, and keep those of the user, which may compute.

    An exporter would otherwise take a pass of a check for the begin of a training step.
    """
    modules = {id(module): module for owner in owners for module in owner.modules()}.values()
    tables: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in _HOOKS]
    before = [(table, dict(table)) for table in tables if any(map(_is_ours, table.values()))]
    for table, hooks in before:
        for key, hook in hooks.items():
            if _is_ours(hook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            added = {key: hook for key, hook in table.items() if key not in hooks}
            table.clear()
            table.update({**hooks, **added})


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.startswith("ikkuna.")


@dataclass(frozen=True)
class Classification:
    """Scores and labels of each prediction.

    Parameters
    ----------
    scores : Tensor of shape (prediction, class)
        Outputs of the model.
    labels : Tensor of shape (prediction,)
        Indices of classes.
    """

    scores: Tensor
    labels: Tensor

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.scores.shape[1]

    @property
    def counted(self) -> Classification:
        """The predictions whose label is the index of a class."""
        known = (self.labels >= 0) & (self.labels < self.classes)
        return Classification(self.scores[known], self.labels[known])

    @property
    def cross_entropies(self) -> Tensor:
        """The cross-entropy of each prediction, of shape (prediction,)."""
        return functional.cross_entropy(self.scores.float(), self.labels.long(), reduction="none")

    @property
    def cross_entropy(self) -> float:
        """Mean cross-entropy; NaN without predictions."""
        return float(self.cross_entropies.mean()) if len(self.labels) else math.nan

    @property
    def negative_score(self) -> float:
        """Mean of the negative score of the label, as ``nll_loss`` computes it; NaN without predictions."""
        if not len(self.labels):
            return math.nan
        return float(functional.nll_loss(self.scores.float(), self.labels.long()))

    @property
    def are_probabilities(self) -> bool:
        """Whether the scores of each prediction are at least 0 and have the sum 1."""
        scores = self.scores.float()
        return bool((scores >= 0).all() and ((scores.sum(1) - 1).abs() < 1e-3).all())

    @property
    def are_log_probabilities(self) -> bool:
        """Whether the exponentials of the scores of each prediction have the sum 1."""
        return bool((self.scores.float().logsumexp(1).abs() < 1e-3).all())

    def shifted(self, batch: int) -> Classification:
        """Return the predictions of the next label of each of `batch` sequences."""
        scores = self.scores.view(batch, -1, self.classes)[:, :-1].flatten(0, 1)
        return Classification(scores, self.labels.view(batch, -1)[:, 1:].flatten())


def arranged_scores(output: Tensor, labels: object, class_axis_last: bool = False) -> Classification | None:
    """Return `output` and `labels` as a classification, or ``None`` if they have other shapes or dtypes.

    Parameters
    ----------
    output : Tensor
        (sample, class), (sample, class, …), (sample, …, class) or (sample · position, class).
    labels : Tensor
        Integers without the axis of classes.
    class_axis_last : bool
        Prefer the last axis if the shapes allow two axes of classes.

    Examples
    --------
    >>> import torch
    >>> arranged_scores(torch.zeros(2, 3, 5), torch.zeros(2, 5, dtype=torch.long)).classes
    3
    >>> round(arranged_scores(torch.zeros(2, 4), torch.tensor([0, 3])).cross_entropy, 4)
    1.3863
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not output.is_floating_point():
        return None
    if output.ndim < 2 or not labels.ndim or not labels.numel():
        return None
    layouts = {
        1: output.shape[:1] + output.shape[2:] == labels.shape,
        output.ndim - 1: output.shape[:-1] == labels.shape or (output.ndim == 2 and len(output) == labels.numel()),
    }
    axes = [axis for axis, fits in layouts.items() if fits and output.shape[axis] > 1]
    if not axes:
        return None
    scores = output.detach().movedim(axes[-1 if class_axis_last else 0], -1).flatten(0, -2)
    return Classification(scores, labels.detach().flatten())


_RECTIFIERS = {
    *(functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    *(functional.relu6, functional.hardtanh),
}


class IndexOutsideError(Exception):
    """An embedding got an index that it does not have."""

    def __init__(self, module: str, low: int, high: int, size: int) -> None:
        super().__init__(f"indices from {low} to {high} for an embedding of {size} rows")
        self.module, self.low, self.high, self.size = module, low, high, size


@dataclass(frozen=True)
class CallRecord:
    """The output of one call of a module.

    Parameters
    ----------
    name : str
        Name of the module.
    module : nn.Module
        The module.
    rms : float
        Root mean square of the output.
    finite : bool
        Whether all elements are finite.
    between : float
        See :func:`share_between_samples`.
    """

    name: str
    module: nn.Module
    rms: float
    finite: bool
    between: float


@dataclass(frozen=True)
class RectifierRecord:
    """The units of one call of a rectifier.

    Parameters
    ----------
    name : str
        Name of the module that called it.
    units : int
        Number of units.
    dead : float
        Share of the units that are 0 for the whole batch.
    """

    name: str
    units: int
    dead: float


@dataclass
class ForwardRecord:
    """The calls of one forward pass, in the order in which they ended.

    Parameters
    ----------
    calls : list of CallRecord
        The calls whose output contains a floating-point tensor.
    rectifiers : list of RectifierRecord
        The rectifiers, also functional ones.
    called : dict of nn.Module to int
        Position of the first call of each module.
    running : list of str
        Names of the modules that are running, the innermost last; after an exception, the modules that raised it.
    """

    calls: list[CallRecord] = field(default_factory=list)
    rectifiers: list[RectifierRecord] = field(default_factory=list)
    called: dict[nn.Module, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)


def share_between_samples(output: Tensor, size: int | None) -> float:
    r"""Return the share of an output's energy that differs between samples.

    :math:`1 - \lVert\bar h\rVert^2 / \overline{\lVert h_n\rVert^2}` with the output :math:`h_n` of sample :math:`n`.
    NaN if the output has no axis of `size` samples, if `size` is below 2, or if all elements are 0.

    Examples
    --------
    >>> share_between_samples(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), 2)
    0.0
    >>> share_between_samples(torch.tensor([[1.0], [-1.0]]), 2)
    1.0
    """
    arranged = by_sample(output.detach(), size)
    if arranged is None or len(arranged) < 2 or not output.numel():
        return math.nan
    samples = widened(arranged.reshape(len(arranged), -1))
    energy = samples.square().sum(1).mean()
    differing = (samples - samples.mean(0)).square().sum(1).mean()
    return float(differing / energy) if energy > 0 else math.nan


def widened(x: Tensor) -> Tensor:
    """Return `x` in a dtype in which squares do not overflow; some accelerators have no float64."""
    return x.double() if x.device.type == "cpu" else x.float()


@contextmanager
def recorded(model: nn.Module, names: Mapping[nn.Module, str], size: int | None) -> Iterator[ForwardRecord]:
    """Record the calls of the modules in `names` while the body runs `model`."""
    record = ForwardRecord()
    with ExitStack() as stack:
        for module, name in names.items():
            hooks = _ModuleHooks(record, name, size)
            stack.callback(module.register_forward_pre_hook(hooks.begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(hooks.end).remove)
        stack.enter_context(_RectifierMode(record))
        yield record


class _ModuleHooks:
    def __init__(self, record: ForwardRecord, name: str, size: int | None) -> None:
        self.record, self.name, self.size = record, name, size

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.record.called.setdefault(module, len(self.record.called))
        self.record.running.append(self.name)
        if type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):  # others may add an offset
            _check_indices(self.name, module, args[0] if args else kwargs.get("input"))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.record.running.pop()
        first = next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)
        if first is None or not first.numel():
            return
        self.record.calls.append(_call_record(self.name, module, first.detach(), self.size))


def _call_record(name: str, module: nn.Module, output: Tensor, size: int | None) -> CallRecord:
    rms = float(widened(output).square().mean().sqrt())
    return CallRecord(name, module, rms, bool(output.isfinite().all()), share_between_samples(output, size))


def _check_indices(name: str, embedding: Any, indices: Any) -> None:
    """Raise before the kernel does: on a GPU it would end every later use of the device."""
    if isinstance(indices, Tensor) and indices.numel() and not indices.is_floating_point():
        low, high, size = int(indices.min()), int(indices.max()), embedding.num_embeddings
        if low < 0 or high >= size:
            raise IndexOutsideError(name, low, high, size)


class _RectifierMode(TorchFunctionMode):
    def __init__(self, record: ForwardRecord) -> None:
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_rectifier = func in _RECTIFIERS and _is_rectifier(func, args, kwargs or {})
        # the input is 0 everywhere behind a branch that begins at zero, which the first update changes
        is_off = is_rectifier and not _has_signal(args[0] if args else (kwargs or {}).get("input"))
        result = func(*args, **(kwargs or {}))
        if is_rectifier and not is_off and isinstance(result, Tensor):
            counters = unit_counters(result)
            dead = float(dead_share(counters, inactivity=0.0))
            name = self.record.running[-1] if self.record.running else ""
            self.record.rectifiers.append(RectifierRecord(name, counters.shape[1], dead))
        return result


def _has_signal(value: Any) -> bool:
    """Return whether a tensor has an element that is not 0; call it before a rectifier changes the tensor in place."""
    return isinstance(value, Tensor) and bool(value.detach().any())


def _is_rectifier(func: Any, args: Any, kwargs: Any) -> bool:
    if func is not functional.hardtanh:
        return True
    return bool((args[1] if len(args) > 1 else kwargs.get("min_val", -1.0)) == 0)


class CannotJudgeError(Exception):
    """A check cannot judge; the text says why."""


@dataclass(frozen=True)
class Stopped:
    """The exception that ended the first step.

    Parameters
    ----------
    stage : {'forward', 'labels', 'loss', 'backward', 'gradient'}
        What ran; ``'gradient'`` if only these checks cannot compute it, as with reentrant checkpoints.
    module : str, optional
        The innermost module that ran.
    error : Exception
        The exception.
    """

    stage: str
    module: str | None
    error: Exception

    @property
    def text(self) -> str:
        """The class and the first line of the exception."""
        lines = str(self.error).strip().splitlines() or [""]
        return f"{type(self.error).__name__}: {lines[0]}"[:300]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter: its root mean square, and whether all elements are finite."""

    rms: float
    finite: bool


@dataclass
class FirstStep:
    """Forward, loss and gradients of the first step, as training would compute them.

    Parameters
    ----------
    record : ForwardRecord
        The calls of modules.
    output : Tensor, optional
        The scores or predictions: the first floating-point tensor of the model's output that is not the loss.
    result : object
        Everything that the model returned, detached.
    produced_by : tuple of str
        Names of the last operations of the output, from the last one, without changes of shape.
    loss : Tensor, optional
        The loss, detached.
    has_gradient : bool
        Whether autograd can differentiate the loss.
    gradients : dict of str to Gradient
        By name of the parameter; ``None`` for parameters that the loss does not reach.
    warnings : list of str
        Warnings of the loss.
    stopped : Stopped, optional
        Why later parts are missing.
    """

    record: ForwardRecord = field(default_factory=ForwardRecord)
    output: Tensor | None = None
    result: Any = None
    produced_by: tuple[str, ...] = ()
    loss: Tensor | None = None
    has_gradient: bool = False
    gradients: dict[str, Gradient | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stopped: Stopped | None = None


def main_output(result: Any, loss_inside: bool) -> Tensor:
    """Return the scores or predictions in the output of a model.

    Raises
    ------
    CannotJudgeError
        If there is no floating-point tensor.
    """
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    loss = inner_loss(result) if loss_inside else None
    candidates = [tensor for tensor in tensors_of(result) if tensor.is_floating_point() and tensor is not loss]
    if not candidates:
        raise CannotJudgeError("the output of the model contains no floating-point tensor")
    return candidates[0]


def inner_loss(result: Any) -> Tensor | None:
    """Return the loss in the output of a model that computes it."""
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(named, Tensor):
        return named
    first = result[0] if isinstance(result, tuple) and result else result
    return first if isinstance(first, Tensor) and first.numel() == 1 else None


def labels_outside(task: Classification, ignored: int = -100) -> IndexOutsideError | None:
    """Return an error if a label is neither a class nor ignored."""
    labels = task.labels[task.labels != ignored]
    if not labels.numel():
        return None
    low, high = int(labels.min()), int(labels.max())
    return IndexOutsideError("labels", low, high, task.classes) if low < 0 or high >= task.classes else None


def summarised(value: Tensor | None) -> Gradient | None:
    """Return the summary of a gradient; ``None`` if there is none."""
    if value is None:
        return None
    dense = value.to_dense() if value.layout is not torch.strided else value
    rms = float(widened(dense.abs()).square().mean().sqrt()) if dense.numel() else math.nan
    return Gradient(rms, bool(dense.isfinite().all()))


_SHAPES = ("View", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Alias", "Clone", "T", "Select", "ToCopy")


def last_operations(output: Tensor) -> tuple[str, ...]:
    """Return the names of the last operations, without those that change only the shape."""
    names: list[str] = []
    node = output.grad_fn
    while node is not None and len(names) < 2:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name.removeprefix("Unsafe").removeprefix("_") not in _SHAPES:
            names.append(name)
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(names)


class Evaluation(NamedTuple):
    """The results of a pass in evaluation mode.

    Parameters
    ----------
    output : Tensor
        The scores or predictions.
    loss : Tensor or None
        The loss, if the model computes it.
    draws : bool
        Whether a global random generator was used.
    """

    output: Tensor
    loss: Tensor | None
    draws: bool


class TrainingSetup:
    """A model with a batch, a loss and optimizers; each pass leaves them as they were.

    A pass restores the model, the loss module and all random states, and starts with the random state of the user.

    Parameters
    ----------
    model : nn.Module
        The model.
    batch : Batch, optional
        The batch.
    loss : callable, optional
        Called with the output and the labels.
    optimizers : tuple of torch.optim.Optimizer
        The optimizers.
    causal : bool, optional
        Whether an output may depend only on earlier positions; ``None`` if the batch decides.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None = None,
        loss: Callable[..., Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
        causal: bool | None = None,
    ) -> None:
        self.model = without_replica_wrappers(model)
        self.loss = loss
        self.optimizers = optimizers
        self.causal = causal
        self.names = {module: name or class_name(module).lower() for name, module in named_modules(model)}
        self.parameters = dict(named_parameters(model))
        if isinstance(loss, nn.Module):
            known = set(map(id, self.parameters.values()))
            own = {f"{class_name(loss).lower()}.{name}": p for name, p in named_parameters(loss)}
            self.parameters |= {name: p for name, p in own.items() if id(p) not in known}
        self._batch = batch if batch is None or self._device is None else batch.copy(self._device)

    @property
    def _device(self) -> torch.device | None:
        """The device of the parameters, if they have one device."""
        devices = {parameter.device for parameter in self.model.parameters()}
        return devices.pop() if len(devices) == 1 and "meta" not in {device.type for device in devices} else None

    # -- what exists without a pass
    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def batch(self) -> Batch:
        """The batch, on the device of the model.

        Raises
        ------
        CannotJudgeError
            If there is none, or if it is empty.
        """
        if self._batch is None:
            raise CannotJudgeError("no batch was given")
        tensors = self._batch.tensors
        if not tensors:
            raise CannotJudgeError("the batch contains no tensor")
        if self._batch.size == 0 or not any(tensor.numel() for tensor in tensors):
            raise CannotJudgeError("the batch is empty")
        return self._batch

    def require_values(self) -> None:
        """Raise `CannotJudgeError` if the parameters have no values."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if any(is_lazy(tensor) for tensor in tensors):
            raise CannotJudgeError("the model has lazy parameters; call it once before")
        if any(tensor.is_meta for tensor in tensors):
            raise CannotJudgeError("the model is on the meta device, where tensors have no values")

    @property
    def _owners(self) -> list[nn.Module]:
        """The modules that passes run: the model, and the loss if it is a module."""
        return [self.model, *([self.loss] if isinstance(self.loss, nn.Module) else [])]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore attributes and values of the model and the loss after the body."""
        try:
            self.require_values()
        except CannotJudgeError:  # no pass will run
            yield
            return
        with restored(self._owners):
            yield

    # -- passes
    @contextmanager
    def running(self, *, as_training: bool = False, autograd: bool = False) -> Iterator[None]:
        """Restore everything after the body.

        Parameters
        ----------
        as_training : bool
            Use the modes in which the user left the modules, instead of evaluation mode.
        autograd : bool
            Record operations for a backward pass.
        """
        self.require_values()
        modes = [(module, module.training) for owner in self._owners for module in owner.modules()]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(unobserved(self._owners))
            for owner in self._owners[1:]:
                stack.enter_context(undisturbed(owner, autograd=True))
            stack.enter_context(isolated(self.model))
            if as_training:
                for module, training in modes:
                    module.training = training
            stack.callback(_refresh_recurrent_weights, self.model)
            stack.enter_context(torch.set_grad_enabled(autograd))
            yield

    def random_states(self) -> RandomStates:
        """Return the states of the random generators, those of the model's device included."""
        return RandomReader({self._device} if self._device is not None else ()).read()

    def evaluate(self, batch: Batch, *, batch_statistics: bool = False) -> Evaluation:
        """Return what the model computes in evaluation mode.

        With ``batch_statistics=True`` batch norms stay in training mode: those of a new model do not normalise otherwise.

        Raises
        ------
        CannotJudgeError
            If the model raises, or if its output contains no tensor.
        """
        with self.running():
            if batch_statistics:
                train_norms(self.model)
            before = self.random_states()
            try:
                result = run_model(self.model, batch.copy().inputs)
            except Exception as error:
                raise CannotJudgeError(
                    f"in evaluation mode the model raises {Stopped('', None, error).text}"
                ) from error
            draws = not before.equals(self.random_states())
            output = main_output(result, batch.loss_inside)
            loss = inner_loss(result) if batch.loss_inside else None
        return Evaluation(output, loss, draws)

    def call_loss(self, result: Any, labels: Any) -> Tensor:
        """Return what the loss function returns for an output and labels."""
        assert self.loss is not None
        if isinstance(self.loss, nn.Module) and type(self.loss).__module__.startswith("torch."):
            result = getattr(result, "logits", result)  # the models of transformers return several values
        loss: Tensor = self.loss(result) if labels is None else self.loss(result, labels)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss function returned a {type(loss).__name__} instead of a tensor")
        return loss


def train_norms(model: nn.Module) -> None:
    """Put batch norms into training mode."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.training = True


def _refresh_recurrent_weights(model: nn.Module) -> None:
    """Let RNNs forget the weights that ``functional_call`` lent them."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._update_flat_weights()
