"""The ratio of the norms of two quantities."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.export.messages import BatchBundle, Message, MessageBatch, MessageBundle
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["RatioSubscriber"]


class RatioSubscriber(PlotSubscriber):
    r"""The ratio of the L2 norms of two quantities of the same module, :math:`\lVert a \rVert_2 / \lVert b \rVert_2`.

    Takes two kinds with a tensor, or two results of other subscribers, of which it is the quotient itself.
    Publishes ``{dividend}_{divisor}_ratio``, without unit.  A divisor of 0 gives NaN.

    Look for: ``weight_updates`` over ``weights`` is near 1e-3 in a healthy run; below 1e-4 the learning rate is too small,
    above 1e-2 it is too large.

    Parameters
    ----------
    kinds : list of str
        The dividend and the divisor.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `kinds` are not two different kinds.

    Examples
    --------
    >>> RatioSubscriber(["weight_updates", "weights"]).publishes
    ('weight_updates_weights_ratio',)
    """

    fields = ("sumsq",)
    derived = True

    def __init__(self, kinds: Sequence[str], **options: Any) -> None:
        if isinstance(kinds, str) or len(kinds) != 2:
            given = [kinds] if isinstance(kinds, str) else list(kinds)
            raise ConfigError(
                f"RatioSubscriber needs 2 kinds (dividend, divisor), got {len(given)}: {', '.join(map(repr, given))}"
            )
        if kinds[0] == kinds[1]:
            raise ConfigError(f"RatioSubscriber needs two different kinds, got {list(kinds)}")
        options.setdefault("publishes", f"{kinds[0]}_{kinds[1]}_ratio")
        super().__init__(kinds, join=True, **options)

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the ratio."""
        dividend, divisor = (_magnitude(bundle[kind]) for kind in self.kinds)
        self.emit(bundle, dividend / divisor if divisor else math.nan)

    def compute_batch(self, bundle: BatchBundle) -> None:
        """Emit the ratios of all modules."""
        dividend, divisor = (_magnitudes(bundle[kind]) for kind in self.kinds)
        with np.errstate(all="ignore"):
            self.emit_batch(bundle, np.where(divisor != 0, dividend / divisor, math.nan))


def _magnitude(message: Message) -> float:
    if isinstance(message.data, float):
        return message.data
    assert message.record is not None
    return message.record.l2_norm


def _magnitudes(batch: MessageBatch) -> NDArray[np.float64]:
    found: NDArray[np.float64] = batch.records.l2_norm if batch.data is None else batch.data
    return found
