"""The gradient norm before clipping, and how often gradients are clipped."""

import math
from typing import Any

from ikkuna.export.messages import MessageBatch, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["ClippingSubscriber"]

_UNCLIPPED = ("weight_gradients_unclipped", "bias_gradients_unclipped")
_CLIPPED = ("weight_gradients", "bias_gradients")


class ClippingSubscriber(PlotSubscriber):
    r"""The L2 norm of all gradients before clipping, and the share of steps whose gradients were clipped.

    A step is clipped if its norm after clipping is below :math:`1 - 10^{-4}` times the norm before.

    Takes ``weight_gradients_unclipped``, ``bias_gradients_unclipped``, ``weight_gradients`` and ``bias_gradients``.
    Publishes ``gradient_norm_unclipped`` in the unit of the gradients and ``clipped_share`` between 0 and 1, of the whole network,
    once a step; the share is that of the last `window` sampled steps.
    A NaN or Inf among the gradients makes the norm NaN, and the step does not count for the share.

    Look for: a share near 1, because then the threshold and not the learning rate determines the length of every step;
    spikes of the norm that clipping hides.

    Parameters
    ----------
    window : int
        The number of sampled steps over which the share is computed.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `window` is not a positive integer.

    Examples
    --------
    >>> ClippingSubscriber().publishes
    ('gradient_norm_unclipped', 'clipped_share')
    """

    fields = ("sumsq",)
    of_network = True
    state = ("_clipped",)

    def __init__(self, *, window: int = 100, **options: Any) -> None:
        require_integers("ClippingSubscriber", window=window)
        name_results(options, "gradient_norm_unclipped", "clipped_share")
        super().__init__((*_UNCLIPPED, *_CLIPPED), **options)
        self.window = window
        self._norms: dict[bool, list[float]] = {True: [], False: []}
        self._clipped: list[bool] = []

    def compute(self, message: ModuleMessage) -> None:
        """Store the norm of one gradient until the step is over."""
        assert message.record is not None
        self._norms[message.kind in _UNCLIPPED].append(message.record.l2_norm)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Store the norms of the gradients of a kind until the step is over."""
        self._norms[batch.kind in _UNCLIPPED] += batch.records.l2_norm.tolist()

    def abandon(self, stamp: Stamp) -> None:
        """Forget the norms of a step of which some are missing."""
        self._norms = {True: [], False: []}

    def finish(self, stamp: Stamp) -> None:
        """Emit the norm before clipping, and the share of clipped steps."""
        norms, self._norms = self._norms, {True: [], False: []}
        if not (norms[True] and norms[False]):
            return
        before, after = math.hypot(*norms[True]), math.hypot(*norms[False])
        norm_kind, share_kind = self.publishes
        self.emit(NetworkMessage(stamp, norm_kind), before, norm_kind)
        if math.isfinite(before):
            self._clipped = [*self._clipped, after < before * (1 - 1e-4)][-self.window :]
            self.emit(NetworkMessage(stamp, share_kind), sum(self._clipped) / len(self._clipped), share_kind)
