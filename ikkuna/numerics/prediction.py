"""Figures of a network's outputs and labels: accuracy, loss, the losses of a guess and of the best constant."""

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ikkuna.numerics.elements import readable
from ikkuna.support.torch_internals import Memory, memory_of

IGNORED = -100
"""The label of items that are left out, unless a loss has another one."""


def count_correct(
    logits: Tensor, labels: Tensor, k: int = 1, ignore_index: int = IGNORED, class_axis: int | None = None
) -> Tensor:
    r"""Count the labels that are among the `k` largest logits.

    A label is correct if fewer than `k` classes come before it in descending order of logits; classes with equal logits
    keep their order.

    Parameters
    ----------
    logits : Tensor
        ``(batch, class)``, ``(batch, class, d...)`` as for ``torch.nn.CrossEntropyLoss``, ``(batch, time, class)``, or
        ``(class,)``.
    labels : Tensor
        Class indices, of the shape of `logits` without the class axis; or probabilities of the shape of `logits`, whose
        largest is the label.  Other numbers are no labels: no row is valid unless each is a distribution over two or more classes.
    k : int
        At least 1. If it exceeds the number of classes, every valid label is correct.
    ignore_index : int
        The label of items that are left out, beside -100, which stands for the labels that a loss leaves out.
    class_axis : int, optional
        By default derived from the shapes; if both layouts fit, that of ``CrossEntropyLoss``.

    Returns
    -------
    Tensor
        ``(3,)``, int64: correct labels, valid labels, and valid labels whose logits contain a NaN or :math:`+\infty`;
        these are wrong. (:math:`-\infty` is a masked class.)  Results can be summed over data; accuracy is the first
        element over the second.
        Labels outside of the classes are valid and wrong.  All are zero for shapes that do not fit, without a label,
        and for meta and complex tensors.

    Notes
    -----
    One pass over `logits` for ``k = 1``; otherwise four, and two boolean copies of it.  No pass waits for the device.

    Examples
    --------
    >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    >>> count_correct(logits, torch.tensor([1, 1, -100])).tolist()
    [1, 2, 0]
    """
    logits, labels = logits.detach(), labels.detach()
    logits = logits if logits.layout is torch.strided else logits.to_dense()
    logits = logits if logits.dtype.itemsize > 1 else logits.float()
    axis = find_class_axis(logits, labels) if class_axis is None else class_axis
    if axis is None or logits.is_meta or logits.is_complex() or not logits.numel() or k < 1:
        return torch.zeros(3, dtype=torch.int64, device="cpu" if logits.is_meta else logits.device)
    logits = logits if axis == logits.ndim - 1 else logits.movedim(axis, -1)
    if labels.is_floating_point():
        shares = labels.movedim(axis, -1)
        are_shares = (shares.amin() >= 0) & ((shares.float().sum(-1) - 1).abs() < 1e-2).all() & (shares.shape[-1] > 1)
        labels = torch.where(are_shares, shares.argmax(-1), IGNORED)
    labels = labels.to(logits.device, torch.int64)
    largest, first = logits.max(-1)  # the first of equal ones; NaN in a row with a NaN
    fits = largest < math.inf
    valid = (labels != IGNORED) if ignore_index == IGNORED else (labels != IGNORED) & (labels != ignore_index)
    is_near = first == labels if k == 1 else _are_among(logits, labels, k)
    return torch.stack((valid & is_near & fits, valid, valid > fits)).reshape(3, -1).sum(1)


def _are_among(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return whether each label is among the `k` largest logits of its row; of equal ones the first count."""
    classes = logits.shape[-1]
    index = labels.clamp(0, classes - 1).unsqueeze(-1)
    own = logits.gather(-1, index)
    earlier = torch.arange(classes, device=logits.device) < index
    place = ((logits > own) | ((logits == own) & earlier)).sum(-1)
    return (labels >= 0) & (labels < classes) & (place < k)


def shifted(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return views in which position t of the logits meets position ``t + shift`` of the labels.

    Parameters
    ----------
    logits : Tensor
        ``(batch, time, class)``.
    labels : Tensor
        ``(batch, time)``.
    shift : int
        At least 0.  Tensors of other shapes are returned unchanged.

    Examples
    --------
    >>> logits, labels = shifted(torch.zeros(1, 4, 9), torch.tensor([[5, 6, 7, 8]]), 1)
    >>> tuple(logits.shape), labels
    ((1, 3, 9), tensor([[6, 7, 8]]))
    """
    if not shift or labels.ndim < 2 or logits.ndim != labels.ndim + 1 or logits.shape[1] != labels.shape[1]:
        return logits, labels
    return logits[:, : max(labels.shape[1] - shift, 0)], labels[:, shift:]


def find_class_axis(logits: Tensor, labels: Tensor) -> int | None:
    """Return the axis of classes for which the shapes fit, or ``None``."""
    if not logits.ndim:
        return None
    if labels.is_floating_point():
        return (1 if logits.ndim > 1 else 0) if labels.shape == logits.shape else None
    if logits.ndim > 1 and labels.shape == logits.shape[:1] + logits.shape[2:]:
        return 1
    return logits.ndim - 1 if labels.shape == logits.shape[:-1] else None


PREDICTION_FIGURES = (
    *("output_dependence", "output_cross_entropy", "output_classes", "output_is_probability", "output_magnitude"),
    *("output_log_normalizer", "prediction_entropy", "label_entropy", "label_mean", "label_variance", "label_count"),
    *("output_binary_cross_entropy", "output_in_unit_interval", "output_uniform_cross_entropy"),
)
"""The names of the results of :func:`prediction_figures`, in their order."""

_OF_BINARY = ("output_magnitude", "output_binary_cross_entropy", "output_in_unit_interval")
_MAX_ROWS = 512
_MAX_ELEMENTS = 16_384


def prediction_figures(outputs: Tensor, labels: Tensor | None, ignore_index: int = IGNORED, seed: int = 0) -> Tensor:
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
    Logarithms of probabilities have no ``output_is_probability``, ``output_magnitude`` and ``output_log_normalizer``,
    and no figure of labels between 0 and 1: those of the outputs before the softmax are unknown.

    Parameters
    ----------
    outputs : Tensor
        ``(batch, ...)``; for a classification with an axis of classes, see `ikkuna.numerics.prediction.count_correct`.
    labels : Tensor, optional
        Class indices, or numbers between 0 and 1.  Without them, or if the shapes do not fit, there is only the first figure.
    ignore_index : int
        The label of items that are left out.
    seed : int
        Determines the sample.

    Returns
    -------
    Tensor
        ``(14,)``, float64; NaN for a figure that is undefined.

    Notes
    -----
    Of a classification with more than 512 items, a sample of 512 is used, of more than 16,384 numbers between 0 and 1 one of as many:
    one at random from each of as many equal intervals, so that no period in the data meets one of the sample.

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
        rows = z.reshape(len(z), -1).double()
        none[0] = _dependence(rows, rows.new_ones(len(rows)))
        return none if labels is None else _add_binary(none, z, labels, seed)
    items = z.movedim(axis, -1).reshape(-1, z.shape[axis])
    y = labels.reshape(-1).to(z.device, torch.int64)
    if (chosen := sample_indices(len(items), _MAX_ROWS, seed, z.device)) is not None:
        items, y = items[chosen], y[chosen]
    return _classification(items.double(), y, ignore_index)


def sample_indices(count: int, size: int, seed: int, device: torch.device) -> Tensor | None:
    """Return indices, one from each of `size` equal intervals; ``None`` for all of so few items."""
    if count <= size:
        return None
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.rand(size, dtype=torch.float64, device="cpu", generator=generator)
    places = (torch.arange(size, dtype=torch.float64, device="cpu") + offsets) * (count / size)
    return places.long().clamp_(max=count - 1).to(device, non_blocking=True)


def _dependence(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the share of the energy of rows, those with a weight of 1, that their mean lacks; NaN of one row."""
    count = weight.sum()
    energy = (weight[:, None] * rows).square().sum() / count
    dependence: Tensor = 1 - (weight @ rows / count).square().sum() / energy
    return torch.where(count > 1, dependence, torch.nan)


def _classification(z: Tensor, y: Tensor, ignore_index: int) -> Tensor:
    classes = z.shape[1]
    valid = (y != ignore_index) & (y >= 0) & (y < classes)
    weight = valid.double()
    n = weight.sum()
    y = y.clamp(0, classes - 1)
    largest, best = z.max(1)
    lowest = torch.where(valid, z.amin(1), torch.inf).amin()  # NaN if there is one
    highest = torch.where(valid, largest, -torch.inf).amax()
    z = torch.where(valid[:, None], z, 0.0)  # items that are left out may have NaN
    sums, log_normalizer = z.sum(1), torch.where(valid, z.logsumexp(1), 0.0)
    cross_entropy = (weight * (log_normalizer - z.gather(1, y[:, None])[:, 0])).nan_to_num(posinf=torch.inf).sum() / n
    cross_entropy = torch.where(lowest.isfinite() & highest.isfinite(), cross_entropy, torch.nan)
    is_probability = (lowest >= 0) & torch.where(valid, (sums - 1).abs() < 1e-3, True).all()
    of_logits = torch.stack([is_probability.double(), torch.maximum(-lowest, highest), log_normalizer.sum() / n])
    of_logits = torch.where(_are_logarithms(log_normalizer), torch.nan, of_logits)
    mean = (weight * y).sum() / n
    predicted = torch.zeros(classes, dtype=torch.float64, device=z.device)
    predicted = predicted.index_add(0, best, weight)
    labelled = torch.zeros_like(predicted).index_add(0, y, weight)
    return torch.stack(
        [
            _dependence(z - sums[:, None] / classes, weight),
            cross_entropy,
            n.new_full((), classes),
            *of_logits,
            _entropy(predicted),
            _entropy(labelled),
            mean,
            (weight * (y - mean).square()).sum() / n,
            n,
            *n.new_full((2,), torch.nan),
            n.new_full((), math.log(classes)),
        ]
    )


def _are_logarithms(log_normalizer: Tensor) -> Tensor:
    """Return whether rows are logarithms of probabilities."""
    return (log_normalizer.abs() < 1e-3).all()


def _add_binary(figures: Tensor, z: Tensor, labels: Tensor, seed: int) -> Tensor:
    """Set the figures of labels between 0 and 1."""
    if not labels.is_floating_point() or labels.shape != z.shape:
        return figures
    are_logarithms = (
        _are_logarithms(z.double().logsumexp(1)) if z.ndim > 1 and z.shape[1] > 1 else z.new_zeros(()).bool()
    )
    y, z = labels.detach().to(z.device).reshape(-1), z.reshape(-1)
    if (chosen := sample_indices(z.numel(), _MAX_ELEMENTS, seed, z.device)) is not None:
        y, z = y[chosen], z[chosen]
    y, z = y.double(), z.double()
    values = torch.stack(
        [
            z.abs().amax(),
            (z * (1 - y) - functional.logsigmoid(z)).mean(),
            ((z >= 0) & (z <= 1)).all().double(),
        ]
    )
    places = [PREDICTION_FIGURES.index(name) for name in _OF_BINARY]
    for place, value in zip(
        places, torch.where(((y >= 0) & (y <= 1)).all() & ~are_logarithms, values, torch.nan), strict=True
    ):
        figures[place] = value
    return figures


def _entropy(counts: Tensor) -> Tensor:
    total: Tensor = torch.special.entr(counts / counts.sum()).sum()
    return total


_BLOCK = 1 << 22  # logits converted at a time: 16 MiB of float32


def z_loss_row(logits: Tensor) -> Tensor:
    r"""Return the sum of :math:`\ln^2 Z_n` over the items *n*, and their number, with :math:`Z_n = \sum_c e^{z_{nc}}`.

    Parameters
    ----------
    logits : Tensor
        ``(…, classes)``, floating; minus infinity excludes a class.

    Returns
    -------
    Tensor
        ``(2,)``, float64; the rows of several calls can be summed.
        The sum is NaN if an item has a NaN, plus infinity, or no class.

    Notes
    -----
    One pass over the logits, with at most 16 MiB for their copies in float32.

    References
    ----------
    A. Chowdhery et al., PaLM: scaling language modeling with pathways, 2022, section 5.

    Examples
    --------
    >>> total, items = z_loss_row(torch.zeros(3, 4))
    >>> round(total.item() / items.item(), 4)      # the square of ln 4
    1.9218
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    for block in rows.split(max(1, _BLOCK // max(1, rows.shape[1]))):
        normalizer = (block if block.dtype is torch.float64 else block.float()).logsumexp(1)
        total = total + torch.where(normalizer.isfinite(), normalizer, torch.nan).double().square().sum()
    return torch.stack([total, torch.full_like(total, len(rows))])


_MARGIN = 1.25  # of the scale of random weights


def initial_logit_deviation(shape: Sequence[int], weight_rms: float) -> float:
    r"""Return the standard deviation of logits that the last layer gives to features with a mean square of 1.

    .. math:: s = w \sqrt{n_\text{in}}

    with the root mean square :math:`w` of the weights; 0 if these are above the largest scale of a usual initialisation,
    :math:`w > 1.25 \sqrt{2 / \min(n_\text{in}, n_\text{out})}`, which is that of He et al. (2015) with the smaller number of units.
    An initialisation by the number of outputs, which EfficientNet and MobileNet have, gives large logits if there are few classes.

    Parameters
    ----------
    shape : sequence of int
        The shape (out, in, …) of the weight.
    weight_rms : float
        The root mean square of the weights.

    Examples
    --------
    >>> round(initial_logit_deviation((10, 1000), 1 / 3000**0.5), 3)  # torch.nn.Linear
    0.577
    >>> round(initial_logit_deviation((10, 1000), 1 / 30**0.5), 3)  # uniform by the number of outputs
    5.774
    >>> initial_logit_deviation((10, 1000), 3.0)
    0.0
    """
    fan_in, fan_out = math.prod(shape[1:]), shape[0]
    usual = math.sqrt(2 / max(min(fan_in, fan_out), 1))
    return math.sqrt(fan_in) * weight_rms if weight_rms <= _MARGIN * usual else 0.0


_MOST_SAMPLED, _LEAST_SAMPLED = 65_536, 32
_DISTANCE = 1.95  # √n times the Kolmogorov distance that one uniform sample of 1,000 exceeds


def is_of_constructor(weight: Tensor) -> bool:
    r"""Return whether a weight looks as the constructor of a linear or convolutional layer of torch has made it.

    That is uniform between :math:`\pm 1 / \sqrt{n_\text{in}}`.  The first updates move some values over these bounds, and a decay
    makes the values too small.  One such weight in 1,000 is taken for a trained one, and so are all of fewer than 32 elements.

    Parameters
    ----------
    weight : Tensor
        The weight, ``(out, in, …)``; the first 65,536 elements are read.

    Examples
    --------
    >>> _, layer = torch.manual_seed(0), torch.nn.Linear(64, 10)
    >>> is_of_constructor(layer.weight), is_of_constructor(0.5 * layer.weight), is_of_constructor(layer.weight + 0.01)
    (True, False, False)
    """
    values = weight.detach().flatten()[:_MOST_SAMPLED].cpu().double()
    if len(values) < _LEAST_SAMPLED:
        return False
    ranks = torch.arange(len(values) + 1, dtype=torch.float64, device="cpu") / len(values)
    shares = (
        (values * math.sqrt(math.prod(weight.shape[1:])) * 0.5 + 0.5).sort().values
    )  # from 0 to 1 between the bounds
    distance = torch.maximum(ranks[1:] - shares, shares - ranks[:-1]).max()
    rounding = torch.finfo(weight.dtype).eps
    is_inside = (shares[0] >= -rounding) & (shares[-1] <= 1 + rounding)
    return bool(is_inside & (distance * math.sqrt(len(values)) <= _DISTANCE))


def initial_cross_entropy(classes: int, deviation: float) -> float:
    r"""Return an upper bound of the expected cross-entropy of normally distributed logits that do not depend on the labels.

    .. math:: \log C + \min\left(s^2 / 2, s \sqrt{2 \log C}\right)

    The first bound is Jensen's inequality for the mean of the exponentials,
    the second is the expected maximum of :math:`C` normal variables.

    Parameters
    ----------
    classes : int
        The number :math:`C` of classes.
    deviation : float
        The standard deviation :math:`s` of the logits.

    Examples
    --------
    >>> round(initial_cross_entropy(10, 0.0), 3), round(initial_cross_entropy(10, 10.0), 3)
    (2.303, 23.762)
    """
    guess = math.log(classes)
    return guess + min(deviation**2 / 2, deviation * math.sqrt(2 * guess))


LOSS_FORMS = ("mse", "mae", "huber", "bce_with_logits", "bce", "soft_cross_entropy", "kl_div")
"""The losses that are recognised, in the order of their numbers."""

_MAX_COLUMNS = 256
_EXACT, _OF_SAMPLE = 0.01, 0.1


_Place = tuple[Memory, int, torch.Size]


def _place_of(x: Tensor) -> _Place | None:
    """Return what distinguishes a living tensor from all others; ``None`` without memory."""
    return None if (memory := memory_of(x)) is None else (memory, int(x.storage_offset()), x.shape)


class Comparisons:
    """Remembers the last comparison of outputs with labels, to notice that the same outputs are compared with others.

    Examples
    --------
    >>> comparisons, outputs, labels = Comparisons(), torch.zeros(2, 3), torch.tensor([0, 1])
    >>> comparisons.is_another(7, outputs, labels), comparisons.is_another(7, outputs, labels.flip(0))
    (False, True)
    >>> comparisons.is_another(7, outputs[:1], labels[:1]), comparisons.is_another(8, outputs[:1], labels[1:])
    (False, False)
    """

    def __init__(self) -> None:
        self._last: tuple[Hashable, _Place | None, _Place | None] | None = None

    def is_another(self, step: Hashable, outputs: Tensor, labels: Tensor) -> bool:
        """Return whether the comparison before, in the same step, was of the same outputs with other labels."""
        before, self._last = self._last, (step, _place_of(outputs), _place_of(labels))
        _, place, of_labels = self._last
        return before is not None and place is not None and before[:2] == (step, place) and before[2] != of_labels


def constant_figures(outputs: Tensor, labels: Tensor, loss: Tensor, seed: int = 0) -> Tensor:
    r"""Return which loss this is, and how it compares with that of the best constant prediction.

    Rows are samples *n*, columns *c* are everything else, :math:`z` the outputs and :math:`y` the labels.
    A constant prediction is one number for each column.  Its best losses, corrected for the *N* rows that they are estimated from, are

    * MSE: the variance of the labels, mean over columns, with the divisor N - 1;
    * MAE: the mean distance from the median; Huber with a limit of 1: that of the better of mean and median; both times N / (N - 1);
    * BCE, of logits or probabilities: :math:`H(\bar y_c) + s_c^2 / (2 N \bar y_c (1 - \bar y_c))` with the variance :math:`s_c^2`,
      which is :math:`H + 1 / 2N` for labels of 0 and 1;
    * cross-entropy with probabilities as labels: :math:`H(\bar y) + \sum_c s_c^2 / (2 N \bar y_c)`, which is the correction of Miller and
      Madow for labels of 0 and 1; and the divergence: this minus the mean entropy of the rows.

    A loss is recognised by its value: it is that of one of these forms, as a mean over elements, a sum, or a sum over columns and mean
    over rows, or half of it, within 1%; within 10% if only a sample was computed.

    Parameters
    ----------
    outputs, labels : Tensor
        ``(batch, ...)``, of one shape; the labels are floating-point numbers.
    loss : Tensor
        The loss, one number.
    seed : int
        Determines the sample of at most 512 rows and 256 columns.

    Returns
    -------
    Tensor
        ``(3,)``, float64: the number of the form in :data:`LOSS_FORMS`, or -1; the loss over that of the best constant, negative if
        the loss has the other sign; and the loss of the best constant.
        NaN for the last two if the form is unknown or all labels are equal.

    Examples
    --------
    >>> labels = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    >>> constant_figures(torch.zeros(4, 1), labels, labels.square().mean())  # 21, and a variance of 20 / 3
    tensor([0.0000, 3.1500, 6.6667], dtype=torch.float64)
    """
    unknown = torch.full((3,), torch.nan, dtype=torch.float64, device=outputs.device)
    unknown[0] = -1.0
    if (
        not labels.is_floating_point()
        or labels.shape != outputs.shape
        or labels.device != outputs.device
        or loss.numel() != 1
    ):
        return unknown
    if outputs.ndim < 1 or len(outputs) < 2 or not outputs.numel() or outputs.is_complex() or outputs.is_meta:
        return unknown
    if readable(outputs) is None or readable(labels) is None or not loss.is_floating_point():
        return unknown
    z, y = (each.detach().reshape(len(outputs), -1) for each in (outputs, labels))
    rows, columns = z.shape
    chosen = (
        sample_indices(rows, _MAX_ROWS, seed, z.device),
        sample_indices(columns, _MAX_COLUMNS, seed + 1, z.device),
    )
    is_sample = any(each is not None for each in chosen)
    for axis, indices in enumerate(chosen):
        if indices is not None:
            z, y = z.index_select(axis, indices), y.index_select(axis, indices)
    own, constant = _forms(z.double(), y.double(), is_whole=chosen[1] is None and columns > 1)
    scales = own.new_ones(len(LOSS_FORMS), 6)  # (form, factor)
    scales[:5, 1], scales[:5, 2], scales[5:, 1], scales[5:, 2] = columns, rows * columns, 1 / columns, rows
    scales[:, 3:] = scales[:, :3] / 2
    value = loss.detach().reshape(()).double()
    distance = (value.abs() / (own[:, None] * scales)).log().abs().nan_to_num(nan=torch.inf)
    nearest, form = distance.amin(1).min(0)
    share = value.sign() * own[form] / constant[form]
    found = torch.stack([form.double(), torch.where(constant[form] > 0, share, torch.nan), constant[form]])
    return torch.where(nearest < (_OF_SAMPLE if is_sample else _EXACT), found, unknown)


def _forms(z: Tensor, y: Tensor, is_whole: bool) -> tuple[Tensor, Tensor]:
    """Return for each form the loss and that of the best constant; NaN for one that does not apply."""
    n = len(z)
    unbiased, none = n / (n - 1), z.new_full((), torch.nan)
    mean, median = y.mean(0), y.median(0).values
    error = z - y
    huber = torch.minimum(_huber(y - mean).mean(), _huber(y - median).mean()) * unbiased
    are_shares, are_probabilities = ((y >= 0) & (y <= 1)).all(), ((z >= 0) & (z <= 1)).all()
    variance, spread = y.var(0), mean * (1 - mean)
    binary = (
        torch.special.entr(mean) + torch.special.entr(1 - mean) + (variance / (2 * n * spread)).where(spread > 0, 0.0)
    ).mean()
    probabilities = z.clamp(0, 1)
    of_logits = (z * (1 - y) - functional.logsigmoid(z)).mean()
    of_probabilities = -(y * probabilities.log().clamp(min=-100) + (1 - y) * (1 - probabilities).log().clamp(min=-100))
    sums_to_one = are_shares & ((y.sum(1) - 1).abs() < 1e-3).all() & is_whole
    normalizer = z.logsumexp(1)
    soft = (normalizer[:, None] * y - y * z).sum(1).mean()
    between = (torch.special.entr(mean) + (variance / (2 * n * mean)).where(mean > 0, 0.0)).sum()
    inside = torch.special.entr(y).sum(1).mean()
    are_logarithms = _are_logarithms(normalizer)
    own = [
        *(error.square().mean(), error.abs().mean(), _huber(error).mean()),
        *(
            torch.where(are_shares, of_logits, none),
            torch.where(are_shares & are_probabilities, of_probabilities.mean(), none),
        ),
        torch.where(sums_to_one, soft, none),
        torch.where(sums_to_one & are_logarithms, (-y * z).sum(1).mean() - inside, none),
    ]
    constant = [
        *(variance.mean(), (y - median).abs().mean() * unbiased, huber),
        *(binary, binary, between, between - inside),
    ]
    varies = (y.amax(0) > y.amin(0)).any()
    return torch.stack(own), torch.where(varies, torch.stack(constant), none)


def _huber(error: Tensor) -> Tensor:
    size = error.abs()
    return torch.where(size < 1, 0.5 * error.square(), size - 0.5)
