"""The spectral norm of a weight."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import DeferredRow, PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.spectral import conv_operator_norm, spectral_norm
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["SpectralNormSubscriber"]


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
        if (read := readable(message.data)) is None:
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
