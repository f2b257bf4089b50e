"""The first step of a training setup: forward, loss and gradients, and what each module computes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.preflight_checks.batch import Batch, share_between_samples, tensors_of, widened
from ikkuna.diagnosis.preflight_checks.contracts import LossCall, loss_calls
from ikkuna.diagnosis.preflight_checks.outputs import (
    CannotJudgeError,
    IndexOutsideError,
    arranged_scores,
    inner_loss,
    labels_outside,
    last_operations,
    main_output,
)
from ikkuna.diagnosis.preflight_checks.training_setup import TrainingSetup
from ikkuna.numerics.layers import dead_share, unit_counters
from ikkuna.support.modules import module_of, named_parameters
from ikkuna.support.torch_internals import nodes_behind, pytree
from ikkuna.support.undisturbed import run_model


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
    padding_inside : dict of str to float
        For each embedding with a padding index, the share of its sequences that have the index between two other ones.
    truncated : list of Tensor
        Integers that are all equal, converted from floating-point numbers that are not.
    one_index : dict of str to int
        For each embedding that was called with one of these tensors, its index.
    """

    calls: list[CallRecord] = field(default_factory=list)
    rectifiers: list[RectifierRecord] = field(default_factory=list)
    called: dict[nn.Module, int] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    padding_inside: dict[str, float] = field(default_factory=dict)
    truncated: list[Tensor] = field(default_factory=list)
    one_index: dict[str, int] = field(default_factory=dict)


_RECTIFIERS = {
    *(functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    *(functional.relu6, functional.hardtanh),
}


@contextmanager
def recorded(model: nn.Module, names: Mapping[nn.Module, str], size: int | None) -> Iterator[ForwardRecord]:
    """Record the calls of the modules in `names` while the body runs `model`."""
    record = ForwardRecord()
    with ExitStack() as stack:
        for module, name in names.items():
            hooks = _ModuleHooks(record, name, size)
            stack.callback(module.register_forward_pre_hook(hooks.begin, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(hooks.end).remove)
        stack.enter_context(_FunctionMode(record))
        yield record


class _ModuleHooks:
    def __init__(self, record: ForwardRecord, name: str, size: int | None) -> None:
        self.record, self.name, self.size = record, name, size

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.record.called.setdefault(module, len(self.record.called))
        self.record.running.append(self.name)
        if type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward):  # others may add an offset
            indices = args[0] if args else kwargs.get("input")
            _check_indices(self.name, module, indices)
            if any(_shares_memory(indices, each) for each in self.record.truncated):
                self.record.one_index[self.name] = int(indices.flatten()[0])
            padding = getattr(module, "padding_idx", None)
            if padding is not None and isinstance(indices, Tensor) and indices.ndim == 2 and indices.numel():
                words = (indices != padding).int()
                inside = (words.cumsum(1) > 0) & (words.flip(1).cumsum(1).flip(1) > 0) & (words == 0)
                self.record.padding_inside[self.name] = float(inside.any(1).float().mean())

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


def _shares_memory(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


_CONVERSIONS = {Tensor.to, Tensor.type, Tensor.long, Tensor.int, Tensor.short}


class _FunctionMode(TorchFunctionMode):
    def __init__(self, record: ForwardRecord) -> None:
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_rectifier = func in _RECTIFIERS and _is_rectifier(func, args, kwargs or {})
        # the input is 0 everywhere behind a branch that begins at zero, which the first update changes
        is_off = is_rectifier and not _has_signal(args[0] if args else (kwargs or {}).get("input"))
        result = func(*args, **(kwargs or {}))
        if func in _CONVERSIONS and _is_truncated(args[0], result):
            self.record.truncated.append(result)
        if is_rectifier and not is_off and isinstance(result, Tensor):
            counters = unit_counters(result)
            dead = float(dead_share(counters, inactivity=0.0))
            name = self.record.running[-1] if self.record.running else ""
            self.record.rectifiers.append(RectifierRecord(name, counters.shape[1], dead))
        return result


def _is_truncated(numbers: Tensor, result: Tensor) -> bool:
    """Return whether different floating-point numbers were converted to equal integers."""
    if (
        not numbers.is_floating_point()
        or result.is_floating_point()
        or result.is_complex()
        or result.dtype is torch.bool
    ):
        return False
    try:
        return (
            result.numel() > 1
            and int(result.min()) == int(result.max())
            and float(numbers.min()) != float(numbers.max())
        )
    except Exception:  # tensors without values, as in torch.func.vmap
        return False


def _has_signal(value: Any) -> bool:
    """Return whether a tensor has an element that is not 0; call it before a rectifier changes the tensor in place."""
    return isinstance(value, Tensor) and bool(value.detach().any())


def _is_rectifier(func: Any, args: Any, kwargs: Any) -> bool:
    if func is not functional.hardtanh:
        return True
    return bool((args[1] if len(args) > 1 else kwargs.get("min_val", -1.0)) == 0)


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
    foreign : list of nn.Parameter
        Parameters in the graph of the outputs that neither the model nor the loss owned before.
    created : list of str
        The modules that have got some of them in the forward pass.
    has_gradient : bool
        Whether autograd can differentiate the loss.
    gradients : dict of str to Gradient
        By name of the parameter; ``None`` for parameters that the loss does not reach.
    warnings : list of str
        Warnings of the loss.
    stopped : Stopped, optional
        Why later parts are missing.
    loss_calls : list of LossCall
        The calls of losses of torch, in the model and in the loss.
    """

    record: ForwardRecord = field(default_factory=ForwardRecord)
    output: Tensor | None = None
    result: Any = None
    produced_by: tuple[str, ...] = ()
    loss: Tensor | None = None
    foreign: list[nn.Parameter] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    has_gradient: bool = False
    gradients: dict[str, Gradient | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stopped: Stopped | None = None
    loss_calls: list[LossCall] = field(default_factory=list)


def run_first_step(setup: TrainingSetup) -> FirstStep:
    """Return forward, loss and gradients in the modes in which the user left the modules; the optimizers make no step."""
    step = FirstStep()
    batch = setup.batch.copy()
    _check_labels_inside(setup, step)
    if step.stopped:
        return step
    with setup.running(as_training=True, autograd=True), loss_calls() as step.loss_calls:
        with recorded(setup.model, setup.names, batch.size) as step.record:
            try:
                result = run_model(setup.model, batch.inputs)
            except Exception as error:
                running = step.record.running
                step.stopped = Stopped("forward", running[-1] if running else None, error)
                return step
        step.foreign = _foreign_parameters(result, set(map(id, setup.parameters.values())))
        fresh = set(map(id, step.foreign))
        step.created = [module_of(name) for name, p in named_parameters(setup.model) if id(p) in fresh]
        loss = _loss(setup, step, result, batch)
        if loss is not None:
            _add_gradients(setup, step, loss)
    return step


def _foreign_parameters(result: Any, known: set[int]) -> list[nn.Parameter]:
    """Return the parameters in the graphs of the tensors of a result whose ids are not known."""
    leaves = (getattr(node, "variable", None) for node in nodes_behind(tensor.grad_fn for tensor in tensors_of(result)))
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in known]


def _check_labels_inside(setup: TrainingSetup, step: FirstStep) -> None:
    """Compare labels with the output before the model computes a loss, which can end all use of a GPU."""
    labels = setup.batch.labels
    if not setup.batch.loss_inside or not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    try:
        output = setup.evaluate(setup.batch.unlabelled()).output
    except CannotJudgeError:
        return
    task = arranged_scores(output, labels, class_axis_last=True)
    if task and (error := labels_outside(task)):
        step.output, step.stopped = output, Stopped("labels", None, error)


def _loss(setup: TrainingSetup, step: FirstStep, result: Any, batch: Batch) -> Tensor | None:
    with suppress(CannotJudgeError):
        step.produced_by = last_operations(main_output(result, batch.loss_inside).grad_fn)
        step.result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        step.output = main_output(step.result, batch.loss_inside)
    if batch.loss_inside:
        loss = inner_loss(result)
    elif setup.loss is None:
        return None
    else:
        loss = _outer_loss(setup, step, result, batch.labels)
    step.loss = loss.detach() if loss is not None else None
    return loss


def _outer_loss(setup: TrainingSetup, step: FirstStep, result: Any, labels: Any) -> Tensor | None:
    task = None if step.output is None else arranged_scores(step.output, labels)
    ignored = getattr(setup.loss, "ignore_index", -100)
    if task and (error := labels_outside(task, ignored)) and _raises_on_host(setup, result, labels):
        step.stopped = Stopped("labels", None, error)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = setup.call_loss(result, labels)
        except Exception as error:
            step.stopped = Stopped("loss", None, error)
            return None
    step.warnings = [str(warning.message) for warning in caught]
    return loss


def _raises_on_host(setup: TrainingSetup, result: Any, labels: Any) -> bool:
    """Return whether the loss refuses these labels; a loss may ignore some that are out of range."""

    def host(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    try:
        setup.call_loss(*(pytree.tree_map_only(Tensor, host, value) for value in (result, labels)))
    except Exception:
        return True
    return False


def _add_gradients(setup: TrainingSetup, step: FirstStep, loss: Tensor) -> None:
    step.has_gradient = loss.requires_grad
    if loss.numel() != 1 or not loss.requires_grad or not setup.trainable:
        return
    names, parameters = list(setup.trainable), list(setup.trainable.values())
    try:
        gradients = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
    except Exception as error:
        stage = "gradient" if "torch.utils.checkpoint" in str(error) else "backward"
        step.stopped = Stopped(stage, None, error)
        return
    step.gradients = {name: _summarised(value) for name, value in zip(names, gradients, strict=True)}


def _summarised(value: Tensor | None) -> Gradient | None:
    """Return the summary of a gradient; ``None`` if there is none."""
    if value is None:
        return None
    dense = value.to_dense() if value.layout is not torch.strided else value
    rms = float(widened(dense.abs()).square().mean().sqrt()) if dense.numel() else math.nan
    return Gradient(rms, bool(dense.isfinite().all()))
