"""Figures of layers of one type: activations and batch norms."""

import math

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import dense, readable, without_repeats


def unit_counters(activations: Tensor, channel_axis: int | None = None) -> Tensor:
    r"""Count, for each unit of a layer, how often and how strongly it is active.

    Parameters
    ----------
    activations : Tensor
        ``(batch, unit)``, ``(batch, time, unit)``, or ``(batch, unit, height, width)`` and other layouts of at least
        four axes.
    channel_axis : int, optional
        The axis of units; by default the last of up to three axes, or the second of more.

    Returns
    -------
    Tensor
        ``(3, unit)``, float64: the number of elements with :math:`h > 0`, the number of finite elements, and
        :math:`\sum |h|` over these. Results can be summed over batches.  ``(3, 0)`` for a 0-d or empty tensor or one
        without numbers.

    Notes
    -----
    Four passes and a copy of the magnitudes, without waiting for the device.

    Examples
    --------
    >>> unit_counters(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    tensor([[2., 0.],
            [2., 2.],
            [4., 0.]], dtype=torch.float64)
    """
    whole = dense(activations)
    read = readable(whole)
    if read is None or not whole.ndim or not whole.numel():
        return torch.zeros(3, 0, dtype=torch.float64, device="cpu")
    axis = channel_axis if channel_axis is not None else (-1 if whole.ndim <= 3 else 1)
    by_axis = read[0].movedim(axis, 0) if whole.ndim > 1 else read[0].reshape(-1, 1)
    units = len(by_axis)
    small, times = without_repeats(
        by_axis if by_axis.stride(0) else by_axis[:1]
    )  # broadcast elements are counted, not copied
    by_unit = small.reshape(len(small), -1)
    finite = by_unit.isfinite()
    active = torch.count_nonzero((by_unit > 0) & finite, dim=1)
    magnitude = torch.where(finite, by_unit, 0.0).abs().sum(1, dtype=torch.float64)
    counters = torch.stack([active.double(), torch.count_nonzero(finite, dim=1).double(), magnitude])
    return (counters * times).expand(3, units)


def active_units(activations: Tensor, channel_axis: int | None = None, positions: int = 8192) -> Tensor:
    r"""Return 1 for each unit of a layer with an element above 0, else 0.

    It is one pass without a copy, and about fifty times as fast as :func:`unit_counters`.

    Parameters
    ----------
    activations : Tensor
        See :func:`unit_counters`.
    channel_axis : int, optional
        See :func:`unit_counters`.
    positions : int
        The number of elements of a unit that are read; of more, an equally spaced part is read.

    Returns
    -------
    Tensor
        ``(unit,)``, float64.  A unit with a NaN counts as active.  ``(0,)`` for a 0-d or empty tensor or one without numbers.

    Examples
    --------
    >>> active_units(torch.tensor([[1.0, 0.0], [-3.0, 0.0]]))
    tensor([1., 0.], dtype=torch.float64)
    """
    whole = dense(activations)
    read = readable(whole)
    if read is None or not whole.ndim or not whole.numel():
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    x = read[0] if whole.ndim > 1 else read[0].reshape(-1, 1)
    axis = (channel_axis if channel_axis is not None and whole.ndim > 1 else (-1 if x.ndim <= 3 else 1)) % x.ndim
    others = [i for i in range(x.ndim) if i != axis]
    for i in others:
        spacing = min(x.numel() // x.shape[axis] // positions, x.shape[i])
        if spacing > 1:
            x = x[(slice(None),) * i + (slice(None, None, spacing),)]
    return (~(x.amax(others) <= 0)).double()


def dead_share(counters: Tensor, inactivity: float = 0.01) -> Tensor:
    r"""Return the share of units that are active on less than a share `inactivity` of their positions.

    This is for rectified layers. Above one half the layer is broken; with ``inactivity=0`` a unit is dead if it was
    never active.

    Parameters
    ----------
    counters : Tensor
        ``(3, unit)``, from :func:`unit_counters`, summed over a window of steps.
    inactivity : float
        In [0, 1].

    Returns
    -------
    Tensor
        0-d, float64, in [0, 1]. Units without a finite element are left out; NaN if none is left.

    Examples
    --------
    >>> dead_share(unit_counters(torch.tensor([[1.0, 0.0], [3.0, -1.0]]))).item()
    0.5
    """
    active, positions, _ = counters
    known = positions > 0
    share = active / torch.where(known, positions, 1.0)
    dead = known & ((share < inactivity) | (active == 0))
    return _share(dead, known)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    count = whole.sum().double()
    return torch.where(count > 0, part.sum() / count.clamp(min=1), torch.nan)


def dormant_scores(counters: Tensor) -> Tensor:
    r"""Return the activity of each unit relative to its layer, :math:`s_c = E|h_c| / \operatorname{mean}_k E|h_k|`.

    It suits every activation function, including those that are never zero.

    Parameters
    ----------
    counters : Tensor
        ``(3, unit)``, from :func:`unit_counters`.

    Returns
    -------
    Tensor
        ``(unit,)``, float64, at least 0, with mean 1; all 0 for a layer of zeros, NaN for a unit without a finite
        element.

    References
    ----------
    G. Sokar et al., The dormant neuron phenomenon in deep reinforcement learning, 2023.

    Examples
    --------
    >>> dormant_scores(unit_counters(torch.tensor([[1.0, 0.0], [3.0, 0.0]])))
    tensor([2., 0.], dtype=torch.float64)
    """
    _, positions, magnitude = counters
    mean = torch.where(positions > 0, magnitude / positions, torch.nan)
    if not mean.numel():
        return mean
    layer = mean.nanmean()
    return torch.where(layer == 0, mean, mean / layer)


def dormant_share(counters: Tensor, tau: float = 0.025) -> Tensor:
    r"""Return the share of units with :func:`dormant_scores` :math:`\le \tau`: 0-d, in [0, 1]; NaN without a unit.

    Examples
    --------
    >>> dormant_share(unit_counters(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))).item()
    0.5
    """
    scores = dormant_scores(counters)
    return _share(scores <= tau, ~scores.isnan())


def saturation_threshold(function: str, slope: float = 0.05, of: str = "output") -> float:
    r"""Return the distance from the middle of its range beyond which a function has a derivative below `slope`.

    tanh: :math:`|x| > \operatorname{arcosh} t^{-1/2}`, or :math:`|y| > \sqrt{1 - t}`.
    sigmoid: :math:`|x| > \operatorname{arcosh}(1 / 2t - 1)`, or :math:`|y - 1/2| > \sqrt{1/4 - t}`.

    Parameters
    ----------
    function : {'tanh', 'sigmoid'}
        The activation function.
    slope : float
        :math:`t`, above 0 and below the largest derivative, which is 1 or 1/4.
    of : {'output', 'input'}
        Whether the threshold is for the output :math:`y` or the input :math:`x`.  Float32 outputs do not resolve slopes
        below 1e-6.

    Raises
    ------
    ConfigError
        If the function is unknown, or the slope is out of range.

    Examples
    --------
    >>> round(saturation_threshold("tanh", 0.05), 3), round(saturation_threshold("sigmoid", 1e-7, of="input"), 4)
    (0.975, 16.1181)
    """
    steepest = {"tanh": 1.0, "sigmoid": 0.25}
    if function not in steepest or of not in ("output", "input"):
        raise ConfigError(
            f"saturation needs a function 'tanh' or 'sigmoid', of its 'output' or 'input', got {function!r}, {of!r}"
        )
    if not 0 < slope < steepest[function]:
        raise ConfigError(f"saturation of {function} needs a slope between 0 and {steepest[function]}, got {slope!r}")
    if of == "output":
        return math.sqrt(steepest[function] - slope)
    return math.acosh(slope**-0.5) if function == "tanh" else math.acosh(0.5 / slope - 1)


def count_saturated(x: Tensor, function: str, slope: float = 0.05, of: str = "output") -> Tensor:
    r"""Count the elements where `function` has a derivative below `slope`; see :func:`saturation_threshold`.

    Parameters
    ----------
    x : Tensor
        Outputs (or inputs, with ``of="input"``) of the function, any shape and dtype.

    Returns
    -------
    Tensor
        ``(2,)``, int64: saturated elements, and elements that are not NaN. Results can be summed.

    Examples
    --------
    >>> count_saturated(torch.tanh(torch.tensor([0.0, 3.0, -5.0])), "tanh").tolist()
    [2, 3]
    """
    threshold = saturation_threshold(function, slope, of)
    read = readable(x.detach())
    if read is None:
        return torch.zeros(2, dtype=torch.int64, device="cpu")
    values, implied_zeros = read
    values, repeats = without_repeats(values)
    middle = 0.5 if function == "sigmoid" and of == "output" else 0.0
    # The threshold has no exact value in narrow dtypes, so these are compared in float32.
    wide = values if values.dtype is torch.float64 else values.float()
    saturated = torch.count_nonzero((wide - middle).abs() > threshold) * repeats
    if implied_zeros and middle > threshold:
        saturated = saturated + implied_zeros
    return torch.stack([saturated, torch.count_nonzero(wide == wide) * repeats + implied_zeros])


_MAX_POSITIONS = 4096


def running_statistics_distance(
    x: Tensor, running_mean: Tensor, running_variance: Tensor, epsilon: float = 1e-5
) -> Tensor:
    r"""Return the squared distances of mean and variance, averaged over channels.

    With mean :math:`\mu_c` and variance :math:`v_c` of channel c in the batch, and :math:`m_c` and :math:`r_c` running,
    they are :math:`\overline{(\mu_c - m_c)^2 / (r_c + \epsilon)}` and :math:`\overline{\ln^2 \frac{v_c + \epsilon}{r_c + \epsilon}}`.

    Parameters
    ----------
    x : Tensor
        ``(batch, channels, ...)``; of more than 4,096 positions of a channel an equally spaced sample of at least 1,024 is read.
    running_mean, running_variance : Tensor
        ``(channels,)``
    epsilon : float
        Added to each variance.

    Returns
    -------
    Tensor
        ``(2,)``, without unit, float32 or the dtype of `running_mean` if that is wider; NaN if there is one in `x`.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [2.0]])
    >>> running_statistics_distance(x, torch.tensor([3.0]), torch.tensor([1.0]), epsilon=0.0)
    tensor([4., 0.])
    """
    dtype = torch.promote_types(running_mean.dtype, torch.float32)
    flat = x.reshape(len(x), x.shape[1], -1)
    positions = flat.shape[2]
    stride = max(positions * len(x) // _MAX_POSITIONS, 1)
    stride = min(stride, positions)
    variance, mean = torch.var_mean(flat[:, :, ::stride].to(dtype), dim=(0, 2), correction=0)
    m, r = running_mean.to(dtype), running_variance.to(dtype) + epsilon
    of_mean = (mean - m).square() / r
    of_variance = ((variance + epsilon) / r).log().square()
    return torch.stack([of_mean.mean(), of_variance.mean()])
