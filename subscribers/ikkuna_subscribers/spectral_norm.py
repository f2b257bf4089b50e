"""How much a weight can stretch its input."""

from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.spectral import conv_operator_norm, spectral_norm

__all__ = ["SpectralNormSubscriber"]


class SpectralNormSubscriber(PlotSubscriber):
    r"""The largest singular value of a weight, :math:`\sigma_1(W) = \max_x |W x| / |x|`.

    A tensor ``(out, in, k...)`` is read as a matrix ``(out, in * k...)``, a vector as one column.  For a convolution that is not
    the norm of the operator, which lies between it and :math:`\sqrt{\prod k}` times it; ``conv="operator"`` gives that one,
    for stride 1 and circular padding (a close upper bound for zero padding), on inputs of `input_size`.

    The first value of a weight comes from 32 steps of Golub-Kahan bidiagonalisation, later ones from power iteration
    that goes on where it stopped: `iterations` per step, each two products of the matrix with a vector.
    A vector of ``out`` numbers is kept.
    It starts afresh when the weight's shape, dtype or device changes.

    Takes any kind with a tensor; publishes ``{kind}_spectral_norm``, in the unit of the weight,
    and ``{kind}_power_residual``, :math:`r = |W v - s u| / s`, without unit: some singular value lies within about
    :math:`r \sigma_1` of what is published, and below 1e-3 it has converged.  It is 0 for what is computed exactly.
    The norm of a zero matrix is 0; an empty one, or one with a NaN or Inf, has NaN.
    Of several calls in a step the last one counts.

    Look for: growth by a factor of 10 over a run; the product over layers bounds how much the network can amplify.

    Parameters
    ----------
    kind : str
        What to look at.
    iterations : int
        Power iterations a step.
    conv : {'matrix', 'operator'}
        How tensors with three to five axes are read.  The operator costs as many decompositions of ``(out, in)`` as an input
        has pixels, and waits for a device: choose a large `subsample`.
    input_size : int or tuple of int
        With ``conv="operator"``: width of the input along each axis of the kernel.
        A kernel with more axes publishes nothing.
    groups : int
        With ``conv="operator"``: groups of the convolutions.
    **options
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
        _check_whole("iterations", iterations)
        _check_whole("groups", groups)
        _check_conv(conv, input_size)
        name_results(options, f"{kind}_spectral_norm", f"{kind}_power_residual")
        super().__init__(kind, **options)
        self.iterations = iterations
        self.input_size = input_size
        self.groups = groups
        self._starts: dict[tuple[object, ...], Tensor] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the norm and its residual."""
        if (read := readable(message.data)) is None:
            return None
        weight = read[0]
        if self.input_size is not None and 3 <= weight.ndim <= 5:
            size = self.input_size if isinstance(self.input_size, int) else self.input_size[: weight.ndim - 2]
            if not isinstance(size, int) and len(size) < weight.ndim - 2:
                return None
            norm = conv_operator_norm(weight, size, self.groups)
            return torch.stack([norm, torch.zeros_like(norm)])
        identity = (message.kind, message.series_name)
        state = (*identity, weight.shape, weight.dtype, weight.device)
        start = self._starts.get(state)
        if start is None:  # one of another shape is of no use any more
            self._starts = {key: u for key, u in self._starts.items() if key[:2] != identity}
        norm, residual, self._starts[state] = spectral_norm(weight, start, self.iterations)
        return torch.stack([norm, residual])

    def compute(self, message: ModuleMessage) -> None:
        """Emit both."""
        for kind, value in zip(self.publishes, message.data, strict=True):
            self.emit(message, value, kind)


def _check_whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"SpectralNormSubscriber needs {name} >= 1, got {value!r}")


def _check_conv(conv: str, input_size: int | tuple[int, ...] | None) -> None:
    if conv not in ("matrix", "operator"):
        raise ConfigError(f"SpectralNormSubscriber reads a conv as 'matrix' or 'operator', got {conv!r}")
    if (conv == "operator") != (input_size is not None):
        raise ConfigError(
            f"SpectralNormSubscriber needs input_size with conv='operator' and only there, "
            f"got conv={conv!r}, input_size={input_size!r}"
        )
    sizes = (input_size,) if isinstance(input_size, int) else input_size or ()
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ConfigError(f"SpectralNormSubscriber needs an input_size of whole numbers >= 1, got {input_size!r}")
