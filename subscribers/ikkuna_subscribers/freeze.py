"""Freeze layers that have converged.  This is the only subscriber that changes training."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity
from ikkuna_subscribers._helpers import require_integers

log = logging.getLogger("ikkuna")


class FreezeSubscriber(PlotSubscriber):
    """Freeze a layer when its outputs have stopped changing.  This is the only subscriber that changes training.

    A layer is frozen when its similarity to its previous evaluation was at least `threshold` for `patience` evaluations in a row.
    Its parameters then have ``requires_grad=False`` and no gradient, so that optimizers skip them, and the log has a warning.
    They do not change from the next step on; running statistics of a batch norm are still updated, unless the model is in evaluation mode.
    At least one layer always stays trainable.
    A resumed run freezes the same layers again when it loads the state of the exporter; add the model before.
    Data-parallel wrappers that expect a gradient of every parameter must be configured for unused parameters.

    Takes the results of a similarity such as ``cka_to_previous`` or ``svcca_to_previous``;
    publishes ``frozen_parameters``, the number of parameters frozen so far.

    Look for: layers near the input that are frozen first; the backward pass becomes shorter with each of them.

    Parameters
    ----------
    kind : str
        The similarity: a result that is published for each module.
    threshold : float
        The smallest similarity of unchanged outputs; above 0.99 for a similarity that is 1 for equal outputs.
    patience : int
        The number of evaluations in a row.
    in_order : bool
        Whether a layer is frozen only after all layers before it; only then the backward pass becomes shorter.
    **options : Any
        See `Subscriber`; ``modules=`` selects the layers that may be frozen.

    Raises
    ------
    ConfigError
        If `patience` is not a positive integer, or `threshold` is not a number.

    References
    ----------
    M. Raghu et al., SVCCA: singular vector canonical correlation analysis for deep learning dynamics, 2017 (freeze training).

    Examples
    --------
    >>> FreezeSubscriber("cka_to_previous", threshold=0.995, patience=5).publishes
    ('frozen_parameters',)
    """

    quantity = Quantity("parameters", low=0.0)
    derived = True
    needs_model = True
    of_network = True
    state = ("_similar", "_frozen")

    def __init__(
        self,
        kind: str = "cka_to_previous",
        *,
        threshold: float = 0.99,
        patience: int = 3,
        in_order: bool = True,
        **options: Any,
    ) -> None:
        require_integers("FreezeSubscriber", patience=patience)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or threshold != threshold:
            raise ConfigError(f"FreezeSubscriber needs a number as threshold, got {threshold!r}")
        options.setdefault("publishes", "frozen_parameters")
        super().__init__(kind, **options)
        self.threshold = threshold
        self.patience = patience
        self.in_order = in_order
        self._similar: Counter[str] = Counter()  # evaluations in a row at or above the threshold, by module
        self._frozen: dict[str, int] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, and freeze the layers again that were frozen in it: no state of a model contains that."""
        super().load_state_dict(state)
        for named in self.modules:
            if named.name in self._frozen:
                _set_frozen(_trainable(named.module))

    def compute(self, message: Any) -> None:
        """Count the evaluations of a layer in a row that are similar enough, and freeze the layers that have enough of them."""
        if not isinstance(message, ModuleMessage) or message.module in self._frozen:
            return
        is_similar = message.data >= self.threshold
        self._similar[message.module] = self._similar[message.module] + 1 if is_similar else 0
        modules = {named.name: named.module for named in self.modules if _trainable(named.module)}
        for name, module in modules.items():
            if self._similar[name] >= self.patience:
                self._freeze(message, name, module, modules)
            elif self.in_order:
                return

    def _freeze(self, message: ModuleMessage, name: str, module: nn.Module, modules: dict[str, nn.Module]) -> None:
        own = set(_trainable(module))
        if all(set(_trainable(other)) <= own for other in modules.values()):
            return  # a loss without trainable parameters has no gradient
        _set_frozen(own)
        count = self._frozen[name] = sum(parameter.numel() for parameter in own)
        log.warning(
            "%s was frozen after step %d: %s was at least %g in %d evaluations in a row (%s parameters)",
            *(name, message.global_step, message.kind, self.threshold, self.patience, f"{count:,}"),
        )
        self.emit(NetworkMessage(message.stamp, message.kind), sum(self._frozen.values()))


def _set_frozen(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)
        parameter.grad = None


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
