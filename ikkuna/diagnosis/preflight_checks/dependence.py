"""Checks of what the output depends on: its input, other samples, later positions, random numbers."""

import inspect
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ikkuna.diagnosis.mistakes import BATCH_LEAK, IGNORES_INPUT, RANDOM_OUTPUT, TIME_LEAK
from ikkuna.diagnosis.preflight_checks.batch import Batch, by_sample, sample_axis, share_between_samples
from ikkuna.diagnosis.preflight_checks.first_step import ForwardRecord, recorded
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, arranged_scores, main_output
from ikkuna.diagnosis.preflight_checks.signal import _require_different_samples
from ikkuna.diagnosis.preflight_checks.trial import Trial, perturbed_output
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.modules import class_name
from ikkuna.support.torch_internals import BATCH_NORMS
from ikkuna.support.undisturbed import run_model

__all__ = ["batch_leak", "ignores_input", "random_output", "relative_change", "time_leak"]


_EPSILONS = 100  # a kernel may round differently for other data in the batch
_SAME = 1e-10  # of the energy: rounding in float32


def ignores_input(trial: Trial) -> Iterator[Finding]:
    """Find an output that is the same for different inputs, also with other parameters than the initial ones."""
    _require_different_samples(trial)
    if _differs(trial, trial.evaluated) or _differs(trial, trial.evaluate(trial.batch, batch_statistics=True).output):
        return
    if not _differs(trial, perturbed_output(trial, trial.model.parameters())):
        yield IGNORES_INPUT.found(0.0, detail="With other parameters they are so as well.")


def _differs(trial: Trial, output: Tensor) -> bool:
    if by_sample(output, trial.batch.size) is None:
        raise CannotJudgeError("the output has no axis of samples")
    share = share_between_samples(output, trial.batch.size)
    return share > _SAME


def batch_leak(trial: Trial) -> Iterator[Finding]:
    """Find an output of a sample, in evaluation mode, that changes with the other samples of the batch."""
    _require_different_samples(trial)
    _require_samples(trial)
    if (
        trial.evaluated.shape == (trial.batch.size,) * 2
        and arranged_scores(trial.evaluated, trial.batch.labels) is None
    ):
        raise CannotJudgeError("the output compares the samples with each other")
    difference = _change_by_others(trial, 0)
    if difference and _keeps_graph(trial):
        raise CannotJudgeError("the model keeps a graph, which connects the samples on purpose")
    if difference and _has_time_first(trial):
        with suppress(CannotJudgeError):  # the second axis is not that of samples either
            difference = min(difference, _change_by_others(trial, 1))
    if difference:
        yield BATCH_LEAK.found(difference)


def _keeps_graph(trial: Trial) -> bool:
    """Return whether a module has a matrix of samples times samples, or a matrix of indices of two samples each."""
    size = trial.batch.size or 0

    def connects(value: Any) -> bool:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.ndim != 2 or not value.numel():
            return False
        is_index = value.dtype in (torch.int32, torch.int64) and 2 in value.shape
        return value.shape == (size, size) or (
            is_index and int(value.min()) >= 0 and size // 2 <= int(value.max()) < size
        )

    return any(
        connects(value) for module in trial.names for value in (*vars(module).values(), *module.buffers(recurse=False))
    )


def _require_samples(trial: Trial) -> None:
    size = trial.batch.size
    for number, tensor in enumerate(trial.batch.tensors):
        if sample_axis(tensor, size) is None or (number and tensor.shape[:2] == (size, size)):
            raise CannotJudgeError("the inputs have no common axis of samples")
    norms = [m for m in trial.first_step.record.called if isinstance(m, BATCH_NORMS)]
    if any(not norm.track_running_stats for norm in norms):
        raise CannotJudgeError("the model has batch norms without running statistics, which mix samples on purpose")


def _has_time_first(trial: Trial) -> bool:
    return any(getattr(module, "batch_first", True) is False for module in trial.names)


def _change_by_others(trial: Trial, preferred: int) -> float:
    """Return the relative change of the output of sample 0 when all samples become copies of it; 0 if none."""
    size = trial.batch.tensors[0].shape[1] if preferred else trial.batch.size

    def copies(tensor: Tensor) -> Tensor:
        fits = tensor.ndim > preferred and tensor.shape[preferred] == size
        axis = preferred if fits else sample_axis(tensor, size)
        return tensor if axis is None else tensor.narrow(axis, 0, 1).expand_as(tensor).clone()

    before, after = trial.evaluated, trial.evaluate(trial.batch.map(copies)).output
    layouts = [(by_sample(before, size, axis), by_sample(after, size, axis)) for axis in range(preferred + 1)]
    changes = [
        relative_change(a[0], b[0], before)
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


def time_leak(trial: Trial) -> Iterator[Finding]:
    """Find a model of sequences whose output at a position changes with later inputs, which are its labels."""
    tokens, axis = _sequence(trial)
    length = tokens.shape[axis]
    start = length // 2
    changed = _other_tail(tokens, axis, start)
    replaced = trial.batch.map(lambda tensor: changed if torch.equal(tensor, tokens) else tensor, labels=False)
    before, after = (
        _by_position(output, tokens, axis) for output in (trial.evaluated, trial.evaluate(replaced).output)
    )
    difference = relative_change(before[:, :start], after[:, :start], before)
    if difference:
        yield TIME_LEAK.found(difference)


def _sequence(trial: Trial) -> tuple[Tensor, int]:
    """Return the sequence of inputs and its axis of time, if the model is to predict the next elements."""
    batch = trial.batch
    tokens = batch.inputs.get("input_ids") if isinstance(batch.inputs, dict) else batch.tensors[0]
    if trial.causal is False:
        raise CannotJudgeError("the model is not causal")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise CannotJudgeError("the inputs are no sequences")
    axis = 1 if trial.causal else _predicted_axis(trial, batch, tokens)
    if axis is None:
        raise CannotJudgeError("the labels are not the next inputs; pass causal=True if the model is causal")
    if tokens.shape[axis] < 2:
        raise CannotJudgeError("the sequences have fewer than two elements")
    return tokens, axis


def _predicted_axis(trial: Trial, batch: Batch, tokens: Tensor) -> int | None:
    labels = batch.labels
    if not isinstance(labels, Tensor) or labels.numel() != tokens.numel():
        return None
    labels = labels.view(tokens.shape)
    if batch.loss_inside:
        known = labels >= 0
        named = "ForCausalLM" in type(trial.model).__name__ or type(trial.model).__name__.startswith("GPT2LMHead")
        encoder = getattr(getattr(trial.model, "config", None), "is_encoder_decoder", False)
        return 1 if named and not encoder and bool((labels == tokens)[known].all()) else None
    shifted = partial(_is_shifted, labels, tokens)
    return next((axis for axis in (1, 0) if tokens.shape[axis] > 2 and shifted(axis)), None)


def _is_shifted(labels: Tensor, tokens: Tensor, axis: int) -> bool:
    length = tokens.shape[axis] - 1
    return torch.equal(labels.narrow(axis, 0, length), tokens.narrow(axis, 1, length))


def _other_tail(tokens: Tensor, axis: int, start: int) -> Tensor:
    """Return `tokens` with other elements from position `start` on, taken from the sequences themselves."""
    length = tokens.shape[axis]
    tail = tokens.narrow(axis, start, length - start)
    for other in (tail.roll(1, 1 - axis), tail.flip(axis), tokens.narrow(axis, 0, 1).expand_as(tail)):
        if not torch.equal(other, tail):
            return torch.cat([tokens.narrow(axis, 0, start), other], axis)
    raise CannotJudgeError("all elements of the sequences are equal")


def _by_position(output: Tensor, tokens: Tensor, axis: int) -> Tensor:
    """Return the output as (sample, time, …)."""
    samples, length = tokens.shape[1 - axis], tokens.shape[axis]
    if output.shape[:2] == tokens.shape[:2]:
        return output.transpose(0, 1) if axis == 0 else output
    if output.ndim == 2 and output.shape[0] == samples * length:
        flat = output.view(*tokens.shape[:2], -1)
        return flat.transpose(0, 1) if axis == 0 else flat
    if output.ndim == 3 and axis == 1 and output.shape[::2] == tokens.shape[:2]:
        return output.transpose(1, 2)
    raise CannotJudgeError("the output has no axis of time")


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
        yield RANDOM_OUTPUT.found(difference, dropouts[0], detail=f"Dropout is on in {listed(dropouts)}.")
    else:
        yield RANDOM_OUTPUT.found(difference, detail="The model may sample on purpose.", at_most="info")


def _run_again(trial: Trial) -> tuple[Tensor, list[str]]:
    """Return the output with other random numbers, and the names of the modules that apply dropout."""
    with trial.running():
        trial.random_states().seeded(_SEED).restore()
        batch = trial.batch.copy()
        with recorded(trial.model, trial.names, batch.size) as record, _DropoutMode(record) as mode:
            try:
                result = run_model(trial.model, batch.inputs)
            except Exception as error:
                raise CannotJudgeError(f"with other random numbers the model raises {type(error).__name__}") from error
        root = class_name(trial.model).lower()
        return main_output(result, batch.loss_inside), list(dict.fromkeys(name or root for name in mode.modules))


class _DropoutMode(TorchFunctionMode):
    """Collects the modules that call a dropout function which is on."""

    def __init__(self, record: ForwardRecord) -> None:
        self.record = record
        self.modules: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_dropout(func, args, kwargs):
            self.modules.append(self.record.running[-1] if self.record.running else "")
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
