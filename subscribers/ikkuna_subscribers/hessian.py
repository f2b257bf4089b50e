"""Eigenvalues, trace and spectral density of the Hessian of the loss."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import Quantity, name_results
from ikkuna.numerics.curvature import HessianProduct
from ikkuna.numerics.curvature.hessian_product import quadratic_forms, trace_of
from ikkuna.numerics.curvature.lanczos import Coefficients, Density, Ritz, density_of, lanczos_coefficients, ritz_of
from ikkuna.numerics.curvature.second_derivative import twice_differentiable
from ikkuna.numerics.statistics.histogram import Buckets
from ikkuna_subscribers._helpers import ProbeSubscriber, require_integers


class _Measured(NamedTuple):
    """Results of an evaluation on the device: whether everything is finite, and the results of products."""

    healthy: Tensor
    coefficients: Coefficients
    forms: Tensor
    starts: list[Coefficients]


class _Found(NamedTuple):
    """The values of an evaluation, and its density."""

    values: list[float]
    buckets: Buckets | None


class HessianSubscriber(ProbeSubscriber):
    r"""The largest eigenvalues, the trace and the spectral density of the Hessian of the loss, on one fixed batch.

    The Hessian :math:`H = \nabla^2_\theta L` with respect to all parameters that require a gradient (of the modules that ``modules=``
    selects) is never formed.  Products :math:`H v` are used in a Lanczos iteration with full re-orthogonalisation for the eigenvalues,
    in Hutchinson's estimator with random signs for the trace, and in stochastic Lanczos quadrature for the density.
    Every evaluation uses the same batch, the same random vectors and evaluation mode (frozen batch norm statistics, no dropout).
    No ``.grad`` is changed.  Attention runs in its plain form, because fused kernels have no second derivative.
    Hooks of the user on parameters and modules are called.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``hessian_eigenvalue_1`` (the largest) to ``hessian_eigenvalue_{top}`` and
    ``hessian_smallest`` (the most negative), in loss / parameter², each eigenvalue with its error bound ``hessian_residual_{i}``:
    the distance to an eigenvalue of H is at most that; with `trace`, ``hessian_trace`` and its standard error ``hessian_stderr``.
    With `density` the spectrum is shown as a histogram ``hessian_density`` of all eigenvalues, and not published.
    Values are NaN if the loss or a derivative is not finite, and for eigenvalues beyond the number of distinct ones.
    An eigenvalue that occurs more than once is found once.

    An evaluation costs one gradient with its graph and `steps` products for the eigenvalues, each as much as one to two gradients,
    `trace` products for the trace, and ``density * steps`` for the density.
    Memory: the graph of a forward and a backward pass over the whole batch, and ``steps + 5`` vectors of all parameters.

    Look for: with full-batch gradient descent and learning rate :math:`\eta` the largest eigenvalue rises to
    :math:`2 / \eta` and stays there, with small batches below it; far above it training is unstable.

    Parameters
    ----------
    loss : callable
        ``loss(outputs, labels)`` returns one number and is twice differentiable.
    dataset : torch.utils.data.Dataset
        Pairs (input, label); all of them, or `samples` of them, are the batch.
    top : int
        The number of eigenvalues.
    steps : int, optional
        The number of Lanczos iterations; by default ``4 * top + 5``.  Use more if residuals are large.
    trace : int
        The number of random vectors for the trace; 0 for no trace.
    density : int
        The number of random starts for the density; 0 for no density.
    bins : int
        The number of bins of the histogram.
    seed : int
        The seed of the random vectors and of the choice of samples.
    **options : Any
        ``samples``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`.

    Raises
    ------
    ConfigError
        If an argument is out of range, the probe set is empty, or the loss is not one number or not twice differentiable.

    References
    ----------
    J. Cohen et al., Gradient descent on neural networks typically occurs at the edge of stability, 2021.
    B. Ghorbani, S. Krishnan and Y. Xiao, An investigation into neural net optimization via Hessian eigenvalue density, 2019.

    Examples
    --------
    >>> from ikkuna.testing import run
    >>> pairs = torch.utils.data.TensorDataset(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    >>> values = run(HessianSubscriber(nn.CrossEntropyLoss(), pairs, top=1, every=1), steps=1)
    >>> [v.kind for v in values]
    ['hessian_eigenvalue_1', 'hessian_residual_1', 'hessian_smallest']
    """

    quantity = Quantity(scale="signed")
    of_network = True

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        dataset: Any,
        *,
        top: int = 5,
        steps: int | None = None,
        trace: int = 0,
        density: int = 0,
        bins: int = 50,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not callable(loss):
            raise ConfigTypeError(f"HessianSubscriber needs a loss of outputs and labels, got {type(loss).__name__}")
        steps = 4 * top + 5 if steps is None and isinstance(top, int) else steps
        require_integers("HessianSubscriber", top=top, bins=bins)
        require_integers("HessianSubscriber", 0, trace=trace, density=density)
        require_integers("HessianSubscriber", top, steps=steps)
        if "batch_size" in options:
            raise ConfigError(
                "HessianSubscriber uses all of its data as one batch; set its size with samples=, not batch_size="
            )
        kinds = [f"hessian_{what}_{i + 1}" for i in range(top) for what in ("eigenvalue", "residual")]
        kinds += ["hessian_smallest"]
        kinds += ["hessian_trace", "hessian_stderr"] if trace else []
        name_results(options, *kinds, *(["hessian_density"] if density else []))
        super().__init__(dataset, seed=seed, batch_size=_length(dataset), **options)
        self.loss = loss
        self._numbers = self.publishes[: len(kinds)]
        self.top, self.steps, self.trace, self.density = top, steps or 0, trace, density
        self.bins, self.seed = bins, seed

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Compute products with the Hessian and emit the values; at registration, compute one product."""

        def visit(outputs: Any, labels: Any) -> None:
            # This must happen in evaluation mode: restoring the model afterwards writes to buffers that the graph refers to.
            product = HessianProduct(lambda: self.loss(outputs, labels), self._parameters())
            if message is None:
                product(torch.zeros_like(product.gradient))
            else:
                measured, size = self._measured(product), product.size
                self.conclude(message, lambda: self._found(measured, size), self._emit_all)

        self.run_model(visit=visit, around=_differentiable)

    def _parameters(self) -> list[nn.Parameter]:
        found = [p for named in self.modules for p in named.module.parameters() if p.requires_grad]
        return list(dict.fromkeys(found))

    def _measured(self, product: HessianProduct) -> _Measured:
        """Compute everything that needs products, without waiting for the device."""
        starts = self._options(product)
        return _Measured(
            product.loss.isfinite().all() & product.gradient.isfinite().all(),
            lanczos_coefficients(product, product.size, self.steps, **self._options(product)),
            quadratic_forms(product, product.size, self.trace, **self._options(product)),
            [lanczos_coefficients(product, product.size, self.steps, **starts) for _ in range(self.density)],
        )

    def _found(self, measured: _Measured, size: int) -> _Found:
        """Return the values, which waits for the device."""
        if not measured.healthy:
            return _Found([math.nan] * len(self._numbers), None)
        trace = trace_of(measured.forms) if self.trace else ()
        buckets = _buckets(density_of(measured.starts), self.bins, size) if self.density else None
        return _Found([*self._eigenvalues(ritz_of(measured.coefficients)), *trace], buckets)

    def _emit_all(self, message: NetworkMessage, found: _Found) -> None:
        reason = "the loss or a derivative is not finite, or there are fewer distinct eigenvalues"
        for kind, value in zip(self._numbers, found.values, strict=False):
            self.emit_module(message, "", value, kind, reason=reason)
        if found.buckets is not None:
            self.show(message.carrying(None, kind=self.publishes[-1]), found.buckets)

    def _options(self, product: HessianProduct) -> dict[str, Any]:
        gradient = product.gradient
        return {
            "generator": torch.Generator().manual_seed(self.seed),
            "dtype": gradient.dtype,
            "device": gradient.device,
        }

    def _eigenvalues(self, ritz: Ritz) -> list[float]:
        found = [
            number
            for pair in zip(ritz.values.flip(0).tolist(), ritz.bounds.flip(0).tolist(), strict=True)
            for number in pair
        ][: 2 * self.top]
        missing = 2 * self.top - len(found)
        return [*found, *[math.nan] * missing, ritz.values[0].item() if len(ritz.values) else math.nan]


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Run the model with operations that have a second derivative."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(twice_differentiable())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def _buckets(density: Density, bins: int, size: int) -> Buckets | None:
    shares, edges = density.histogram(bins)
    if not len(shares):
        return None
    limits, counts = edges.tolist(), [0.0, *(shares * size).tolist()]
    total, squares = (size * density.moment(power) for power in (1, 2))
    return Buckets(limits[0], limits[-1], size, total, squares, limits, counts)


def _length(dataset: Any) -> int:
    return max(1, len(dataset)) if hasattr(dataset, "__len__") else 1
