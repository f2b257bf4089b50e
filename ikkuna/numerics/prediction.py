r"""Figures of a network's outputs and labels together, from which mistakes of a training loop can be seen."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from ikkuna.numerics.accuracy import find_class_axis
from ikkuna.numerics.elements import readable

__all__ = ["PREDICTION_FIGURES", "prediction_figures"]

PREDICTION_FIGURES = (
    "output_dependence",
    "output_cross_entropy",
    "output_classes",
    "output_is_probability",
    "output_magnitude",
    "output_log_normalizer",
    "prediction_entropy",
    "label_entropy",
    "label_mean",
    "label_variance",
    "label_count",
    "output_binary_cross_entropy",
    "output_in_unit_interval",
    "output_uniform_cross_entropy",
)
"""The names of the results of :func:`prediction_figures`, in their order."""

_OF_BINARY = ("output_magnitude", "output_binary_cross_entropy", "output_in_unit_interval")
_MAX_ROWS = 512
_MAX_ELEMENTS = 16_384


def prediction_figures(outputs: Tensor, labels: Tensor | None, ignore_index: int = -100) -> Tensor:
    r"""Return the figures named in :data:`PREDICTION_FIGURES`.

    Let :math:`z_{nc}` be the outputs and :math:`y_n` the labels.
    ``output_dependence`` is :math:`1 - \lVert \bar z \rVert^2 / \overline{\lVert z_n \rVert^2}`, the share of the energy of the
    outputs that differs between samples; with several classes the mean over classes is subtracted from :math:`z_n` first.
    The other figures are those of a classification:
    the mean cross-entropy :math:`-\log p_{n y_n}` with :math:`p = \operatorname{softmax}(z)`, in nats; the number of classes;
    1 if all rows of `outputs` are probabilities, else 0; :math:`\max |z|`; the mean of :math:`\log \sum_c e^{z_{nc}}`;
    the entropies of the predicted classes and of the labels in nats; mean and variance of the labels; their number.
    The next two figures are those of labels :math:`y` between 0 and 1 that have the shape of the outputs:
    the mean of :math:`-y \log s - (1 - y) \log(1 - s)` with :math:`s = 1 / (1 + e^{-z})`, in nats,
    and 1 if all outputs are between 0 and 1, else 0.  For these labels there is also ``output_magnitude``.
    The last figure is :math:`\ln C` for a classification with C classes, the cross-entropy of equal probabilities.

    Parameters
    ----------
    outputs : Tensor
        ``(batch, ...)``; for a classification with an axis of classes, see `ikkuna.numerics.accuracy.count_correct`.
    labels : Tensor, optional
        Class indices, or numbers between 0 and 1.  Without them, or if the shapes do not fit, there is only the first figure.
    ignore_index : int
        The label of items that are left out.

    Returns
    -------
    Tensor
        ``(14,)``, float64; NaN for a figure that is undefined.

    Notes
    -----
    Of a classification with more than 512 items, an equally spaced sample of at least 256 of them is used;
    of more than 16,384 numbers between 0 and 1, one of at least 4,096.

    Examples
    --------
    >>> figures = prediction_figures(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
    >>> dict(zip(PREDICTION_FIGURES, figures.tolist()))["output_dependence"]
    1.0
    """
    none = torch.full((len(PREDICTION_FIGURES),), torch.nan, dtype=torch.float64, device=outputs.device)
    read = readable(outputs)
    if read is None or not outputs.ndim or not outputs.numel() or outputs.is_complex() or outputs.is_meta:
        return none
    z = read[0]
    axis = None if labels is None or labels.is_floating_point() else find_class_axis(z, labels)
    if axis is None or labels is None or z.ndim < 2 or z.shape[axis] < 2:
        none[0] = _dependence(z.reshape(len(z), -1).double())
        return none if labels is None else _add_binary(none, z, labels)
    items = z.movedim(axis, -1).reshape(-1, z.shape[axis])
    y = labels.reshape(-1).to(z.device, torch.int64)
    stride = max(len(items) // (_MAX_ROWS // 2), 1) if len(items) > _MAX_ROWS else 1
    return _classification(items[::stride].double(), y[::stride], ignore_index)


def _dependence(rows: Tensor) -> Tensor:
    if len(rows) < 2:
        return rows.new_full((), torch.nan)
    energy: Tensor = torch.linalg.vector_norm(rows).square() / len(rows)
    return 1 - rows.mean(0).square().sum() / energy


def _classification(z: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    classes = z.shape[1]
    valid = (y != ignore_index) & (y >= 0) & (y < classes)
    weight = valid.double()
    n = weight.sum()
    y = y.clamp(0, classes - 1)
    largest, best = z.max(1)
    lowest, highest = z.amin(), largest.amax()  # NaN if there is one
    sums, log_normalizer = z.sum(1), z.logsumexp(1)
    cross_entropy = (weight * (log_normalizer - z.gather(1, y[:, None])[:, 0])).nan_to_num(posinf=torch.inf).sum() / n
    cross_entropy = torch.where(lowest.isfinite() & highest.isfinite(), cross_entropy, torch.nan)
    is_probability = (lowest >= 0) & ((sums - 1).abs() < 1e-3).all()
    mean = (weight * y).sum() / n
    predicted = torch.zeros(classes, dtype=torch.float64, device=z.device)
    predicted = predicted.index_add(0, best, torch.ones_like(weight))
    labelled = torch.zeros_like(predicted).index_add(0, y, weight)
    return torch.stack(
        [
            _dependence(z - sums[:, None] / classes),
            cross_entropy,
            n.new_full((), classes),
            is_probability.double(),
            torch.maximum(-lowest, highest),
            log_normalizer.mean(),
            _entropy(predicted),
            _entropy(labelled),
            mean,
            (weight * (y - mean).square()).sum() / n,
            n,
            *n.new_full((2,), torch.nan),
            n.new_full((), math.log(classes)),
        ]
    )


def _add_binary(figures: Tensor, z: Tensor, labels: Tensor) -> Tensor:
    """Set the figures of labels between 0 and 1."""
    if not labels.is_floating_point() or labels.shape != z.shape:
        return figures
    stride = -(-z.numel() // _MAX_ELEMENTS)
    while math.gcd(stride, z.shape[-1]) > 1:  # every column is sampled
        stride += 1
    y = labels.detach().to(z.device).reshape(-1)[::stride].double()
    z = z.reshape(-1)[::stride].double()
    values = torch.stack(
        [
            z.abs().amax(),
            (z * (1 - y) - functional.logsigmoid(z)).mean(),
            ((z >= 0) & (z <= 1)).all().double(),
        ]
    )
    places = [PREDICTION_FIGURES.index(name) for name in _OF_BINARY]
    for place, value in zip(places, torch.where(((y >= 0) & (y <= 1)).all(), values, torch.nan), strict=True):
        figures[place] = value
    return figures


def _entropy(counts: Tensor) -> Tensor:
    share = counts / counts.sum()
    total: Tensor = torch.special.xlogy(share, share).sum()
    return -total
