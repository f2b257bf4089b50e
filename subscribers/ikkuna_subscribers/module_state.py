"""The training flags of modules and parameters."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.tied_weights import embedding_pairs, have_same_values
from ikkuna.export.messages import Message, ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.modules import NamedParameter, parameters_of

__all__ = ["ModuleStateSubscriber"]


class _Pair(NamedTuple):
    """An embedding and an output layer that share a weight."""

    name: str
    embedding: nn.Module
    layer: nn.Module

    @property
    def is_untied(self) -> bool:
        return self.embedding._parameters.get("weight") is not self.layer._parameters.get("weight")


class ModuleStateSubscriber(PlotSubscriber):
    """The share of modules in evaluation mode, the weights that are trainable, and tied weights that came apart.

    The flags are read when the network is called.

    Takes ``input_data`` as the sign of a call; publishes ``evaluation_mode`` of the whole network, a share between 0 and 1,
    ``weight_requires_grad``, 0 or 1 for each weight, and ``untied_weights`` for output layers, 1 if the weight is another tensor than that
    of an embedding although both were one tensor at the first sample, or two with equal values at registration; else 0.
    A weight is published at the first sample and when its flag changes.

    Look for: an ``evaluation_mode`` of 1 in training, because dropout is then off and batch norm uses old statistics;
    a weight that is not trainable between two that are;
    a weight that is no longer tied, because both copies are then trained apart.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ModuleStateSubscriber().publishes
    ('evaluation_mode', 'weight_requires_grad', 'untied_weights')
    """

    merge = "max"
    needs_model = True
    state = ("_shown",)

    def __init__(self, **options: Any) -> None:
        name_results(options, "evaluation_mode", "weight_requires_grad", "untied_weights")
        super().__init__("input_data", **options)
        self._weights: tuple[NamedParameter, ...] | None = None
        self._pairs: tuple[_Pair, ...] | None = None
        self._shown: dict[str, bool] = {}

    def begin(self) -> None:
        """Find the weights that are tied, and those that are copies; the comparison of values waits for the device."""
        self._pairs = tuple(self._find_pairs(compares=True))

    def _find_pairs(self, compares: bool) -> Iterator[_Pair]:
        modules = ((named.name, named.module) for named in self.modules)
        for _, embedding, name, layer in embedding_pairs(modules):
            a, b = embedding._parameters["weight"], layer._parameters["weight"]
            if a is b or (compares and a is not None and b is not None and have_same_values(a, b)):
                yield _Pair(name, embedding, layer)

    def _parameters(self) -> tuple[NamedParameter, ...]:
        if self._weights is None:
            self._weights = tuple(named for named in parameters_of(self.modules) if not named.is_bias)
        return self._weights

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the share of modules in evaluation mode, a flag for each weight, and one for each pair of tied weights."""
        modules = self.modules
        if message.path or not modules:
            return None
        if self._pairs is None:
            self._pairs = tuple(self._find_pairs(compares=False))
        share = sum(not named.module.training for named in modules) / len(modules)
        flags = [float(named.parameter.requires_grad) for named in self._parameters()]
        untied = [float(pair.is_untied) for pair in self._pairs]
        return torch.tensor([share, *flags, *untied], dtype=torch.float64, device="cpu")

    def compute(self, message: Message) -> None:
        """Emit the share, and the flags that have changed."""
        mode, trainable, untied = self.publishes
        share, *flags = message.data
        self.emit(message, share, mode)
        weights, pairs = self._parameters(), self._pairs or ()
        for named, flag in zip(weights, flags, strict=False):
            if self._shown.get(named.name) != bool(flag):
                self._shown[named.name] = bool(flag)
                self.emit(self._message(message, named, trainable), flag, trainable)
        for pair, flag in zip(pairs, flags[len(weights) :], strict=False):
            key = f"{untied} {pair.name}"
            if self._shown.get(key) != bool(flag):
                self._shown[key] = bool(flag)
                self.emit(ModuleMessage(message.stamp, untied, module=pair.name, name=pair.name), flag, untied)

    def _message(self, message: Message, named: NamedParameter, kind: str) -> ModuleMessage:
        return ModuleMessage(message.stamp, kind, module=named.module, path=named.path, name=named.name)
