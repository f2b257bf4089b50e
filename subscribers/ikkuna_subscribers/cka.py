"""The centred kernel alignment of layers with their earlier outputs and with each other."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import name_results
from ikkuna.numerics.representation.cka import centred_kernels, cka_of_hsic, to_rows
from ikkuna.visualization.matrix import Matrix
from ikkuna_subscribers._helpers.earlier_results import EarlierResults
from ikkuna_subscribers._helpers.probe_subscriber import ProbeSubscriber

__all__ = ["CKASubscriber"]

_LEAST = 4  # the smallest batch for which the debiased estimate exists


class _Layer(NamedTuple):
    """The result of a layer: its centred kernels of all batches, flat, and their :math:`H_{xx}`."""

    kernels: Tensor
    own: float


class _Comparison(NamedTuple):
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
        rows = output.detach().flatten(1)
        return rows if rows.dtype is torch.float64 else rows.float()

    def _compare(self, names: list[str], kernels: Tensor, independence: Tensor) -> _Comparison:
        layers = map(_Layer, kernels, independence.diagonal().tolist())
        found = dict(zip(names, layers, strict=True))
        values = list(self._compare_with_earlier(found))
        self.earlier.store(found)
        return _Comparison(names, values, cka_of_hsic(independence).cpu().numpy())

    def _compare_with_earlier(self, found: dict[str, _Layer]) -> Iterator[tuple[str, str, float]]:
        """Yield layers, kinds and values."""
        for i, kind in enumerate(self.publishes[: len(self.earlier.names)]):
            stored = {name: known for name in found if (known := self.earlier.find(name)[i]) is not None}
            fitting = [name for name, known in stored.items() if known.kernels.shape == found[name].kernels.shape]
            both = [found[name].kernels.dot(stored[name].kernels) for name in fitting]
            values = dict(zip(fitting, torch.stack(both).tolist() if both else (), strict=True))
            for name, known in stored.items():
                yield name, kind, _ratio(values.get(name, math.nan), found[name].own, known.own)

    def _emit_all(self, message: NetworkMessage, found: _Comparison) -> None:
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
