"""The training flags of modules and parameters."""

from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import Message, ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.modules import NamedParameter, parameters_of

__all__ = ["ModuleStateSubscriber"]


class ModuleStateSubscriber(PlotSubscriber):
    """The share of modules in evaluation mode, and the weights that are trainable.

    The flags are read when the network is called.

    Takes ``input_data`` as the sign of a call; publishes ``evaluation_mode`` of the whole network, a share between 0 and 1,
    and ``weight_requires_grad``, 0 or 1 for each weight.
    A weight is published at the first sample and when its flag changes.

    Look for: an ``evaluation_mode`` of 1 in training, because dropout is then off and batch norm uses old statistics;
    a weight that is not trainable between two that are.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ModuleStateSubscriber().publishes
    ('evaluation_mode', 'weight_requires_grad')
    """

    merge = "max"
    needs_model = True
    state = ("_shown",)

    def __init__(self, **options: Any) -> None:
        name_results(options, "evaluation_mode", "weight_requires_grad")
        super().__init__("input_data", **options)
        self._weights: tuple[NamedParameter, ...] | None = None
        self._shown: dict[str, bool] = {}

    def _parameters(self) -> tuple[NamedParameter, ...]:
        if self._weights is None:
            self._weights = tuple(named for named in parameters_of(self.modules) if not named.is_bias)
        return self._weights

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the share of modules in evaluation mode, and a flag for each weight."""
        modules = self.modules
        if message.path or not modules:
            return None
        share = sum(not named.module.training for named in modules) / len(modules)
        flags = [float(named.parameter.requires_grad) for named in self._parameters()]
        return torch.tensor([share, *flags], dtype=torch.float64, device="cpu")

    def compute(self, message: Message) -> None:
        """Emit the share, and the flags that have changed."""
        mode, trainable = self.publishes
        share, *flags = message.data
        self.emit(message, share, mode)
        for named, flag in zip(self._parameters(), flags, strict=False):
            if self._shown.get(named.name) != bool(flag):
                self._shown[named.name] = bool(flag)
                self.emit(self._message(message, named, trainable), flag, trainable)

    def _message(self, message: Message, named: NamedParameter, kind: str) -> ModuleMessage:
        return ModuleMessage(message.stamp, kind, module=named.module, path=named.path, name=named.name)
