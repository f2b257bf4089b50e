"""Copies of tensors that a metric compares later ones with."""

from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES

__all__ = ["Kept", "require_parameter_kind"]


class Kept:
    """One copy for each series.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.export.messages import Stamp
    >>> kept, message = Kept(), ModuleMessage(Stamp(0, 0, 0), "weights", torch.ones(2), module="fc")
    >>> kept.keep(message); kept.find(message)
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str | None], Tensor] = {}

    def keep(self, message: ModuleMessage) -> None:
        """Copy the message's tensor in place of the one kept before."""
        self._tensors[message.kind, message.series_name] = message.data.clone()

    def find(self, message: ModuleMessage) -> Tensor | None:
        """Return what is kept of the same series; ``None`` for nothing, and for one of another shape, dtype or device."""
        known, x = self._tensors.get((message.kind, message.series_name)), message.data
        fits = known is not None and (known.shape, known.dtype, known.device) == (x.shape, x.dtype, x.device)
        return known if fits else None


def require_parameter_kind(name: str, kind: str) -> None:
    """Refuse a kind of which a module can have several in a step, for the subscriber `name`."""
    if kind not in PARAMETER_KINDS and not kind.startswith(STATE_PREFIXES):
        raise ConfigError(
            f"{name} compares what there is one of in a step: {', '.join(PARAMETER_KINDS)} or a state of the optimizer; "
            f"got {kind!r}"
        )
