"""Checks of models of sequences: later positions, the offset of labels, padding."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.mistakes import LABEL_OFFSET, ONE_INDEX, PADDING_CHANGES_OUTPUT, PADDING_INSIDE, TIME_LEAK
from ikkuna.diagnosis.preflight_checks.batch import Batch, is_shifted
from ikkuna.diagnosis.preflight_checks.dependence import changing_module, relative_change, require_no_state
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.store.finding import Finding
from ikkuna.support.modules import shifts_labels


def time_leak(trial: Trial) -> Iterator[Finding]:
    """Find a model of sequences whose output at a position changes with later inputs, which are its labels."""
    tokens, axis = _sequence(trial)
    if difference := _change_by_later(trial, tokens, axis):
        require_no_state(trial)
        start = tokens.shape[axis] // 2

        def earlier(tensor: Tensor) -> Tensor | None:
            with suppress(CannotJudgeError):
                return _by_position(tensor, tokens, axis)[:, :start]
            return None

        module = changing_module(trial, _with_other_tail(trial, tokens, axis), earlier)
        yield TIME_LEAK.found(difference, module, detail=f"The relative change is {difference:.1g}.")


def _change_by_later(trial: Trial, tokens: Tensor, axis: int) -> float:
    """Return the relative change of the outputs of the first half of the positions when later inputs change; 0 if none."""
    start, replaced = tokens.shape[axis] // 2, _with_other_tail(trial, tokens, axis)
    before, after = (
        _by_position(output, tokens, axis) for output in (trial.evaluated, trial.evaluate(replaced).output)
    )
    return relative_change(before[:, :start], after[:, :start], before)


def _with_other_tail(trial: Trial, tokens: Tensor, axis: int) -> Batch:
    """Return the batch with other elements in the second half of its sequences."""
    changed = _other_tail(tokens, axis, tokens.shape[axis] // 2)
    return trial.batch.map(lambda tensor: changed if torch.equal(tensor, tokens) else tensor, labels=False)


def _sequence(trial: Trial) -> tuple[Tensor, int]:
    """Return the sequence of inputs and its axis of time, if the model is to predict the next elements."""
    if trial.causal is False:
        raise CannotJudgeError("the model is not causal")
    sequences = [tensor for tensor in _sequences(trial) if tensor.ndim > 1]
    if not sequences:
        raise CannotJudgeError("the inputs are no sequences")
    axes = [_predicted_axis(trial, tokens) for tokens in sequences]
    place = next((i for i, axis in enumerate(axes) if axis is not None), 0)
    tokens, axis = sequences[place], 1 if trial.causal else axes[place]
    if axis is None:
        raise CannotJudgeError("the labels are not the next inputs; pass causal=True if the model is causal")
    if tokens.shape[axis] < 2:
        raise CannotJudgeError("the sequences have fewer than two elements")
    return tokens, axis


def _sequences(trial: Trial) -> list[Tensor]:
    """Return the inputs of which the labels may be the next ones: ``input_ids``, or else each, as those of a decoder."""
    inputs = trial.batch.inputs
    tokens = inputs.get("input_ids") if isinstance(inputs, dict) else None
    return [tokens] if isinstance(tokens, Tensor) else trial.batch.tensors


def _predicted_axis(trial: Trial, tokens: Tensor) -> int | None:
    labels = trial.batch.labels
    if not isinstance(labels, Tensor) or labels.numel() != tokens.numel():
        return None
    labels = labels.view(tokens.shape)
    if trial.batch.loss_inside:
        known = labels >= 0
        return 1 if shifts_labels(trial.model) and bool((labels == tokens)[known].all()) else None
    shifted = partial(is_shifted, labels, tokens)
    return next((axis for axis in (1, 0) if tokens.shape[axis] > 2 and shifted(axis)), None)


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


_OFFSETS = range(-3, 4)


def label_offset(trial: Trial) -> Iterator[Finding]:
    """Find a model whose output at a position sees no later one and is trained with another element than the next one.

    The labels are found within the inputs at an offset, and the loss may shift outputs and labels once more: a changed label changes
    the gradient of the outputs that are compared with it.
    """
    labels = trial.batch.labels
    tokens = [x for x in _sequences(trial) if x.ndim == 2 and x.shape[1] >= 4 and not x.is_floating_point()]
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        raise CannotJudgeError("the labels are no sequences of tokens")
    sequences = [x for x in tokens if x.numel() == labels.numel()]
    if not sequences:
        raise CannotJudgeError("the inputs are no sequences of tokens with a label each")
    offsets = [[k for k in _OFFSETS if is_at(labels.view(x.shape), x, k)] for x in sequences]
    known = [(x, found[0]) for x, found in zip(sequences, offsets, strict=True) if len(found) == 1]
    if not known:
        raise CannotJudgeError("the labels are not elements of the inputs at one offset")
    sequence, offset = known[-1]  # the inputs of a decoder stand behind those of its encoder
    offset += _inner_shift(trial) if trial.batch.loss_inside else _shift_of_loss(trial, sequence)
    if offset != 1 and not _change_by_later(trial, sequence, 1):
        yield LABEL_OFFSET.found(offset)


def _tokens(trial: Trial) -> Tensor:
    inputs = trial.batch.inputs
    tokens = inputs.get("input_ids") if isinstance(inputs, dict) else trial.batch.tensors[0]
    if not isinstance(tokens, Tensor) or tokens.is_floating_point():
        raise CannotJudgeError("the inputs are no sequences of tokens")
    return tokens


def is_at(labels: Tensor, tokens: Tensor, offset: int) -> bool:
    """Return whether the label at each position is the token `offset` positions later."""
    length = tokens.shape[1]
    wanted = labels[:, max(0, -offset) : length - max(0, offset)]
    given = tokens[:, max(0, offset) : length - max(0, -offset)]
    known = wanted >= 0
    return bool(known.any()) and bool((wanted == given)[known].all())


def _inner_shift(trial: Trial) -> int:
    """Return by how much a model shifts the labels: the causal language models of transformers by one."""
    if shifts_labels(trial.model):
        return 1
    raise CannotJudgeError("the model computes its loss itself")


def _shift_of_loss(trial: Trial, tokens: Tensor) -> int:
    """Return how many positions behind an output the label is with which the loss compares it."""
    middle, labels = tokens.shape[1] // 2, trial.batch.labels.detach()
    changed = labels.clone()
    rows = changed.view(tokens.shape)
    rows[0, middle] = rows[1, 0] if len(rows) > 1 and rows[1, 0] != rows[0, middle] else (rows[0, middle] == 0).long()
    a, b = (_by_position(trial.gradient_of_output(trial.output, y), tokens, 1)[0] for y in (labels, changed))
    differing = (a - b).abs().flatten(1).amax(1) > 1e-3 * a.abs().max()
    positions = differing.nonzero().flatten().tolist()
    if len(positions) != 1:
        raise CannotJudgeError("the loss compares a label with other outputs than one")
    return middle - int(positions[0])


_MORE = 3


def one_index(trial: Trial) -> Iterator[Finding]:
    """Find embeddings whose indices are all equal since numbers were converted to integers."""
    _ = trial.output
    for name, index in trial.first_step.record.one_index.items():
        yield ONE_INDEX.found(index, name)


def padding_inside(trial: Trial) -> Iterator[Finding]:
    """Find an embedding whose padding index is a token between others: the gradient of its row is always zero."""
    _ = trial.output
    for name, share in trial.first_step.record.padding_inside.items():
        if share:
            yield PADDING_INSIDE.found(share, name)


def padding_changes_output(trial: Trial) -> Iterator[Finding]:
    """Find an output that changes with more padding, although a mask, lengths or a padding index are given."""
    tokens, mask, is_padded = _padding(trial)
    if trial.evaluation.draws:
        raise CannotJudgeError("the model uses random numbers in evaluation mode")
    filler = tokens[is_padded][0, -1]

    def longer(tensor: Tensor) -> Tensor:
        if tensor.shape != tokens.shape:
            return tensor
        return torch.cat(
            [tensor, (filler if tensor is tokens else filler * 0).to(tensor).expand(len(tensor), _MORE)], 1
        )

    before, after = trial.evaluated, trial.evaluate(trial.batch.map(longer, labels=False)).output
    if before.shape != after.shape and before.shape[:2] == tokens.shape:
        after = after[:, : tokens.shape[1]]
    if before.shape != after.shape or len(before) != len(tokens):
        raise CannotJudgeError("the output has another shape with more padding")
    chosen = mask if mask is not None and before.shape[:2] == tokens.shape else is_padded
    if change := relative_change(before[chosen], after[chosen], before):
        require_no_state(trial)
        yield PADDING_CHANGES_OUTPUT.found(change)


def _padding(trial: Trial) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the tokens, their mask if there is one, and which sequences have padding at their ends."""
    tokens = _tokens(trial)
    if trial.batch.loss_inside or tokens.ndim != 2:
        raise CannotJudgeError("the sequences are not known")
    others = [tensor for tensor in trial.batch.tensors if tensor is not tokens]
    known = {m.padding_idx for m in trial.names if isinstance(m, nn.Embedding) and m.padding_idx is not None}
    mask, is_padded = None, torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    if not others and len(known) == 1:
        is_padded = tokens[:, -1] == known.pop()
    elif len(others) == 1 and others[0].shape == tokens.shape and set(others[0].unique().tolist()) <= {0, 1}:
        mask, is_padded = others[0].bool(), others[0][:, -1] == 0
    elif len(others) == 1 and others[0].shape == tokens.shape[:1] and not others[0].is_floating_point():
        is_padded = others[0] < tokens.shape[1]
    if not bool(is_padded.any()):
        raise CannotJudgeError("no mask, lengths or padding index show padding at the ends of sequences")
    return tokens, mask, is_padded
