"""Where tensors come from."""

from dataclasses import dataclass
from typing import Any

from ikkuna.metrics.messages.batch import message_name
from ikkuna.metrics.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.statistics import Record

__all__ = ["Site"]


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A kind of tensor, and the module it belongs to.

    A site equals only itself, which makes it a cheap key; each exporter creates each site once.

    Parameters
    ----------
    kind : str
        The kind.
    module : str or None
        Name of the module; ``None`` for the network.
    """

    kind: str
    module: str | None = None

    def message(self, stamp: Stamp, path: str = "", data: Any = None, record: Record | None = None) -> Message:
        """Return the message of one output or parameter of this site."""
        if self.module is None:
            return NetworkMessage(stamp, self.kind, data, record, path)
        name = message_name(self.kind, self.module, path)
        return ModuleMessage(stamp, self.kind, data, record, self.module, path, name)

    def __str__(self) -> str:
        return self.kind if self.module is None else f"{self.kind} of {self.module}"
