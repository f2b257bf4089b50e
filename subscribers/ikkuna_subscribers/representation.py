"""Metrics that compare the outputs of layers: CKA, SVCCA, dimension, saturation of layers."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.elements import as_reals
from ikkuna.numerics.representation import (
    Scatter,
    centred_kernels,
    chance_level,
    cka_of_hsic,
    dimension,
    intrinsic_dimension,
    principal_basis,
    svcca,
    to_rows,
)
from ikkuna.store.values import Matrix
from ikkuna_subscribers._helpers import EarlierResults, ProbeSubscriber, require_integers

_LEAST = 4  # the smallest batch for which the debiased estimate exists


class _Layer(NamedTuple):
    """The result of a layer: its centred kernels of all batches, flat, and their :math:`H_{xx}`."""

    kernels: Tensor
    own: float


class _CKAComparison(NamedTuple):
    """The layers, their values in comparison with earlier results, and their comparison with each other."""

    names: list[str]
    with_earlier: list[tuple[str, str, float]]
    between: NDArray[np.float64]


class CKASubscriber(ProbeSubscriber):
    r"""The linear centred kernel alignment (CKA) of a layer's outputs with its earlier outputs, and with those of other layers.

    With :math:`H_{xy}` the unbiased Hilbert-Schmidt independence criterion of the outputs x and y for a fixed probe set,
    summed over its batches, :math:`\mathrm{CKA} = H_{xy} / \sqrt{H_{xx} H_{yy}}`.
    It does not change if a layer's outputs are rotated or scaled.
    Each input is one row; channels, positions and time steps are its features.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``cka_to_previous`` and ``cka_to_init``, at most about 1 and by chance
    about 0, which compare with the previous evaluation and with the state at registration (or with the first evaluation, if the model
    was not known then), and, with `between_layers`, ``cka_between_layers``: for each layer the mean of its CKA with all others.
    The matrix of all pairs is shown as a picture under that name.
    The estimate is debiased, so a value can lie slightly outside [0, 1].
    It is NaN for outputs that are constant or not finite, or whose :math:`H_{xx}` is not positive.
    A batch of b inputs costs :math:`b^2 d` operations for each layer with d features.
    For n inputs, 8 n b bytes are kept for each layer and earlier evaluation.

    Look for: layers that stay close to 1 over several evaluations have converged, usually those near the input first;
    a block of high values in the matrix is a group of layers that compute similar features.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.
    to : iterable of {'previous', 'init'}
        The earlier evaluations to compare with; may be empty.
    between_layers : bool
        Whether layers are compared with each other as well.
    pool : bool
        Whether outputs are averaged over positions or time steps first.
    batch_size : int
        The number of inputs per batch, at least 4; several hundred are best.
    **options : Any
        ``samples``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`.

    Raises
    ------
    ConfigError
        If an argument is out of range, the probe set has fewer than 4 inputs, or the model cannot be run over it.

    References
    ----------
    S. Kornblith et al., Similarity of neural network representations revisited, 2019.
    T. Nguyen, M. Raghu and S. Kornblith, Do wide and deep networks learn the same things?, 2021 (mini-batches).

    Examples
    --------
    >>> CKASubscriber(torch.randn(100, 4), to=["init"]).publishes
    ('cka_to_init', 'cka_between_layers')
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share")
    state = (*ProbeSubscriber.state, "earlier")
    state_types = (_Layer,)

    def __init__(
        self,
        dataset: Any,
        *,
        to: Iterable[str] = ("previous", "init"),
        between_layers: bool = True,
        pool: bool = False,
        batch_size: int = 256,
        **options: Any,
    ) -> None:
        self.earlier: EarlierResults[_Layer] = EarlierResults("CKASubscriber", to)
        kinds = [f"cka_to_{what}" for what in self.earlier.names]
        kinds += ["cka_between_layers"] if between_layers else []
        if not kinds:
            raise ConfigError("CKASubscriber needs something to compare to: to=, between_layers= or both")
        name_results(options, *kinds)
        super().__init__(dataset, batch_size=batch_size, **options)
        if min(batch_size, len(self.data)) < _LEAST:
            raise ConfigError(
                f"CKASubscriber needs batches of at least {_LEAST} inputs, got batch_size={batch_size!r} "
                f"and {len(self.data)} inputs"
            )
        self.between_layers = between_layers
        self.pool = pool

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Compare every layer with its earlier results and with the other layers."""
        batches: list[dict[str, Tensor]] = []

        def add(batch: dict[str, Tensor]) -> None:
            rows = {name: self._rows(output) for name, output in batch.items()}
            if len(sizes := {len(x) for x in rows.values()}) > 1:
                each = ", ".join(f"{name}: {len(x)}" for name, x in rows.items())
                raise ConfigError(
                    f"CKASubscriber needs layers whose first axis is the batch, got rows {each}; select layers with modules="
                )
            if sizes and (n := sizes.pop()) >= _LEAST:  # no estimate exists for a smaller last batch
                kernels = centred_kernels(list(rows.values())) / math.sqrt(n - 3)  # larger batches have a larger weight
                batches.append(dict(zip(rows, kernels, strict=True)))

        self.collect_outputs(add)
        names = [name for name in (batches[0] if batches else ()) if all(name in batch for batch in batches)]
        if names:
            kernels = torch.stack([torch.cat([batch[name] for batch in batches]) for name in names])
            independence = kernels @ kernels.mT
            self.conclude(message, lambda: self._compare(names, kernels, independence), self._emit_all)

    def _rows(self, output: Tensor) -> Tensor:
        if self.pool or output.ndim < 2:
            return to_rows(output, pool=True)
        rows = as_reals(output.detach().flatten(1)).flatten(1)
        return rows if rows.dtype is torch.float64 else rows.float()

    def _compare(self, names: list[str], kernels: Tensor, independence: Tensor) -> _CKAComparison:
        layers = map(_Layer, kernels, independence.diagonal().tolist())
        found = dict(zip(names, layers, strict=True))
        values = list(self._compare_with_earlier(found))
        self.earlier.store(found)
        return _CKAComparison(names, values, cka_of_hsic(independence).cpu().numpy())

    def _compare_with_earlier(self, found: dict[str, _Layer]) -> Iterator[tuple[str, str, float]]:
        """Yield layers, kinds and values."""
        for i, kind in enumerate(self.publishes[: len(self.earlier.names)]):
            stored = {name: known for name in found if (known := self.earlier.find(name)[i]) is not None}
            fitting = [name for name, known in stored.items() if known.kernels.shape == found[name].kernels.shape]
            both = [found[name].kernels.dot(stored[name].kernels) for name in fitting]
            values = dict(zip(fitting, torch.stack(both).tolist() if both else (), strict=True))
            for name, known in stored.items():
                yield name, kind, _ratio(values.get(name, math.nan), found[name].own, known.own)

    def _emit_all(self, message: NetworkMessage, found: _CKAComparison) -> None:
        reason = "its outputs are constant or not finite, or their number has changed"
        for name, kind, value in found.with_earlier:
            self.emit_module(message, name, value, kind, reason=reason)
        if self.between_layers and len(found.names) > 1:
            self._show_all(message, found.names, found.between)

    def _show_all(self, message: NetworkMessage, names: list[str], matrix: NDArray[np.float64]) -> None:
        kind = self.publishes[-1]
        others = (matrix.sum(1) - matrix.diagonal()) / (len(matrix) - 1)
        for name, value in zip(names, others.tolist(), strict=True):
            self.emit_module(message, name, value, kind)
        shown = Matrix(tuple(names), tuple(names), matrix, (0.0, 1.0))
        self.show(message.carrying(None, kind=kind), shown)


def _ratio(both: float, one: float, other: float) -> float:
    return both / math.sqrt(one) / math.sqrt(other) if one > 0 and other > 0 else math.nan


class _SVCCAComparison(NamedTuple):
    """The comparison of a layer with an earlier result: its kind, the values, and whether the numbers of rows are equal."""

    kind: str
    mean: float
    chance: float
    fits: bool


class SVCCASubscriber(ProbeSubscriber):
    r"""The mean canonical correlation of a layer's outputs with its earlier outputs, for a fixed probe set (SVCCA).

    The columns of the outputs ``(n, d)`` are centred.  Of their principal directions, the fewest that hold a share `variance` of
    :math:`\sum_i s_i^2` are kept.
    The correlations :math:`\rho_i` are the singular values of the product of both orthonormal bases; the mean is over the smaller basis.
    With ``variance=1`` it does not change under invertible linear maps of a layer's outputs.
    The channels of a convolution are its features, its positions are rows; the time steps of a sequence are rows as well.
    Neighbouring positions are similar, so there are fewer independent rows than positions.
    The model runs in batches, the decomposition takes all rows at once.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``svcca_to_previous`` and ``svcca_to_init`` between 0 and 1, which compare
    with the previous evaluation and with the state at registration (or with the first evaluation, if the model was not known then), and
    ``svcca_chance``, the mean correlation of independent data with the same numbers of directions.
    A value is NaN for outputs that are constant or not finite.
    With fewer than 2 d rows the chance is 0.64 or more, so registration raises an error; with fewer than 10 d the log has a warning.
    An evaluation costs :math:`6 n d^2` operations for each layer; 8 n k bytes are kept for each layer and earlier evaluation.

    Look for: layers that stay close to 1 over several evaluations have converged, usually those near the input first.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.
    to : iterable of {'previous', 'init'}
        The earlier evaluations to compare with.
    variance : float
        The share of the variance to keep, in (0, 1].
    pool : bool
        Whether outputs are averaged over positions or time steps, so that each input is one row.
    **options : Any
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`.

    Raises
    ------
    ConfigError
        If an argument is out of range, the probe set is too small, or the model cannot be run over it.

    References
    ----------
    M. Raghu et al., SVCCA: singular vector canonical correlation analysis for deep learning dynamics, 2017.

    Examples
    --------
    >>> SVCCASubscriber(torch.randn(100, 4), to=["previous"]).publishes
    ('svcca_to_previous', 'svcca_chance')
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share")
    state = (*ProbeSubscriber.state, "earlier")

    def __init__(
        self,
        dataset: Any,
        *,
        to: Iterable[str] = ("previous", "init"),
        variance: float = 0.99,
        pool: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(variance, bool) or not isinstance(variance, int | float) or not 0 < variance <= 1:
            raise ConfigError(f"SVCCASubscriber needs a variance in (0, 1], got {variance!r}")
        self.earlier: EarlierResults[Tensor] = EarlierResults("SVCCASubscriber", to)
        if not self.earlier.names:
            raise ConfigError("SVCCASubscriber needs to= 'previous', 'init' or both, got none")
        name_results(options, *(f"svcca_to_{what}" for what in self.earlier.names), "svcca_chance")
        super().__init__(dataset, **options)
        self.variance = variance
        self.pool = pool

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Compare every layer with its earlier results."""
        rows: dict[str, list[Tensor]] = {}

        def add(batch: dict[str, Tensor]) -> None:
            for name, output in batch.items():
                rows.setdefault(name, []).append(to_rows(output, self.pool))

        self.collect_outputs(add)

        def compare() -> dict[str, list[_SVCCAComparison]]:
            found = {name: self._basis(name, torch.cat(parts), message is None) for name, parts in rows.items()}
            compared = {} if message is None else {name: self._compare(name, basis) for name, basis in found.items()}
            self.earlier.store(found)
            return compared

        self.conclude(message, compare, self._emit_all)

    def _basis(self, name: str, rows: Tensor, refuse: bool) -> Tensor:
        n, width = rows.shape
        if n < 2 * width:
            reason = f"{name} has {width} features and {n} rows, but needs at least {2 * width} rows to distinguish similarity from chance"
            if refuse:
                raise ConfigError(
                    f"SVCCASubscriber: {reason}; take a larger probe set, or leave the layer out with modules="
                )
            self.warn_once(name, reason)
            return rows.new_zeros(n, 0)
        if n < 10 * width:
            self.warn_once(name, f"{n} rows are fewer than ten times its {width} features; compare with svcca_chance")
        basis = principal_basis(rows, self.variance)
        if not basis.shape[1]:
            self.warn_once(name, "its outputs are constant or not finite, so they have no correlation")
        return basis

    def _compare(self, name: str, basis: Tensor) -> list[_SVCCAComparison]:
        found = []
        for kind, stored in zip(self.publishes, self.earlier.find(name), strict=False):
            if stored is not None:
                fits = len(stored) == len(basis)
                mean, chance = math.nan, math.nan
                if fits:
                    mean, chance = svcca(basis, stored), chance_level(basis.shape[1], stored.shape[1], len(basis))
                found.append(_SVCCAComparison(kind, mean, chance, fits))
        return found

    def _emit_all(self, message: NetworkMessage, compared: dict[str, list[_SVCCAComparison]]) -> None:
        for name, comparisons in compared.items():
            for kind, mean, _, fits in comparisons:
                self.emit_module(message, name, mean, kind, reason="" if fits else "its number of rows has changed")
            if comparisons:
                self.emit_module(message, name, comparisons[0].chance, self.publishes[-1])


class DimensionSubscriber(PlotSubscriber):
    r"""The participation ratio of the covariance of a layer's units.

    The formula is that of :func:`~ikkuna.numerics.representation.dimension`.

    Takes any kind with a tensor; publishes ``{kind}_dimension``, between 1 and the number of units, the mean over the calls of a step.
    At most `rows` positions of a call are read.  With several ranks it is the mean of the figures of their data.
    A step in which a call has fewer than four rows, equal rows, a NaN or an Inf is NaN.

    Look for: hidden layers that fall towards 1, although the network tells several classes apart; large units can hide the others,
    as in residual streams of large language models.

    Parameters
    ----------
    kind : str
        The kind to measure.
    rows : int
        The number of rows that are read.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> DimensionSubscriber().publishes
    ('activations_dimension',)
    """

    quantity = Quantity(low=0.0, scale="log")

    def __init__(self, kind: str = "activations", *, rows: int = 64, **options: Any) -> None:
        require_integers("DimensionSubscriber", least=4, rows=rows)
        name_results(options, f"{kind}_dimension")
        super().__init__(kind, **options)
        self.rows = rows

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the participation ratio and 1, the number of calls."""
        if message.data.ndim < 2 or not message.data.numel():
            return None
        value = dimension(message.data, self.rows)
        return torch.stack([value, torch.ones_like(value)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the mean over the calls."""
        total, calls = message.data
        self.emit(message, float(total / calls))


class LayerSaturationSubscriber(ProbeSubscriber):
    """The share of a layer's directions that hold most of the variance of its outputs, :math:`k / d`.

    k is the smallest number of eigenvalues of the outputs' covariance ``(d, d)`` that hold a share `threshold` of their sum.
    The channels of a convolution are its directions, its positions are rows; the time steps of a sequence are rows as well.
    The covariance is summed over the batches of a fixed probe set, in float64, in evaluation mode.
    `SaturationSubscriber` measures something else: the flat ends of activation functions.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``layer_saturation`` between 0 and 1, and ``intrinsic_dimension``, that is k.
    Both are NaN for outputs that are constant or not finite.  For n rows, k is at most n - 1; the log warns if n is below d + 1.
    An evaluation costs :math:`2 n d^2` operations, an eigendecomposition and two times :math:`8 d^2` bytes for each layer.

    Look for: low saturation of layers at the end of a network, which is unused capacity;
    saturation above one half in all layers, which means that the network is too narrow.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.
    threshold : float
        The share of the variance, in (0, 1].
    compat : {None, 'delve'}
        ``'delve'`` counts directions as that library does; see `ikkuna.numerics.representation`.
    **options : Any
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`.

    Raises
    ------
    ConfigError
        If an argument is out of range, the probe set is empty, or the model cannot be run over it.

    References
    ----------
    M. Richter et al., Feature space saturation during training, 2021.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.testing import run
    >>> values = run(LayerSaturationSubscriber(torch.eye(4).repeat(2, 1), every=1), steps=1)
    >>> {(v.kind, v.name): v.value for v in values}["intrinsic_dimension", "first"]
    3.0
    """

    quantity = (
        Quantity(low=0.0, high=1.0, scale="share"),
        Quantity("dimensions", low=0.0),
    )

    def __init__(self, dataset: Any, *, threshold: float = 0.99, compat: str | None = None, **options: Any) -> None:
        if not 0 < threshold <= 1 or compat not in (None, "delve"):
            raise ConfigError(
                f"LayerSaturationSubscriber needs a threshold in (0, 1] and compat None or 'delve', "
                f"got {threshold!r}, {compat!r}"
            )
        name_results(options, "layer_saturation", "intrinsic_dimension")
        super().__init__(dataset, **options)
        self.threshold = threshold
        self.compat = compat

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Sum the covariances and emit the values."""
        scatters: dict[str, Scatter] = {}

        def add(batch: dict[str, Tensor]) -> None:
            for name, output in batch.items():
                part = Scatter.of(to_rows(output))
                scatters[name] = scatters[name] + part if name in scatters else part

        self.collect_outputs(add)
        if message is None:
            return

        def dimensions() -> dict[str, float]:
            return {
                name: intrinsic_dimension(scatter.covariance(), self.threshold, self.compat)
                for name, scatter in scatters.items()
            }

        def emit(message: NetworkMessage, found: dict[str, float]) -> None:
            for name, used in found.items():
                n, width = scatters[name].n, len(scatters[name].mean)
                if n <= width:
                    self.warn_once(name, f"{n} rows of {width} features have at most {n - 1} directions")
                share, reason = used / width if width else math.nan, "its outputs are constant or not finite"
                self.emit_module(message, name, share, self.publishes[0], reason=reason)
                self.emit_module(message, name, used, self.publishes[1])

        self.conclude(message, dimensions, emit)
