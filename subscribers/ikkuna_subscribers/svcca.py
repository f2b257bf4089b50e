"""The mean canonical correlation of layers with their earlier outputs."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import name_results
from ikkuna.numerics.representation.canonical import principal_basis, svcca_of_bases
from ikkuna.numerics.representation.cka import to_rows
from ikkuna_subscribers._helpers.earlier_results import EarlierResults
from ikkuna_subscribers._helpers.probe_subscriber import ProbeSubscriber

__all__ = ["SVCCASubscriber"]


class _Comparison(NamedTuple):
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

        def compare() -> dict[str, list[_Comparison]]:
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

    def _compare(self, name: str, basis: Tensor) -> list[_Comparison]:
        found = []
        for kind, stored in zip(self.publishes, self.earlier.find(name), strict=False):
            if stored is not None:
                fits = len(stored) == len(basis)
                mean, _, _, chance = svcca_of_bases(basis, stored) if fits else (math.nan, 0, 0, math.nan)
                found.append(_Comparison(kind, mean, chance, fits))
        return found

    def _emit_all(self, message: NetworkMessage, compared: dict[str, list[_Comparison]]) -> None:
        for name, comparisons in compared.items():
            for kind, mean, _, fits in comparisons:
                self.emit_module(message, name, mean, kind, reason="" if fits else "its number of rows has changed")
            if comparisons:
                self.emit_module(message, name, comparisons[0].chance, self.publishes[-1])
