"""Checks of whether inputs and labels of the batch belong together."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ikkuna.diagnosis.mistakes import DUPLICATE_ROWS, LABEL_IN_INPUTS, LABELS_OF_OTHER_SAMPLES, LABELS_WITHOUT_GRADIENT
from ikkuna.diagnosis.preflight_checks.batch import by_sample, sample_axis
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.store.finding import Finding

_CHANGED = 1e-3  # of the largest gradient: a loss may divide by weights of all labels
_FEW_SAMPLES, _FEW_ELEMENTS = 8, 8


def labels_of_other_samples(trial: Trial) -> Iterator[Finding]:
    """Find outputs that the loss compares with labels of other samples, as after a reshape in place of a transpose.

    Two samples exchange their inputs, then their labels.  The outputs whose gradient changes with the labels must be among those that
    change with the inputs.  The scores of a prediction count as one output: some of them can stay at the limit of an activation.
    """
    labels, size = _labels(trial), trial.batch.size or 0
    if trial.evaluation.draws or trial.evaluated.shape != trial.output.shape or trial.mixes_outputs:
        raise CannotJudgeError("the output is random, or the loss compares outputs with each other")
    rows = by_sample(torch.arange(labels.numel(), device=labels.device).view(labels.shape), size)
    if rows is None or size < 3:
        raise CannotJudgeError("the labels have no axis of samples")
    flat = rows.reshape(size, -1)
    values = labels.flatten()[flat]
    other = next((i for i in range(1, size) if not torch.equal(values[0], values[i])), None)
    if other is None:
        raise CannotJudgeError("the labels do not differ")
    order = torch.arange(size, device=labels.device)
    order[0], order[other] = other, 0
    exchanged = labels.flatten().clone()
    exchanged[flat.flatten()] = values[order].flatten()

    def swapped(tensor: Tensor) -> Tensor:
        axis = sample_axis(tensor, size)
        return tensor if axis is None else tensor.index_select(axis, order.to(tensor.device))

    output = trial.evaluate(trial.batch.map(swapped, labels=False)).output
    by_inputs = (output - trial.evaluated).abs() > 100 * torch.finfo(output.dtype).eps * trial.evaluated.abs().max()
    a, b = (trial.gradient_of_output(trial.output, y) for y in (labels, exchanged.view(labels.shape)))
    by_labels = (a - b).abs() > _CHANGED * torch.maximum(a.abs().max(), b.abs().max())
    if not labels.is_floating_point() and output.ndim > 1:
        by_inputs, by_labels = by_inputs.any(-1), by_labels.any(-1)
    if any(bool(changed.all()) or not bool(changed.any()) for changed in (by_inputs, by_labels)):
        raise CannotJudgeError("every output depends on every label or input, or none does")
    share = float((by_labels & ~by_inputs).sum() / by_labels.sum())
    if share > 0.5:
        yield LABELS_OF_OTHER_SAMPLES.found(share)


def _labels(trial: Trial) -> Tensor:
    labels = trial.batch.labels
    if trial.loss is None or trial.batch.loss_inside or not isinstance(labels, Tensor) or not labels.ndim:
        raise CannotJudgeError("there is no loss of output and labels")
    if trial.loss_value.numel() != 1 or not bool(trial.loss_value.isfinite()):
        raise CannotJudgeError("the loss is not a finite number")
    return labels


def rows_without_gradient(trial: Trial) -> Iterator[Finding]:
    """Find a loss of one place in the batch, for other outputs and labels as well, or of one of two labels.

    A loss of several places can be that of the training's part of all samples, as for the nodes of a graph.
    """
    labels, size, output = _labels(trial), trial.batch.size or 0, trial.output
    if size < _FEW_SAMPLES or len(output) != size or len(labels) != size:
        raise CannotJudgeError("output and labels have no first axis of samples")
    if bool((output == output[:1]).all()):
        raise CannotJudgeError("the outputs do not differ")
    moved = labels.roll(1, 0)
    silent, silent_moved = _silent_rows(trial, output, labels), _silent_rows(trial, output, moved)
    share = float(silent.float().mean())
    if int(silent.sum()) == size - 1 and torch.equal(silent, silent_moved):
        detail = f"Only row {int((~silent).nonzero())} of {size} has a gradient, whatever outputs and labels are."
        yield LABELS_WITHOUT_GRADIENT.found(share, detail=detail)
    elif labels.is_floating_point() and labels.numel() == size and len(values := labels.unique()) == 2:
        for value in values:
            if torch.equal(silent, labels.flatten() == value) and torch.equal(silent_moved, moved.flatten() == value):
                detail = f"These are the labels of {float(value):g}."
                yield LABELS_WITHOUT_GRADIENT.found(share, detail=detail, advice="" if value else _SIGNS)


_SIGNS = "if the loss multiplies by the labels, convert labels of 0 and 1 with 2 * labels - 1"


def _silent_rows(trial: Trial, output: Tensor, labels: Tensor) -> Tensor:
    """Return which rows have a gradient of exactly zero, with their own outputs and with those of other rows."""
    gradients = [trial.gradient_of_output(y, labels) for y in (output, output.flip(0), output.roll(1, 0))]
    return torch.stack([(gradient.flatten(1) == 0).all(1) for gradient in gradients]).all(0)


def label_in_inputs(trial: Trial) -> Iterator[Finding]:
    """Find a column of the inputs of which the labels are a linear function, to the last digits, without a few far rows too."""
    x, labels = trial.batch.tensors[0], trial.batch.labels
    if not isinstance(labels, Tensor) or x.ndim != 2 or not x.is_floating_point() or labels.numel() != len(x):
        raise CannotJudgeError("the inputs are no columns of numbers with one label each")
    if len(x) < _FEW_SAMPLES or x.shape[1] < 2:
        raise CannotJudgeError("the batch has few samples or columns")
    columns, wanted = (
        x.double() if x.device.type == "cpu" else x.float(),
        labels.flatten().to(torch.float32).to(x.device),
    )
    wanted = wanted.to(columns.dtype)
    correlation = _correlation(columns, wanted)
    found = [
        column
        for column in (correlation.abs() > 1 - 1e-6).nonzero().flatten().tolist()
        if _is_linear_within(columns[:, column], wanted)
    ]
    if found and len(found) < x.shape[1]:
        yield LABEL_IN_INPUTS.found(
            found[0], detail=f"Its correlation with the labels is {float(correlation[found[0]]):.6g}."
        )


def _correlation(columns: Tensor, wanted: Tensor) -> Tensor:
    """Return the correlation of each column with the labels."""
    columns, wanted = columns - columns.mean(0), wanted - wanted.mean()
    found: Tensor = (columns * wanted.unsqueeze(1)).sum(0) / (columns.norm(dim=0) * wanted.norm())
    return found


def _is_linear_within(column: Tensor, wanted: Tensor) -> bool:
    """Return whether a column and the labels correlate without the rows that are the farthest from the median."""
    near = (column - column.median()).abs().argsort()[: len(column) - max(len(column) // 16, 1)]
    if bool((wanted[near] == wanted[near[0]]).all()):
        return True  # the others are the only ones with another label
    return bool(_correlation(column[near].unsqueeze(1), wanted[near]).abs() > 1 - 1e-4)


def duplicate_rows(trial: Trial) -> Iterator[Finding]:
    """Find samples with the same inputs, to the last bit."""
    size, x = trial.batch.size or 0, trial.batch.tensors[0]
    rows = by_sample(x.detach(), size)
    if rows is None or size < _FEW_SAMPLES or rows[0].numel() < _FEW_ELEMENTS or len(trial.batch.tensors) > 1:
        raise CannotJudgeError("the batch has few samples, or several inputs")
    distinct = len(torch.unique(rows.reshape(size, -1), dim=0))
    share = 1 - distinct / size
    labels = trial.batch.labels
    has_labels = isinstance(labels, Tensor) and len(labels.unique()) > 1  # otherwise one row may stand for the shape
    if distinct < size and (distinct > 1 or has_labels):
        at_most = "error" if share >= 0.5 else "info"
        zeros = int((rows.reshape(size, -1) == 0).all(1).sum())
        detail = f"{distinct} of {size} samples are different." + (f" {zeros} are 0 everywhere." if zeros > 1 else "")
        yield DUPLICATE_ROWS.found(share, detail=detail, at_most=at_most)
