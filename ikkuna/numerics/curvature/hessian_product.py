r"""Products of the Hessian of a loss with vectors, and its trace.

A Hessian is never formed: :class:`HessianProduct` multiplies it with a vector for the cost of one to two gradients.
All other functions here and in :mod:`~ikkuna.numerics.curvature.lanczos` accept any function ``v -> A v`` with a
symmetric A.  All functions are too slow for a training step.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.curvature.lanczos import Matvec, random_signs
from ikkuna.numerics.curvature.second_derivative import twice_differentiable
from ikkuna.numerics.elements import as_float64
from ikkuna.support.torch_internals import nodes_behind


class HessianProduct:
    r"""The function :math:`v \mapsto H v`, with :math:`H` the Hessian of a loss with respect to parameters.

    The graph of the gradient is built once and kept as long as this object:
    :math:`H v = \nabla_\theta \langle \nabla_\theta L, v \rangle`.
    No ``.grad`` is read or written.  The loss must be a deterministic function of the parameters: a fixed batch, no
    dropout, and evaluation mode or frozen batch statistics.  It runs inside
    :func:`~ikkuna.numerics.curvature.second_derivative.twice_differentiable`.

    Parameters
    ----------
    loss : callable
        Returns the scalar loss; called once, without arguments.
    parameters : iterable of Tensor
        Leaf tensors that require a gradient.  A vector is the concatenation of the flattened parameters in this order.

    Raises
    ------
    ConfigError
        If no parameter requires a gradient, the loss is not one number, or it has no second derivative.

    Notes
    -----
    Memory: the graph of a forward and backward pass, and one vector of all parameters for each product.

    Examples
    --------
    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> product = HessianProduct(lambda: w[0] ** 2 + 3 * w[0] * w[1], [w])      # H = [[2, 3], [3, 0]]
    >>> product(torch.tensor([1.0, 0.0]))
    tensor([2., 3.])
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ConfigError("a Hessian needs at least one parameter that requires a gradient, got none")
        with torch.enable_grad(), twice_differentiable():
            value = loss()
            if value.numel() != 1:
                raise ConfigError(f"a Hessian needs a loss of one number, got the shape {tuple(value.shape)}")
            self._gradients = self._differentiate([value.reshape(())], None, create_graph=True)
        # autograd has no path from there to the parameters, and would silently leave out its part
        if any(node.name().endswith("autograd::Error") for node in nodes_behind(g.grad_fn for g in self._gradients)):
            raise ConfigError("the loss cannot be differentiated twice: a function in it is marked once_differentiable")
        self.size = sum(p.numel() for p in self.parameters)
        self.loss = value.detach()
        self.gradient = _concatenate(self._gradients)

    def _differentiate(
        self, outputs: Sequence[Tensor], vectors: Sequence[Tensor] | None, create_graph: bool = False
    ) -> Sequence[Tensor]:
        kept = [i for i, output in enumerate(outputs) if output.requires_grad]
        if not kept:  # a constant loss, or a gradient that does not depend on the parameters
            return [torch.zeros_like(p) for p in self.parameters]
        try:
            return torch.autograd.grad(
                [outputs[i] for i in kept],
                self.parameters,
                [vectors[i] for i in kept] if vectors else None,
                create_graph=create_graph,
                retain_graph=True,
                materialize_grads=True,
            )
        except RuntimeError as error:
            if "derivative" not in str(error) and "differentiable" not in str(error):
                raise
            raise ConfigError(f"the loss cannot be differentiated twice: {error}") from error

    def __call__(self, vector: Tensor) -> Tensor:
        """Return H times `vector`, ``(size,)``."""
        parts = torch.split(vector, [p.numel() for p in self.parameters])
        # The vector is passed as the gradient of the gradients, so their inner product is not needed.
        vectors = [part.reshape(g.shape).to(g) for part, g in zip(parts, self._gradients, strict=True)]
        with twice_differentiable():  # checkpoints recompute their forward pass
            return _concatenate(self._differentiate(self._gradients, vectors)).to(vector)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    return torch.cat([t.detach().reshape(-1).to(first) for t in tensors])


def quadratic_forms(
    matvec: Matvec,
    size: int,
    samples: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    r"""Return :math:`z^\top A z` for `samples` vectors of random signs, without waiting for the device; see :func:`trace_of`."""
    if samples < 1 or size < 1:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    signs = (random_signs(size, generator, dtype, device) for _ in range(samples))
    return torch.stack([as_float64(z) @ as_float64(matvec(z)) for z in signs])


def trace_of(forms: Tensor) -> tuple[float, float]:
    r"""Estimate the trace of a symmetric matrix as the mean of :func:`quadratic_forms`; this waits for their device.

    Returns
    -------
    value : float
        Unbiased, in loss / parameter²; exact for a diagonal matrix.  NaN if a product is not finite, or without
        samples.
    stderr : float
        About :math:`\sqrt{2 (\|A\|_F^2 - \sum A_{ii}^2) / samples}`; NaN for one sample.

    References
    ----------
    M. Hutchinson, A stochastic estimator of the trace of the influence matrix, 1989.

    Examples
    --------
    >>> diagonal, start = torch.tensor([1.0, 2.0, 3.0]), torch.Generator().manual_seed(0)
    >>> trace_of(quadratic_forms(lambda v: diagonal * v, 3, 2, start))
    (6.0, 0.0)
    """
    forms, samples = forms.cpu(), len(forms)
    if not samples:
        return math.nan, math.nan
    spread = forms.std().item() / math.sqrt(samples) if samples > 1 else math.nan
    return forms.mean().item(), spread
