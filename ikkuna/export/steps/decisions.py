"""The decisions of the step tracker."""

from dataclasses import dataclass

from ikkuna.export.messages.stamp import Stamp

__all__ = ["Abandoned", "Closed", "Decision", "EpochFinished", "Merged", "Opened", "Restarted"]


@dataclass(frozen=True, slots=True)
class Opened:
    """A step begins.

    Parameters
    ----------
    stamp : Stamp
        Of the step.
    starts_epoch : bool
        Whether it is the first step of its epoch.
    is_carried : bool
        Whether it contains parts that the step before has carried over.
    """

    stamp: Stamp
    starts_epoch: bool = False
    is_carried: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """Measurements of one part now belong to another part."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The measurements of some parts belong to no step; `parameters` if those of the parameters do not either."""

    parts: tuple[int, ...]
    parameters: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """A step is over.

    Parameters
    ----------
    stamp : Stamp
        Of the step.
    skipped : bool
        Whether no optimizer has stepped; the next step gets the same number.
    parts : tuple of int
        Parts that belong to the step; all others are discarded, except `carried`.
    carried : tuple of int
        Parts that belong to the step that opens next.
    """

    stamp: Stamp
    skipped: bool = False
    parts: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The open step ends without a message."""


@dataclass(frozen=True, slots=True)
class EpochFinished:
    """An epoch is over; `stamp` is that of its last step."""

    stamp: Stamp


Decision = Opened | Merged | Restarted | Closed | Abandoned | EpochFinished
