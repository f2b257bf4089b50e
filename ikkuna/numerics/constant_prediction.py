"""The loss of the best constant prediction, for losses of numbers and of probabilities."""

import torch
from torch import Tensor
from torch.nn import functional

from ikkuna.numerics.elements import readable
from ikkuna.numerics.prediction import sample_indices

LOSS_FORMS = ("mse", "mae", "huber", "bce_with_logits", "bce", "soft_cross_entropy", "kl_div")
"""The losses that are recognised, in the order of their numbers."""

_MAX_ROWS, _MAX_COLUMNS = 512, 256
_EXACT, _OF_SAMPLE = 0.01, 0.1


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
    binary = (_entropy(mean) + _entropy(1 - mean) + (variance / (2 * n * spread)).where(spread > 0, 0.0)).mean()
    probabilities = z.clamp(0, 1)
    of_logits = (z * (1 - y) - functional.logsigmoid(z)).mean()
    of_probabilities = -(y * probabilities.log().clamp(min=-100) + (1 - y) * (1 - probabilities).log().clamp(min=-100))
    sums_to_one = are_shares & ((y.sum(1) - 1).abs() < 1e-3).all() & is_whole
    normalizer = z.logsumexp(1)
    soft = (normalizer[:, None] * y - y * z).sum(1).mean()
    between = (_entropy(mean) + (variance / (2 * n * mean)).where(mean > 0, 0.0)).sum()
    inside = _entropy(y).sum(1).mean()
    are_logarithms = (normalizer.abs() < 1e-3).all()
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


def _entropy(shares: Tensor) -> Tensor:
    entropy: Tensor = torch.special.xlogy(shares, shares)
    return -entropy
