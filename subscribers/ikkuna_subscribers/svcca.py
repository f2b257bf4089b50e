"""How alike a layer is to what it was, up to linear maps."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import name_results
from ikkuna.numerics.representation.canonical import principal_basis, svcca_of_bases
from ikkuna.numerics.representation.cka import to_rows
from ikkuna_subscribers._helpers.probe import ProbeSubscriber
from ikkuna_subscribers._helpers.references import References

__all__ = ["SVCCASubscriber"]


class SVCCASubscriber(ProbeSubscriber):
    r"""The mean canonical correlation of a layer's outputs with those it had before, for a fixed probe set.

    Of the outputs ``(n, d)``, columns centred, the fewest principal directions are kept that hold `variance` of their variance,
    :math:`\sum_{i \le k} s_i^2`; the correlations :math:`\rho_i` are the singular values of the product of both orthonormal bases, and
    the mean is over the smaller k.
    With ``variance=1`` it does not change under invertible linear maps of a layer's outputs.
    Channels of a convolution are its features, positions are rows (as neighbours are alike, there are fewer independent
    rows than that); so are the time steps of a sequence.  The forward goes in batches, the decomposition takes all rows at once.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``svcca_to_previous`` and ``svcca_to_init`` between 0 and 1, with the
    last look before and with the state at registration (or at the first look, if the model was not known then), and
    ``svcca_chance``, the mean correlation that independent data with as many directions would have.
    A value is NaN for outputs that are constant or not finite.
    Fewer rows than 2 d are refused, for chance is then 0.64 or more; below 10 d the log says so.
    Costs :math:`6 n d^2` operations for each layer and look, and keeps two times 8 n k bytes.

    Look for: layers close to 1 for several looks in a row have converged, those near the input mostly first.

    Parameters
    ----------
    dataset : map-style data set or tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.
    to : iterable of {'previous', 'init'}
        What to compare with.
    variance : float
        In (0, 1].
    pool : bool
        Average over positions or time steps, so that every input is one row.
    **options
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`.

    Raises
    ------
    ConfigError
        For arguments out of range, an empty or too small probe set, or a model that cannot be run over it.

    References
    ----------
    M. Raghu et al., SVCCA: singular vector canonical correlation analysis for deep learning dynamics, 2017.

    Examples
    --------
    >>> SVCCASubscriber(torch.randn(100, 4), to=["previous"]).publishes
    ('svcca_to_previous', 'svcca_chance')
    """

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
            raise ConfigError(f"SVCCASubscriber keeps a share of variance in (0, 1], got {variance!r}")
        self.references: References[Tensor] = References("SVCCASubscriber", to)
        if not self.references.names:
            raise ConfigError("SVCCASubscriber needs to= 'previous', 'init' or both, got none")
        name_results(options, *(f"svcca_to_{what}" for what in self.references.names), "svcca_chance")
        super().__init__(dataset, **options)
        self.variance = variance
        self.pool = pool

    def look(self, message: NetworkMessage | None) -> None:
        """Compare every layer with what is kept of it."""
        rows: dict[str, list[Tensor]] = {}

        def take(batch: dict[str, Tensor]) -> None:
            for name, output in batch.items():
                rows.setdefault(name, []).append(to_rows(output, self.pool))

        self.outputs(take)
        found = {name: self._basis(name, torch.cat(parts), message is None) for name, parts in rows.items()}
        if message is not None:
            for name, basis in found.items():
                self._compare(message, name, basis)
        self.references.keep(found)

    def _basis(self, name: str, rows: Tensor, refuse: bool) -> Tensor:
        n, width = rows.shape
        if n < 2 * width:
            why = f"{name} has {width} features, and {n} rows are fewer than twice as many; chance alone would look like likeness"
            if refuse:
                raise ConfigError(
                    f"SVCCASubscriber: {why}; take a larger probe set, or leave the layer out with modules="
                )
            self.tell(name, why)
            return rows.new_zeros(n, 0)
        if n < 10 * width:
            self.tell(name, f"{n} rows are fewer than ten times its {width} features; compare with svcca_chance")
        basis = principal_basis(rows, self.variance)
        if not basis.shape[1]:
            self.tell(name, "its outputs are constant or not finite, and have no correlation")
        return basis

    def _compare(self, message: NetworkMessage, name: str, basis: Tensor) -> None:
        chances = []
        for kind, kept in zip(self.publishes, self.references.of(name), strict=False):
            if kept is None:
                continue
            fits = len(kept) == len(basis)
            mean, _, _, chance = svcca_of_bases(basis, kept) if fits else (math.nan, 0, 0, math.nan)
            self.emit_of(message, name, mean, kind, why="" if fits else "its number of rows has changed")
            chances.append(chance)
        if chances:
            self.emit_of(message, name, chances[0], self.publishes[-1])
