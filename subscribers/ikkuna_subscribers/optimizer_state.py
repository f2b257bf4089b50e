"""The state of an optimizer for each parameter."""

from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import MessageBatch, ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results

__all__ = ["OptimizerStateSubscriber"]

_STATISTICS = {"norm": ("norm2", "sumsq"), "mean": ("mean", "mean")}


class OptimizerStateSubscriber(PlotSubscriber):
    r"""The norm or the mean of a tensor that the optimizer stores for each parameter, such as Adam's moments.

    The norm is :math:`\lVert s \rVert_2`, the mean :math:`\frac 1 n \sum_i s_i`, of the state *s* after the step.
    Takes the kinds ``weight_state_{field}`` and ``bias_state_{field}``, which other metrics can take as well;
    publishes ``weight_state_{field}_norm2`` and ``bias_state_{field}_norm2``, or ``…_mean``, in the unit of the state.
    An optimizer without such a field publishes nothing; a state with a NaN or Inf has NaN.

    Look for: an ``exp_avg_sq`` that jumps and stays high freezes its layer for about a thousand steps;
    a ``momentum_buffer`` much larger than the gradient means that gradients agree from step to step.

    Parameters
    ----------
    field : str
        A key of the optimizer's state: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ``step`` …
    statistic : {'norm', 'mean'}
        The statistic to publish.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the statistic is another one, or `field` is not a name.

    Examples
    --------
    >>> OptimizerStateSubscriber("exp_avg").publishes
    ('weight_state_exp_avg_norm2', 'bias_state_exp_avg_norm2')
    """

    def __init__(self, field: str, statistic: str = "norm", **options: Any) -> None:
        if not isinstance(field, str) or not field:
            raise ConfigError(f"OptimizerStateSubscriber needs a field such as 'exp_avg', got {field!r}")
        if statistic not in _STATISTICS:
            raise ConfigError(f"OptimizerStateSubscriber needs a statistic 'norm' or 'mean', got {statistic!r}")
        kinds = [f"weight_state_{field}", f"bias_state_{field}"]
        suffix, needed = _STATISTICS[statistic]
        name_results(options, *(f"{kind}_{suffix}" for kind in kinds))
        super().__init__(kinds, **options)
        self.statistic = statistic
        self.fields = (needed,)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the statistic."""
        record = message.record
        assert record is not None
        value = record.l2_norm if self.statistic == "norm" else record.mean
        self.emit(message, value, self.publishes[self.kinds.index(message.kind)])

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the statistics of all parameters."""
        values = batch.records.l2_norm if self.statistic == "norm" else batch.records.mean
        self.emit_batch(batch, values, self.publishes[self.kinds.index(batch.kind)])
