"""The contract of a check."""

from collections.abc import Callable, Iterable

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.trial import Trial

__all__ = ["Check"]

Check = Callable[[Trial], Iterable[Finding]]
