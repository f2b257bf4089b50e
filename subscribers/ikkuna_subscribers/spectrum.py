"""Metrics of the singular values of a weight."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import DeferredRow, PlotSubscriber, Quantity, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.spectrum import (
    condition_number,
    conv_operator_norm,
    effective_rank,
    participation_ratio,
    power_law_alpha,
    singular_values_of_each,
    spectral_norm,
    stable_rank,
)
from ikkuna_subscribers._helpers import require_integers


class SpectrumSubscriber(PlotSubscriber):
    """A metric of the singular values of a tensor ``(out, in, ...)``, read as a matrix ``(out, in * ...)``.

    The decomposition costs :math:`4 m n^2` operations in float64, half a second for 1024 x 1024.
    On an accelerator it runs beside training, on a copy of the tensor, and the values arrive some steps later.
    If a step has several calls, the last one counts.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next.
    **options : Any
        See `Subscriber`.

    Attributes
    ----------
    results : sequence of str
        The last part of the name of each kind that is published.
    """

    results: Sequence[str] = ()
    merge = "last"
    needs_whole = True

    def __init__(self, kind: str = "weights", *, subsample: int = 100, **options: Any) -> None:
        name_results(options, *(f"{kind}_{result}" for result in self.results))
        super().__init__(kind, subsample=subsample, **options)

    @abstractmethod
    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return one number for each name in `results`.

        Parameters
        ----------
        sigma : Tensor
            The singular values in descending order, on the host; all NaN if the matrix has an element that is not finite.
        """

    def measure(self, message: ModuleMessage) -> DeferredRow | None:
        """Return the singular values."""
        if (read := readable(message.data, magnitudes=False)) is None or not message.data.numel():
            return None
        return DeferredRow(read[0], singular_values_of_each)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the values."""
        for kind, value in zip(self.publishes, self.values(torch.from_numpy(message.data)), strict=True):
            self.emit(message, value, kind)


class AlphaSubscriber(SpectrumSubscriber):
    r"""The exponent of a power law :math:`\lambda^{-\alpha}` that describes the largest eigenvalues of a weight.

    The eigenvalues are :math:`\lambda = \sigma^2`, with the singular values :math:`\sigma`.

    The exponent is the maximum-likelihood estimate :math:`\alpha = 1 + n / \sum_{\lambda_i \ge x_\min} \ln(\lambda_i / x_\min)`.
    The start :math:`x_\min` of the tail is the one with the smallest Kolmogorov-Smirnov distance D between the law and the data.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_alpha``, without unit, above 1,
    and ``{kind}_tail_distance``, D, between 0 and 1: above about 0.1 the tail does not follow a power law, and the exponent has no meaning.
    Both are NaN with fewer than two distinct eigenvalues and for a matrix with a NaN or Inf.
    With fewer than about fifty eigenvalues both are unreliable; an empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), on an accelerator beside training.

    Look for: values between 2 and 6 in layers that have learned; above 6 a layer is close to random; below 2 it overfits.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next; once an epoch is enough.
    compat : {None, 'weightwatcher'}
        ``'weightwatcher'`` takes D before each step of the data only, as that library does; see
        `ikkuna.numerics.spectrum.power_law_alpha`, which shows both in a table: they choose another tail for some matrices.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `compat` is unknown.

    References
    ----------
    A. Clauset, C. Shalizi and M. Newman, Power-law distributions in empirical data, 2009.
    C. Martin and M. Mahoney, Implicit self-regularization in deep neural networks, 2021.

    Examples
    --------
    >>> AlphaSubscriber().publishes
    ('weights_alpha', 'weights_tail_distance')
    """

    quantity = (
        Quantity(low=1.0),
        Quantity(low=0.0, high=1.0, larger="bad"),
    )
    results = ("alpha", "tail_distance")

    def __init__(self, kind: str = "weights", *, compat: str | None = None, **options: Any) -> None:
        if compat not in (None, "weightwatcher"):
            raise ConfigError(f"AlphaSubscriber needs compat None or 'weightwatcher', got {compat!r}")
        super().__init__(kind, **options)
        self.compat = compat

    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return the exponent and its distance."""
        fit = power_law_alpha(sigma.square(), self.compat)
        return fit.alpha, fit.ks_distance


class ConditionNumberSubscriber(SpectrumSubscriber):
    r"""The largest over the smallest singular value of a weight, :math:`\kappa = \sigma_1 / \sigma_{\min}`.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_condition_number``, without unit, at least 1.
    It is infinite if a singular value is 0, and NaN for a matrix of zeros or one with a NaN or Inf; an empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), on an accelerator beside training.

    Look for: growth; 1e3 is common, and at 1e6 the smallest singular value is below the rounding error of half precision.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ConditionNumberSubscriber().publishes
    ('weights_condition_number',)
    """

    quantity = Quantity(low=1.0, scale="log", larger="bad")
    results = ("condition_number",)

    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return the condition number."""
        return (condition_number(sigma).item(),)


class RankSubscriber(SpectrumSubscriber):
    r"""Three measures of the number of directions that a matrix uses.

    With the singular values :math:`\sigma_1 \ge \sigma_2 \ge \dots`, :math:`\lambda = \sigma^2` and :math:`q = \sigma / \sum \sigma`
    they are the stable rank :math:`\sum \lambda / \lambda_1`, the participation ratio :math:`(\sum \lambda)^2 / \sum \lambda^2`,
    and the effective rank :math:`\exp(-\sum q \ln q)`.  They increase in this order and lie between 1 and the rank.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_stable_rank``, ``{kind}_participation_ratio``
    and ``{kind}_effective_rank``, numbers of directions.
    If a step has several calls, the last one counts.  The first axis of activations is the sample, so the batch size bounds every rank.
    They are NaN for a matrix of zeros or one with a NaN or Inf; an empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), on an accelerator beside training.

    Look for: activations whose ranks fall towards 1, a collapse of the representation; the ranks of weights usually fall late in training.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next.
    **options : Any
        See `Subscriber`.

    References
    ----------
    O. Roy and M. Vetterli, The effective rank: a measure of effective dimensionality, 2007.
    M. Rudelson and R. Vershynin, Sampling from large matrices, 2007.

    Examples
    --------
    >>> RankSubscriber().publishes
    ('weights_stable_rank', 'weights_participation_ratio', 'weights_effective_rank')
    """

    quantity = Quantity(low=0.0, scale="log")
    results = ("stable_rank", "participation_ratio", "effective_rank")

    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return the three ranks."""
        return stable_rank(sigma).item(), participation_ratio(sigma).item(), effective_rank(sigma).item()


class SpectralNormSubscriber(PlotSubscriber):
    r"""The largest singular value of a weight, :math:`\sigma_1(W) = \max_x |W x| / |x|`.

    A tensor ``(out, in, k...)`` is read as a matrix ``(out, in * k...)``, a vector as one column.  For a convolution this is not
    the norm of the operator, which lies between it and :math:`\sqrt{\prod k}` times it; ``conv="operator"`` computes that norm,
    for stride 1 and circular padding (a close upper bound for zero padding), on inputs of `input_size`.

    The first value of a weight comes from 32 steps of Golub-Kahan bidiagonalisation, later values from power iteration
    with the previous vector as start: `iterations` per step, each with two products of the matrix with a vector.
    A vector of ``out`` numbers is kept.  If the shape, dtype or device of the weight changes, the computation starts again.

    Takes any kind with a tensor; publishes ``{kind}_spectral_norm``, in the unit of the weight,
    and ``{kind}_power_residual``, :math:`r = |W v - s u| / s`, without unit: the distance of the published value to some singular value
    is at most about :math:`r \sigma_1`, and below 1e-3 the iteration has converged.  It is 0 for exact values.
    The norm of a zero matrix is 0; an empty one, or one with a NaN or Inf, has NaN.
    If a step has several calls, the last one counts.

    Look for: growth by a factor of 10 over a run; the product over layers bounds the amplification by the network.

    Parameters
    ----------
    kind : str
        The kind to measure.
    iterations : int
        The number of power iterations per step.
    conv : {'matrix', 'operator'}
        How tensors with three to five axes are read.  The operator costs as many decompositions of ``(out, in)`` as an input
        has pixels, on an accelerator beside training: use a large `subsample`.
    input_size : int or tuple of int
        With ``conv="operator"``: the width of the input along each axis of the kernel.
        A kernel with more axes publishes nothing.
    groups : int
        With ``conv="operator"``: the number of groups of the convolutions.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If an argument is out of range, or ``conv="operator"`` lacks an `input_size`.

    References
    ----------
    T. Miyato et al., Spectral normalization for generative adversarial networks, 2018.
    H. Sedghi, V. Gupta and P. Long, The singular values of convolutional layers, 2018.

    Examples
    --------
    >>> SpectralNormSubscriber().publishes
    ('weights_spectral_norm', 'weights_power_residual')
    """

    quantity = (
        Quantity(low=0.0, scale="log"),
        Quantity(low=0.0, scale="log", larger="bad"),
    )
    merge = "last"
    needs_whole = True

    state = ("_starts",)

    def __init__(
        self,
        kind: str = "weights",
        *,
        iterations: int = 2,
        conv: str = "matrix",
        input_size: int | tuple[int, ...] | None = None,
        groups: int = 1,
        **options: Any,
    ) -> None:
        require_integers("SpectralNormSubscriber", iterations=iterations, groups=groups)
        _check_conv(conv, input_size)
        name_results(options, f"{kind}_spectral_norm", f"{kind}_power_residual")
        super().__init__(kind, **options)
        self.iterations = iterations
        self.input_size = input_size
        self.groups = groups
        self._starts: dict[tuple[object, ...], Tensor] = {}

    def measure(self, message: ModuleMessage) -> Tensor | DeferredRow | None:
        """Return the norm and its residual."""
        if (read := readable(message.data, magnitudes=False)) is None:
            return None
        weight = read[0]
        if self.input_size is not None and 3 <= weight.ndim <= 5:
            size = self.input_size if isinstance(self.input_size, int) else self.input_size[: weight.ndim - 2]
            if not isinstance(size, int) and len(size) < weight.ndim - 2:
                return None
            return DeferredRow(weight, _OperatorNorm(size, self.groups))
        identity = (message.kind, message.series_name)
        state = (*identity, weight.shape, weight.dtype, weight.device)
        start = self._starts.get(state)
        if start is None:  # drop the start for another shape, dtype or device
            self._starts = {key: u for key, u in self._starts.items() if key[:2] != identity}
        norm, residual, self._starts[state] = spectral_norm(weight, start, self.iterations)
        return torch.stack([norm, residual])

    def compute(self, message: ModuleMessage) -> None:
        """Emit both."""
        for kind, value in zip(self.publishes, message.data, strict=True):
            self.emit(message, value, kind)


@dataclass(frozen=True)
class _OperatorNorm:
    """Computes the rows of convolutions of one shape."""

    size: int | tuple[int, ...]
    groups: int

    def __call__(self, weights: Tensor) -> Tensor:
        norms = torch.stack([conv_operator_norm(weight, self.size, self.groups) for weight in weights])
        return torch.stack([norms, torch.zeros_like(norms)], 1)


def _check_conv(conv: str, input_size: int | tuple[int, ...] | None) -> None:
    if conv not in ("matrix", "operator"):
        raise ConfigError(f"SpectralNormSubscriber needs conv='matrix' or conv='operator', got {conv!r}")
    if (conv == "operator") != (input_size is not None):
        raise ConfigError(
            f"SpectralNormSubscriber needs input_size with conv='operator', and only with it; "
            f"got conv={conv!r}, input_size={input_size!r}"
        )
    for size in (input_size,) if isinstance(input_size, int) else input_size or ():
        require_integers("SpectralNormSubscriber", input_size=size)
