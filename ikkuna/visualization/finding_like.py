"""The interface of findings."""

from typing import Any, Protocol, TypeGuard

__all__ = ["FindingLike", "finding_text", "is_finding"]

_ATTRIBUTES = ("rule", "severity", "message", "advice")


class FindingLike(Protocol):
    """A mistake that a rule has found; ``str()`` of it is one line."""

    @property
    def rule(self) -> str: ...  # noqa: D102 - the attributes are those of a finding
    @property
    def severity(self) -> str: ...  # noqa: D102
    @property
    def message(self) -> str: ...  # noqa: D102
    @property
    def advice(self) -> str: ...  # noqa: D102


def is_finding(value: Any) -> TypeGuard[FindingLike]:
    """Return whether `value` has all attributes of a :class:`FindingLike`.

    Examples
    --------
    >>> is_finding("dead units")
    False
    """
    return all(hasattr(value, name) for name in _ATTRIBUTES)


def finding_text(finding: FindingLike) -> str:
    """Return a finding as a page of Markdown."""
    return f"**{finding}**\n\n{finding.advice}"
