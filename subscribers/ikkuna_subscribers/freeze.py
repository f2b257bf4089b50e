"""Stops the training of layers that have converged: the one metric's follower that changes training, and only by request."""

import logging
from collections import Counter
from typing import Any

from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["FreezeSubscriber"]

log = logging.getLogger("ikkuna")


class FreezeSubscriber(PlotSubscriber):
    """Freeze a layer whose outputs have stopped to change.  This is the one subscriber that changes training.

    When the similarity of a layer to its last look has been `threshold` or more for `patience` looks in a row,
    its parameters stop to require a gradient, their gradients are dropped, so that optimizers pass over them, and the log says so.
    They stay as they are from the next step on; running statistics of a batch norm go on, unless the model is in evaluation mode.
    Whatever happens, one layer stays trainable.
    Under data-parallel wrappers that expect a gradient of every parameter, the wrapper has to be told of unused ones.

    Takes the results of a similarity such as ``cka_to_previous`` or ``svcca_to_previous``;
    publishes ``frozen_parameters``, the number of parameters frozen so far.

    Parameters
    ----------
    kind : str
        What to go by: a result published for each module.
    threshold : float
        What counts as unchanged; above 0.99 for a similarity that is 1 for equal outputs.
    patience : int
        How many looks in a row.
    in_order : bool
        Freeze a layer only when all before it are frozen, for only then the backward pass becomes shorter.
    **options
        See `Subscriber`; ``modules=`` names those that may be frozen.

    Raises
    ------
    ConfigError
        If `patience` is not a whole number of 1 or more, or `threshold` is not a number.

    References
    ----------
    M. Raghu et al., SVCCA: singular vector canonical correlation analysis for deep learning dynamics, 2017 (freeze training).

    Examples
    --------
    >>> FreezeSubscriber("cka_to_previous", threshold=0.995, patience=5).publishes
    ('frozen_parameters',)
    """

    derived = True
    needs_model = True
    of_network = True

    def __init__(
        self,
        kind: str = "cka_to_previous",
        *,
        threshold: float = 0.99,
        patience: int = 3,
        in_order: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"FreezeSubscriber needs patience >= 1, got {patience!r}")
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or threshold != threshold:
            raise ConfigError(f"FreezeSubscriber needs a number as threshold, got {threshold!r}")
        options.setdefault("publishes", "frozen_parameters")
        super().__init__(kind, **options)
        self.threshold = threshold
        self.patience = patience
        self.in_order = in_order
        self._looks: Counter[str] = Counter()  # in a row, at or above the threshold
        self._frozen: dict[str, int] = {}

    def compute(self, message: Any) -> None:
        """Count the looks at a layer, and freeze what is due."""
        if not isinstance(message, ModuleMessage) or message.module in self._frozen:
            return
        self._looks[message.module] = self._looks[message.module] + 1 if message.data >= self.threshold else 0
        modules = {named.name: named.module for named in self.modules if _trainable(named.module)}
        for name, module in modules.items():
            if self._looks[name] >= self.patience:
                self._freeze(message, name, module, modules)
            elif self.in_order:
                return

    def _freeze(self, message: ModuleMessage, name: str, module: nn.Module, modules: dict[str, nn.Module]) -> None:
        own = set(_trainable(module))
        if all(set(_trainable(other)) <= own for other in modules.values()):
            return  # a loss without parameters has no gradient
        for parameter in own:
            parameter.requires_grad_(False)
            parameter.grad = None
        count = self._frozen[name] = sum(parameter.numel() for parameter in own)
        log.warning(
            "%s was frozen after step %d: %s was at least %g at %d looks in a row (%s parameters)",
            *(name, message.global_step, message.kind, self.threshold, self.patience, f"{count:,}"),
        )
        self.emit(NetworkMessage(message.stamp, message.kind), sum(self._frozen.values()))


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
