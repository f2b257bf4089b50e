"""Checks of what the output depends on: its input, other samples, later positions, random numbers."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.mistakes import BATCH_LEAK, BATCH_POSITION, IGNORES_INPUT, INPLACE_CHANGES_OUTPUT, RANDOM_OUTPUT
from ikkuna.diagnosis.preflight_checks.batch import (
    Batch,
    by_sample,
    is_shifted,
    sample_axis,
    share_between_samples,
    tensors_of,
)
from ikkuna.diagnosis.preflight_checks.first_step import ForwardRecord, recorded
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, arranged_scores, main_output
from ikkuna.diagnosis.preflight_checks.signal import has_substitute_gradient, require_different_samples
from ikkuna.diagnosis.preflight_checks.training_setup import restored
from ikkuna.diagnosis.preflight_checks.trial import Trial, perturbed_output
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.torch_internals import BATCH_NORMS
from ikkuna.support.undisturbed import run_model

_EPSILONS = 100  # a kernel may round differently for other data in the batch
_SAME = 1e-10  # of the energy: rounding in float32


def ignores_input(trial: Trial) -> Iterator[Finding]:
    """Find an output that is the same for different inputs, also with other parameters than the initial ones."""
    require_different_samples(trial)
    if _differs(trial, trial.evaluated) or _differs(trial, trial.evaluate(trial.batch, batch_statistics=True).output):
        return
    if _differs(trial, perturbed_output(trial, trial.model.parameters())):
        return
    if not has_substitute_gradient(trial):
        yield IGNORES_INPUT.found(0.0, detail="With other parameters they are so as well.")


def _differs(trial: Trial, output: Tensor) -> bool:
    if by_sample(output, trial.batch.size) is None:
        raise CannotJudgeError("the output has no axis of samples")
    if not (share := share_between_samples(output, trial.batch.size)) >= 0:
        raise CannotJudgeError("the output is not finite in evaluation mode")
    return share > _SAME


def batch_leak(trial: Trial) -> Iterator[Finding]:
    """Find an output of a sample, in evaluation mode, that changes with the other samples of the batch."""
    require_different_samples(trial)
    _require_samples(trial)
    if (
        trial.evaluated.shape == (trial.batch.size,) * 2
        and arranged_scores(trial.evaluated, trial.batch.labels) is None
    ):
        raise CannotJudgeError("the output compares the samples with each other")
    leak, moved = (_least_change(trial, change) for change in (_change_by_others, _change_by_order))
    if not leak and not moved:
        return
    require_no_state(trial)
    if _keeps_graph(trial):
        raise CannotJudgeError("the model keeps a graph, which connects the samples on purpose")
    if leak:
        recurrent = [name for module, name in trial.names.items() if getattr(module, "batch_first", True) is False]
        detail = f"The first axis of {recurrent[0]} is that of time: batch_first is False." if recurrent else ""
        module = _mixing_module(trial) or next(iter(recurrent), None)
        yield BATCH_LEAK.found(leak, module, detail=detail, advice=_order_of_axes(trial, module))
    else:
        yield BATCH_POSITION.found(moved)


def _order_of_axes(trial: Trial, name: str | None) -> str:
    """Return what to check if a module, or the one around it, knows which axis is that of the samples; otherwise nothing."""
    around = [module for module, other in trial.names.items() if name and f"{name}.".startswith(f"{other}.")]
    modules = (each for module in reversed(around) for each in (module, *module.children()))
    known = next((each.batch_first for each in modules if hasattr(each, "batch_first")), None)
    fits = f"batch_first is {known} in this module: compare it with the order of the axes of its input"
    return "" if known is None else f"{fits}, and look for a reshape in place of a transpose"


def _mixing_module(trial: Trial) -> str | None:
    """Return the module that mixes the samples of the first axis, if it is one."""
    size = trial.batch.size

    def copies(tensor: Tensor) -> Tensor:
        axis = sample_axis(tensor, size)
        return tensor if axis is None else _copies_of_last(tensor, axis)

    def last(tensor: Tensor) -> Tensor | None:
        samples = by_sample(tensor, size)
        return None if samples is None else samples[-1:]

    return changing_module(trial, trial.batch.map(copies), last)


def changing_module(trial: Trial, changed: Batch, part: Callable[[Tensor], Tensor | None]) -> str | None:
    """Return the innermost module that first has another output for another batch, although its inputs are the same.

    Parameters
    ----------
    trial : Trial
        The model, with its batch.
    changed : Batch
        The other batch.
    part : callable
        Returns the part of a tensor that is compared; ``None`` if the tensor has no such part.

    Returns
    -------
    str or None
        ``None`` if it is the model itself, or if the model uses random numbers or calls other modules for the other batch.
    """
    if trial.evaluation.draws:
        return None
    before, after = (_calls(trial, batch) for batch in (trial.batch, changed))
    if [name for name, *_ in before] != [name for name, *_ in after]:
        return None

    def differ(a: list[Tensor], b: list[Tensor]) -> list[bool]:
        pairs = [(part(x), part(y)) for x, y in zip(a, b, strict=False)]
        return [_is_other(x, y) for x, y in pairs if x is not None and y is not None and x.shape == y.shape]

    for (name, inputs, outputs), (_, *others) in zip(before, after, strict=True):
        received = differ(inputs, others[0])
        if received and not any(received) and any(differ(outputs, others[1])):
            return name
    return None


def _is_other(a: Tensor, b: Tensor) -> bool:
    return relative_change(a, b, a) > 0 if a.is_floating_point() and a.numel() else not torch.equal(a, b)


def _calls(trial: Trial, batch: Batch) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return name, inputs and outputs of each call of a module inside of the model, in the order in which they end."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def keep(name: str, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = ([t.detach().clone() for t in tensors_of(x)] for x in ((args, kwargs), output))
        calls.append((name, inputs, outputs))

    with trial.running(), ExitStack() as stack:
        for module, name in trial.names.items():
            if module is not trial.model:
                hook = partial(lambda name, module, args, kwargs, output: keep(name, args, kwargs, output), name)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        run_model(trial.model, batch.copy().inputs)
    return calls


def _least_change(trial: Trial, change: Callable[[Trial, int], float]) -> float:
    """Return the change if the samples are those of the first axis, or of the second one if the labels allow that as well.

    Labels that are the inputs of the next position of the second axis show that this is the axis of time.
    """
    found = change(trial, 0)
    labels, (tokens, *_) = trial.batch.labels, trial.batch.tensors
    is_decided = isinstance(labels, Tensor) and (
        (labels.ndim == 1 and tokens.shape[:1] == labels.shape != tokens.shape[1:2]) or is_shifted(labels, tokens, 1)
    )
    has_time_first = any(getattr(module, "batch_first", True) is False for module in trial.names)
    if found and not is_decided and has_time_first:
        with suppress(CannotJudgeError):  # the second axis is not that of samples either
            found = min(found, change(trial, 1))
    return found


def _keeps_graph(trial: Trial) -> bool:
    """Return whether the model uses a graph of the samples that it did not compute.

    That is a matrix of samples times samples, or one of indices of two samples each.
    """
    size = trial.batch.size or 0
    batch = trial.batch.copy()
    constants = _ConstantsMode(batch.tensors)
    with trial.running(), constants:
        run_model(trial.model, batch.inputs)

    def connects(value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.ndim != 2 or not value.numel():
            return False
        is_index = value.dtype in (torch.int32, torch.int64) and 2 in value.shape
        return value.shape == (size, size) or (
            is_index and int(value.min()) >= 0 and size // 2 <= int(value.max()) < size
        )

    return any(map(connects, constants.found))


class _ConstantsMode(TorchFunctionMode):
    """Collects the tensors that functions receive and no function has returned, but for some."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.found: list[Tensor] = []
        self._known = {id(tensor): tensor for tensor in known}  # alive, so that no other tensor has its number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        new = [tensor for tensor in tensors_of((args, kwargs)) if id(tensor) not in self._known]
        self.found += new
        result = func(*args, **kwargs)
        self._known.update((id(tensor), tensor) for tensor in [*new, *tensors_of(result)])
        return result


def _require_samples(trial: Trial) -> None:
    size = trial.batch.size
    for number, tensor in enumerate(trial.batch.tensors):
        if sample_axis(tensor, size) is None or (number and tensor.shape[:2] == (size, size)):
            raise CannotJudgeError("the inputs have no common axis of samples")
    norms = [m for m in trial.first_step.record.called if isinstance(m, BATCH_NORMS)]
    if any(not norm.track_running_stats for norm in norms):
        raise CannotJudgeError("the model has batch norms without running statistics, which mix samples on purpose")
    observing = [flag for name, flag in trial.model.named_buffers() if name.endswith("observer_enabled")]
    if any(bool(flag.any()) for flag in observing):
        raise CannotJudgeError("the model measures ranges for its quantisation in evaluation mode, on purpose")


def _change_by_others(trial: Trial, preferred: int) -> float:
    """Return the relative change of the output of the last sample when all samples become copies of it; 0 if none.

    The first one does not show an RNN along the axis of samples, in which it sees itself only.
    """
    return _change(trial, preferred, _copies_of_last, slice(-1, None))


def _copies_of_last(tensor: Tensor, axis: int) -> Tensor:
    return tensor.narrow(axis, tensor.shape[axis] - 1, 1).expand_as(tensor).clone()


def _change_by_order(trial: Trial, preferred: int) -> float:
    """Return the relative change of the outputs when the samples come in the opposite order; 0 if none.

    A model that uses random numbers has others for the same sample then.
    """
    if trial.evaluation.draws:
        return 0.0
    return _change(trial, preferred, lambda t, axis: t.flip(axis), slice(None), is_reversed=True)


def _change(
    trial: Trial, preferred: int, function: Callable[[Tensor, int], Tensor], part: slice, is_reversed: bool = False
) -> float:
    """Return the relative change of the outputs of some samples when a function of tensor and axis changes the inputs."""
    size = trial.batch.tensors[0].shape[1] if preferred else trial.batch.size

    def changed(tensor: Tensor) -> Tensor:
        fits = tensor.ndim > preferred and tensor.shape[preferred] == size
        axis = preferred if fits else sample_axis(tensor, size)
        return tensor if axis is None else function(tensor, axis)

    before, after = trial.evaluated, trial.evaluate(trial.batch.map(changed)).output
    fits_both = before.shape[:2] == (size, size)  # as in outputs for CTC, with as many times as samples
    axes = range(2 if fits_both else preferred + 1)
    layouts = [(by_sample(before, size, axis), by_sample(after, size, axis)) for axis in axes]
    changes = [
        relative_change(a[part], (b.flip(0) if is_reversed else b)[part], before)
        for a, b in layouts
        if a is not None and b is not None and a.shape == b.shape
    ]
    if not changes:
        raise CannotJudgeError("the output has no axis of samples")
    return min(changes)


def relative_change(a: Tensor, b: Tensor, scale_of: Tensor) -> float:
    """Return the largest difference of two outputs over the largest element of a third; 0 if rounding explains it.

    Raises
    ------
    CannotJudgeError
        If an output is not finite.
    """
    scale = float(scale_of.abs().max())
    difference = float((a - b).abs().max()) if a.numel() else 0.0
    if not math.isfinite(difference) or not math.isfinite(scale):
        raise CannotJudgeError("the output is not finite")
    return difference / scale if difference > _EPSILONS * torch.finfo(a.dtype).eps * scale else 0.0


def require_no_state(trial: Trial) -> None:
    """Raise if the output for one batch changes with the passes before, as that of a network that keeps its state.

    Raises
    ------
    CannotJudgeError
        If it does: then another output for another batch shows nothing.
    """
    before, after = trial.evaluated, trial.evaluate(trial.batch).output
    if before.shape != after.shape or relative_change(before, after, before):
        raise CannotJudgeError("the model keeps a state from one forward to the next")
    require_no_change(trial)


def require_no_change(trial: Trial, as_training: bool = False) -> None:
    """Raise if a forward changes parameters, or buffers in evaluation mode, as one that initialises them from its first batch.

    Raises
    ------
    CannotJudgeError
        If it does: then the output depends on other samples, and on other parameters, in the first forward alone.
    """
    model = trial.model
    with trial.running(as_training=as_training, autograd=True), restored([model]):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():  # earlier passes may have left what this one would write
                    parameter.mul_(1.001)
        values = [*model.parameters(), *([] if as_training else model.buffers())]
        before = [value.detach().clone() for value in values]
        run_model(model, trial.batch.copy().inputs)
        if not all(map(torch.equal, before, values)):
            raise CannotJudgeError("a forward changes parameters or buffers, as one that initialises them")


def inplace_changes_output(trial: Trial) -> Iterator[Finding]:
    """Find an operation in place that changes what another part of the model uses, such as a residual."""
    inplace = {module: name for module, name in trial.names.items() if getattr(module, "inplace", False) is True}
    if not inplace or trial.evaluation.draws:
        return
    if change := _change_without(trial, inplace):
        require_no_state(trial)
        names = [name for module, name in inplace.items() if len(inplace) <= _MOST and _change_without(trial, [module])]
        yield INPLACE_CHANGES_OUTPUT.found(change, names[0] if names else None, modules=tuple(names))


_MOST = 12


def _change_without(trial: Trial, modules: Iterable[Any]) -> float:
    """Return the relative change of the output when some modules do not work in place; 0 if none."""
    changed = [*modules]
    for module in changed:
        module.inplace = False
    try:
        return relative_change(trial.evaluated, trial.evaluate(trial.batch).output, trial.evaluated)
    finally:
        for module in changed:
            module.inplace = True


_DROPOUTS = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.multi_head_attention_forward),
}


_SEED = 271_828  # a user hardly has it


def random_output(trial: Trial) -> Iterator[Finding]:
    """Find an output in evaluation mode that differs between two equal forward passes.

    The model runs a second time only if the first pass has used a random generator.
    """
    if not trial.evaluation.draws:
        return
    before = trial.evaluated
    after, dropouts = _run_again(trial)
    difference = relative_change(before, after, before) if before.shape == after.shape else 1.0
    if not difference:
        return
    if dropouts:
        yield RANDOM_OUTPUT.found(difference, dropouts[0], detail=f"Dropout is on in or behind {listed(dropouts)}.")
    else:
        yield RANDOM_OUTPUT.found(difference, detail="The model may sample on purpose.", at_most="info")


def _run_again(trial: Trial) -> tuple[Tensor, list[str]]:
    """Return the output with other random numbers, and the names of the modules that apply dropout.

    If the model itself calls the function, it is the module that ended last, behind which dropout is applied.
    """
    with trial.running():
        trial.random_states().seeded(_SEED).restore()
        batch = trial.batch.copy()
        with recorded(trial.model, trial.names, batch.size) as record, _DropoutMode(record, trial.root) as mode:
            try:
                result = run_model(trial.model, batch.inputs)
            except Exception as error:
                raise CannotJudgeError(f"with other random numbers the model raises {type(error).__name__}") from error
        return main_output(result, batch.loss_inside), list(dict.fromkeys(mode.modules))


class _DropoutMode(TorchFunctionMode):
    """Collects the modules that call a dropout function which is on."""

    def __init__(self, record: ForwardRecord, root: str) -> None:
        self.record = record
        self.modules: list[str] = []
        self.root = root

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_dropout(func, args, kwargs):
            *_, before = [self.root, *(call.name for call in self.record.calls)]
            self.modules.append(before if self.record.running in ([], [self.root]) else self.record.running[-1])
        return func(*args, **kwargs)


def _is_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of a function applies dropout with a positive rate."""
    if func in _DROPOUTS:
        values = inspect.signature(func).bind(*args, **kwargs)
        values.apply_defaults()
        rate = values.arguments.get("p", values.arguments.get("dropout_p"))
        return bool(rate) and bool(values.arguments["training"])
    if func is functional.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return False
