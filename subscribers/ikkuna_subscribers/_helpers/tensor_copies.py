"""Copies of tensors, for metrics that compare a tensor with an earlier one."""

from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES

__all__ = ["TensorCopies", "require_parameter_kind"]


class TensorCopies:
    """One copy of a tensor for each series.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.export.messages import Stamp
    >>> copies, message = TensorCopies(), ModuleMessage(Stamp(0, 0, 0), "weights", torch.ones(2), module="fc")
    >>> copies.store(message); copies.find(message)
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str | None], Tensor] = {}

    def store(self, message: ModuleMessage) -> None:
        """Copy the tensor of `message`, and drop the previous copy of the same series."""
        self._tensors[message.kind, message.series_name] = message.data.clone()

    def find(self, message: ModuleMessage) -> Tensor | None:
        """Return the copy of the same series, or ``None`` if there is none of the same shape, dtype and device."""
        known, x = self._tensors.get((message.kind, message.series_name)), message.data
        fits = known is not None and (known.shape, known.dtype, known.device) == (x.shape, x.dtype, x.device)
        return known if fits else None


def require_parameter_kind(name: str, kind: str) -> None:
    """Raise `ConfigError`, in the name of the subscriber `name`, if a module can have several tensors of `kind` in a step."""
    if kind not in PARAMETER_KINDS and not kind.startswith(STATE_PREFIXES):
        raise ConfigError(
            f"{name} needs a kind with one tensor per parameter and step: "
            f"{', '.join(PARAMETER_KINDS)} or a state of the optimizer; got {kind!r}"
        )
