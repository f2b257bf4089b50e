"""Inner products, norms, angles and distances of tensors, and what an update consists of.

All are NaN if a divisor is 0, an element is not finite, or two shapes differ; none waits for the device.
A complex number counts as the pair of its real and imaginary parts.

A single float32 reduction over a CPU tensor of 50 M elements has an error of 0.4 %.
Therefore tensors are split into chunks of 131,072 elements, whose sums are added in float64.

An update is :math:`u = d + r`, with the part *d* of weight decay and the part *r* of the gradients of the loss.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import (
    CHUNK,
    as_reals,
    dense,
    flatten,
    has_float64,
    readable,
    widest_float,
    without_repeats,
)

_DEVICE_CHUNK = 1 << 22
_FEW = 4096


def dot(a: Tensor, b: Tensor) -> Tensor:
    r"""Return :math:`\sum_i a_i b_i` in float64; for complex numbers, the real part of :math:`\sum_i \bar a_i b_i`.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any layout and floating dtype.  Narrow dtypes are converted to float32 first.

    Returns
    -------
    Tensor
        0-d, float64 (float32 on a device without float64), on the device of `a`.  0 without elements; NaN if an element
        is NaN, if a tensor has no numbers (meta, fake), or if the shapes differ.

    Notes
    -----
    On a CPU it costs about two sums of the larger tensor.  Float32 products that overflow or underflow are repeated in
    float64.

    Examples
    --------
    >>> dot(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])).item()
    1.0
    """
    if a is b:
        return squared_norm(a)
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    return _sum_of_products(a, b, subtract=False)


def spread_elements(x: Tensor, number: int) -> Tensor | None:
    """Return a copy of at most `number` elements of `x` at equal distances in the order of its axes.

    The distance has no common divisor with the length of the last axis, so that the elements come from all of its positions.

    Parameters
    ----------
    x : Tensor
        Of any shape and dtype, with numbers, see `ikkuna.numerics.elements.has_numbers`.
    number : int
        The largest number of elements.

    Returns
    -------
    Tensor or None
        1-d, float64 (float32 on a device without float64); of complex numbers ``(elements, 2)``, their real and imaginary parts.
        ``None`` for a sparse tensor, and for a quantised one without a way to read it.

    Examples
    --------
    >>> spread_elements(torch.arange(12.0).reshape(3, 4), 5)
    tensor([0., 3., 6., 9.], dtype=torch.float64)
    """
    x = x.detach()
    is_read_as_it_is = (
        type(x) is Tensor and x.layout is torch.strided and x.is_floating_point() and x.element_size() > 1
    )
    read = (x, 0) if is_read_as_it_is else readable(x, magnitudes=False)
    if read is None or read[1]:
        return None
    flat = as_reals(read[0].reshape(-1))
    distance, last = max(1, math.ceil(len(flat) / number)), x.shape[-1] if x.ndim else 1
    while math.gcd(distance, last) > 1:
        distance += 1
    return flat[::distance].to(widest_float(flat), copy=True)


def squared_norm(a: Tensor) -> Tensor:
    """Return the sum of squares of `a` in float64; see :func:`dot`.

    Examples
    --------
    >>> squared_norm(torch.tensor([3.0, 4.0])).item()
    25.0
    """
    a, times = without_repeats(a.detach())
    if times > 1:
        return squared_norm(a) * times
    if (read := readable(a)) is None:
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    flat = flatten(read[0])
    return _add((_product(chunk, chunk) for chunk in _chunks(flat)), flat)


def norm(a: Tensor) -> Tensor:
    """Return the Euclidean norm of `a` in float64; see :func:`dot`.

    Examples
    --------
    >>> norm(torch.tensor([3.0, 4.0])).item()
    5.0
    """
    return squared_norm(a).sqrt()


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of squares of ``a - b`` in float64, without a difference of full size; see :func:`dot`.

    Examples
    --------
    >>> squared_distance(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0])).item()
    25.0
    """
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    return _sum_of_products(a, b, subtract=True)


def _sum_of_products(a: Tensor, b: Tensor, subtract: bool) -> Tensor:
    left, right = _aligned(a, b)
    pairs = zip(_chunks(left), _chunks(right), strict=True)
    if subtract:
        differences = (_wide(x) - _wide(y) for x, y in pairs)
        return _add((_product(d, d) for d in differences), left)
    return _add((_product(x, y) for x, y in pairs), left)


def _aligned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as flat tensors of real numbers with equal order of elements."""
    if a.is_complex() is not b.is_complex():
        a, b = (t.to(torch.promote_types(t.dtype, torch.complex64)) for t in (a, b))
    reads = [readable(dense(t), magnitudes=False) for t in (a, b)]
    left, right = (as_reals(read[0]) if read else torch.empty(0, device="cpu") for read in reads)
    right = right.to(left.device)
    if left.stride() == right.stride():
        return flatten(left), flatten(right)
    return left.reshape(-1), right.reshape(-1)


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    size = CHUNK if flat.device.type == "cpu" else _DEVICE_CHUNK
    return torch.split(flat, size) if flat.numel() > size else (flat,)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _product(x: Tensor, y: Tensor) -> Tensor:
    x, y = _wide(x), _wide(y)
    if not has_float64(x.device):
        return torch.dot(x, y)
    if x.device.type != "cpu" or x.numel() <= _FEW:  # the conversion costs less than a look at the result
        return torch.dot(x.double(), y.double())
    value = torch.dot(x, y) if x.dtype is y.dtype else torch.dot(x.double(), y.double())
    in_range = 1e-30 * x.numel() < value.abs() < 1e38
    return value if in_range or value.dtype is torch.float64 else torch.dot(x.double(), y.double())


def _add(parts: Iterable[Tensor], like: Tensor) -> Tensor:
    dtype, found = torch.float64 if has_float64(like.device) else torch.float32, list(parts)
    return found[0].to(dtype) if len(found) == 1 else torch.stack(found).sum(dtype=dtype)


def distance(a: Tensor, b: Tensor) -> Tensor:
    r"""Return :math:`\|a - b\|_2`, in the unit of the tensors.

    The distance to the weight at initialisation grows as :math:`\log t` or :math:`\sqrt t`; a jump is an instability.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64, at least 0; 0 without elements.

    Examples
    --------
    >>> distance(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0])).item()
    5.0
    """
    return squared_distance(a, b).sqrt()


def angle(a: Tensor, b: Tensor) -> Tensor:
    r"""Return the angle between two tensors, :math:`2 \operatorname{atan2}(\|\hat a - \hat b\|, \|\hat a + \hat b\|)`.

    Here :math:`\hat a = a / \|a\|`.  The arc cosine gives 0 for an angle of 1e-3 in float32; this formula has an error
    below 1e-6 rad for every angle.  Between successive weights it is the *angular update*, which converges to about
    :math:`\sqrt{2 \eta \lambda}` per step for normalised layers with weight decay.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64, in [0, π] rad.  NaN if either is zero or empty.

    Notes
    -----
    Two passes over both tensors.

    References
    ----------
    W. Kahan, How futile are mindless assessments of roundoff in floating-point computation?, 2006.

    Examples
    --------
    >>> round(angle(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])).item(), 6)      # a right angle
    1.570796
    """
    lengths = norm(a), norm(b)
    undefined = (lengths[0] * lengths[1]).mul(0.0)  # 0, or NaN for a length that is not finite
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return undefined * torch.nan
    minus, plus = _squared_sums(a, b, *lengths)
    value = 2 * torch.atan2(minus.sqrt(), plus.sqrt()) + undefined
    return torch.where((lengths[0] > 0) & (lengths[1] > 0), value, torch.nan)


def _squared_sums(a: Tensor, b: Tensor, length_a: Tensor, length_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norms of the difference and the sum of the directions of `a` and `b`."""
    minus, plus = [], []
    for pair in zip(*map(_chunks, _aligned(a, b)), strict=True):
        u, v = (part.to(widest_float(part)) for part in pair)
        u, v = u / length_a, v / length_b
        minus.append((u - v).square().sum())
        plus.append((u + v).square().sum())
    return torch.stack(minus).sum(), torch.stack(plus).sum()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    r"""Return the cosine of the :func:`angle` between two tensors.

    For successive updates it is near the momentum, for successive gradients near 0; towards -1 training oscillates.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64, in [-1, 1].  NaN if either is zero or empty.

    Examples
    --------
    >>> round(cosine(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.7071
    """
    return angle(a, b).cos()


def count_moved(weight: Tensor, update: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    r"""Count the weights that an update changes after the sum is rounded to `dtype`.

    Parameters
    ----------
    weight, update : Tensor
        Of the same shape.  `weight` is rounded to `dtype` first.
    dtype : torch.dtype
        The dtype of the stored weight.

    Returns
    -------
    Tensor
        ``(2,)``, int64: changed elements, and elements whose update is not 0 (a NaN update is not 0 and changes its
        element).  A complex weight counts as two.
        Results can be summed.

    Examples
    --------
    >>> count_moved(torch.ones(2), torch.tensor([1e-3, 1e-2])).tolist()      # in bfloat16, 1 is followed by 1.0078
    [1, 2]
    """
    reads = [readable(dense(t), magnitudes=False) for t in (weight, update)]
    if reads[0] is None or reads[1] is None or weight.shape != update.shape:
        return torch.zeros(2, dtype=torch.int64, device="cpu")
    w, u = as_reals(reads[0][0]).to(dtype), as_reals(reads[1][0])
    after = (w.double() + u).to(dtype)
    asked = u != 0
    return torch.stack([torch.count_nonzero((after != w) & asked), torch.count_nonzero(asked)])


def decoupled_decay(weight: Tensor, rate: Any, decay: Any) -> Tensor:
    r"""Return :math:`d = -\eta \lambda w`, as AdamW computes it.

    Parameters
    ----------
    weight : Tensor
        :math:`w`, before the step, of any shape.
    rate, decay : float or Tensor
        The learning rate :math:`\eta` and the weight decay :math:`\lambda`.

    Examples
    --------
    >>> decoupled_decay(torch.tensor([2.0]), rate=0.1, decay=0.5)
    tensor([-0.1000])
    """
    part: Tensor = weight.detach() * (-rate * decay)
    return part


def sgd_decay(
    weight: Tensor, rate: Any, decay: Any, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> Tensor:
    r"""Return :math:`d = -\eta \lambda c\, w` of SGD, whose momentum sums the decay of earlier steps.

    With momentum :math:`\mu` and dampening :math:`\tau`, :math:`c = (1 - \tau) / (1 - \mu)`; with Nesterov's,
    :math:`c = 1 + \mu / (1 - \mu)`; without momentum, :math:`c = 1`.
    This is exact for weights that do not change over the last :math:`1 / (1 - \mu)` steps, and too large in the first of them.

    Parameters
    ----------
    weight : Tensor
        :math:`w`, before the step, of any shape.
    rate, decay : float or Tensor
        :math:`\eta` and :math:`\lambda`.
    momentum, dampening : float
        :math:`\mu` and :math:`\tau`.
    nesterov : bool
        Whether the momentum is Nesterov's.

    Examples
    --------
    >>> sgd_decay(torch.tensor([2.0]), rate=0.1, decay=0.5, momentum=0.5)
    tensor([-0.2000])
    """
    if not momentum or momentum >= 1:
        return decoupled_decay(weight, rate, decay)
    factor = 1 + momentum / (1 - momentum) if nesterov else (1 - dampening) / (1 - momentum)
    return decoupled_decay(weight, rate, decay) * factor


def adam_decay(weight: Tensor, rate: Any, decay: Any, exp_avg_sq: Tensor, step: Any, beta2: Any, eps: float) -> Tensor:
    r"""Return the part of weight decay in an update of Adam, which adds :math:`\lambda w` to the gradient.

    It is :math:`d = -\eta \lambda w / (\sqrt{v / (1 - \beta_2^t)} + \epsilon)`.
    This is exact for weights that do not change over the steps that its first moment averages.

    Parameters
    ----------
    weight : Tensor
        :math:`w`, before the step, of any shape.
    rate, decay : float or Tensor
        :math:`\eta` and :math:`\lambda`.
    exp_avg_sq : Tensor
        The second moment :math:`v` after the step, of the same shape.
    step : int or Tensor
        The number of steps *t*.
    beta2 : float or Tensor
        :math:`\beta_2`.
    eps : float
        :math:`\epsilon`.

    Examples
    --------
    >>> adam_decay(torch.tensor([2.0]), 0.1, 0.5, torch.tensor([0.75]), step=1, beta2=0.25, eps=0.0)
    tensor([-0.1000])
    """
    denominator: Tensor = (exp_avg_sq.detach() / (1 - beta2**step)).sqrt() + eps
    return decoupled_decay(weight, rate, decay) / denominator


def decay_row(update: Tensor, decay: Tensor) -> Tensor:
    r"""Return :math:`\lVert d \rVert^2`, :math:`\lVert u - d \rVert^2` and the number of elements of *u* that are not 0.

    They can be summed over the parts of a tensor.

    Parameters
    ----------
    update, decay : Tensor
        *u* and *d*, of the same shape.

    Returns
    -------
    Tensor
        ``(3,)``, float64.

    Examples
    --------
    >>> decay_row(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])).tolist()
    [16.0, 25.0, 1.0]
    """
    update = update.detach()
    return torch.stack([squared_norm(decay), squared_norm(update - decay), torch.count_nonzero(update).double()])


ROW_STATISTICS = ("l2_norm", "mean", "max", "skewness", "kurtosis")
"""The statistics of a row, in the order of the results."""


def row_sums(x: Tensor) -> Tensor:
    r"""Sum statistics of the rows of `x`, its vectors along the last axis, without waiting for the device.

    With the mean :math:`\mu` of a row of *d* elements and :math:`m_k = \frac 1 d \sum_i (x_i - \mu)^k`, they are
    :math:`\lVert x \rVert_2`, :math:`\mu`, :math:`\max_i x_i`, the skewness :math:`m_3 / m_2^{3/2}`
    and the kurtosis :math:`m_4 / m_2^2`, which is 3 for a normal distribution.

    Parameters
    ----------
    x : Tensor
        ``(…, d)``, real.

    Returns
    -------
    Tensor
        ``(2, 5)``, float64: the sums in the order of :data:`ROW_STATISTICS`, and the number of rows in each.
        Rows whose elements are equal have no skewness and no kurtosis; rows of no element are left out.
        Results can be summed; see :func:`row_means`.  A NaN or Inf makes the sums NaN.

    Raises
    ------
    ConfigError
        If `x` has no axis.

    Examples
    --------
    >>> sums, rows = row_sums(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    >>> sums[:3].tolist(), rows.tolist()
    ([5.0, 3.5, 4.0], [2.0, 2.0, 2.0, 1.0, 1.0])
    """
    if not x.ndim:
        raise ConfigError("row_sums needs a tensor with an axis, got a number")
    total = torch.zeros(2, len(ROW_STATISTICS), dtype=torch.float64, device=x.device)
    if not x.numel():
        return total
    rows = x.detach().reshape(-1, x.shape[-1])
    # parts that stay in the cache also bound the size of the copies
    parts = rows.split(max(1, CHUNK // rows.shape[1])) if rows.device.type == "cpu" else (rows,)
    for part in parts:
        total += _sums(part if part.dtype is torch.float64 else part.float())
    return total


def _sums(rows: Tensor) -> Tensor:
    low, high = torch.aminmax(rows, dim=1)
    mean = rows.mean(1, dtype=torch.float64)
    centred = rows - mean[:, None].to(rows)
    centred = centred - centred.mean(
        1, keepdim=True
    )  # the first mean was rounded, by much if it is far above the spread
    # a power of two scales each row exactly, so that no fourth power overflows or vanishes
    spread = torch.linalg.vector_norm(centred, torch.inf, dim=1, keepdim=True)
    scaled = centred / torch.ldexp(torch.ones_like(spread), torch.frexp(spread).exponent)
    squares = scaled * scaled
    m2, m3, m4 = (v.mean(1, dtype=torch.float64) for v in (squares, squares * scaled, squares * squares))
    varies = low != high
    # torch would sum in float32 otherwise, which is wrong by up to a percent for long rows
    norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    undefined = torch.where(low.isfinite() & high.isfinite(), 0.0, torch.nan)
    shape = [torch.where(varies, value, 0.0) for value in (m3 / m2**1.5, m4 / m2**2)]
    values = [norm, mean, high.double(), *shape]
    numbers = [torch.ones_like(mean)] * 3 + [varies.double()] * 2
    return torch.stack([torch.stack([(v + undefined).sum() for v in values]), torch.stack([n.sum() for n in numbers])])


def row_means(sums: Tensor) -> Tensor:
    """Return the statistics averaged over rows, ``(5,)``, from a result of :func:`row_sums` or a sum of such results.

    The value is NaN if no row has the statistic.

    Examples
    --------
    >>> row_means(row_sums(torch.tensor([[3.0, 4.0, 5.0], [1.0, 1.0, 4.0]]))).round(decimals=3).tolist()
    [5.657, 3.0, 4.5, 0.354, 1.5]
    """
    return sums[0] / torch.where(sums[1] > 0, sums[1], torch.nan)
