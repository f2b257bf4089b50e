"""A mistake that a rule or a check has found."""

from dataclasses import asdict, dataclass
from typing import Any

from ikkuna.errors import ConfigError, unknown_name
from ikkuna.printable import printable

__all__ = ["SEVERITIES", "Finding"]


SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: where it is, since when, the figure that shows it, and what to try.

    Parameters
    ----------
    rule : str
        Name of the rule or check.
    severity : {'info', 'warning', 'error'}
        ``error``: training cannot work as intended; ``warning``: it probably does not; ``info``: a fact.
    message : str
        What is wrong, in a sentence.
    module : str, optional
        Name of the module; ``None`` if the finding is about the network.
    kind : str, optional
        The kind of the figure, such as ``weights_norm2``.
    step : int, optional
        The first step at which it was seen; ``None`` before the first step.
    value : float, optional
        The figure that exceeds its threshold.
    advice : str
        What to try.
    evidence : tuple of (object, float)
        The series behind the figure: pairs of a step or a module name, and a value.
    modules : tuple of str
        Every module in which the rule found the mistake, if there are several.
    consequences : tuple of str
        Other rules whose findings this one explains.
    version : int
        The version of the rule, which changes with its meaning or its thresholds.
    ended : int, optional
        The step at which the rule no longer saw the mistake; ``None`` while it lasts.

    Raises
    ------
    ConfigError
        If the severity is unknown.

    Examples
    --------
    >>> print(Finding("dead_units", "warning", "97% of the units are dead.", "fc1", step=30, value=0.97))
    warning: dead_units in fc1 at step 30: 97% of the units are dead.
    """

    rule: str
    severity: str
    message: str
    module: str | None = None
    kind: str | None = None
    step: int | None = None
    value: float | None = None
    advice: str = ""
    evidence: tuple[tuple[int | str, float], ...] = ()
    modules: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    version: int = 1
    ended: int | None = None

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ConfigError(unknown_name("severity", self.severity, SEVERITIES))

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        since = "" if self.step is None else f" at step {self.step}"
        return printable(f"{self.severity}: {self.rule}{place}{since}: {self.message}")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain values."""
        return asdict(self)

    def as_page(self) -> str:
        """Return the finding as a page of Markdown."""
        return f"**{self}**\n\n{self.advice}"
