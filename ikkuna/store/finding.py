"""A mistake that a rule or a check has found."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ikkuna.errors import ConfigError, unknown_name
from ikkuna.printable import printable
from ikkuna.store.checks import (
    MAX_INT,
    Check,
    integer,
    known_fields,
    list_of,
    none,
    number,
    one_of,
    pair_of,
    refused,
    text,
)
from ikkuna.store.sparkline import text_sparkline

SEVERITIES = ("info", "warning", "error")
_NAMED = 12  # modules
LATER_STEPS = 12
"""The number of steps in `Finding.again`."""


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
    limits : (float, float), optional
        The healthy range of `value`; the threshold is its finite end.
    class_name : str
        The name of the module's class.
    source : str
        The class of the user's program that contains the module, with its file and line, such as ``"Block, net.py:12"``.
    against : tuple of str
        What was looked at and speaks against the finding.
    again : tuple of int
        The last 12 later steps at which the mistake began again in the same module, such as those of further spikes.

    Raises
    ------
    ConfigError
        If the severity is unknown.

    Examples
    --------
    >>> print(Finding("dead_units", "warning", "97% of the units are dead.", "fc1", step=30, value=0.97))
    warning: dead_units in fc1 at step 30: 97% of the units are dead.
    >>> dead = Finding("dead_units", "warning", "Units are dead.", "fc1", "activations_sparsity", 30, 0.97, "lower the bias",
    ...                limits=(-math.inf, 0.9), class_name="ReLU", source="Block, net.py:12")
    >>> for label, text in dead.details():
    ...     print(f"{label}: {text}.")
    Measured: 0.97 from activations_sparsity; healthy is below 0.9.
    Module: fc1 (ReLU), defined in Block, net.py:12.
    Try: lower the bias.
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
    limits: tuple[float, float] | None = None
    class_name: str = ""
    source: str = ""
    against: tuple[str, ...] = ()
    again: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ConfigError(unknown_name("severity", self.severity, SEVERITIES))

    def __str__(self) -> str:
        return printable(f"{self.head}: {self.message}")

    @property
    def head(self) -> str:
        """The severity, the rule, the place and the step."""
        place = f" in {self.place}" if self.module else ""
        since = "" if self.step is None else f" at step {self.step}"
        return f"{self.severity}: {self.rule}{place}{since}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain values."""
        return asdict(self)

    @property
    def place(self) -> str:
        """The module with its class; empty for the network."""
        return f"{self.module} ({self.class_name})" if self.module and self.class_name else self.module or ""

    def details(self) -> list[tuple[str, str]]:
        """Return labels and texts of the evidence, of the place, and of what to try, in the words of every view."""
        found = [
            ("Measured", self._measured()),
            ("Module", f"{self.place}, defined in {self.source}" * bool(self.source)),
        ]
        if len(self.modules) > 1:
            more = ", …" if len(self.modules) > _NAMED else ""
            found.append((f"In {len(self.modules)} modules", ", ".join(self.modules[:_NAMED]) + more))
        ended = "" if self.ended is None else f"the rule does not see it any more since step {self.ended}"
        found += [
            ("It also explains", ", ".join(self.consequences)),
            ("Against it", "; ".join(self.against)),
            ("Again", f"at step{'s' * (len(self.again) > 1)} {', '.join(map(str, self.again))}" * bool(self.again)),
            ("Over", ended),
        ]
        return [(label, text.rstrip(".")) for label, text in (*found, ("Try", self.advice)) if text]

    def curve(self) -> list[tuple[int, float]]:
        """Return the steps and values behind the figure, if it comes from a series over steps."""
        return [(place, value) for place, value in self.evidence if isinstance(place, int)]

    def curve_caption(self) -> str:
        """Return the range and the steps of the curve; empty without at least two finite values."""
        values = [value for _, value in self.curve() if math.isfinite(value)]
        if len(values) < 2:
            return ""
        first, last = self.curve()[0][0], self.curve()[-1][0]
        return f"{min(values):.3g} to {max(values):.3g}, steps {first} to {last}"

    def lines(self) -> list[str]:
        """Return the details and the curve as lines of text."""
        lines = [f"{label}: {text}." for label, text in self.details()]
        if caption := self.curve_caption():
            curve = text_sparkline([value for _, value in self.curve()])
            lines.insert(self.value is not None, f"Curve: {curve} {caption}.")
        return lines

    def _measured(self) -> str:
        if self.value is None:
            return ""
        text = f"{self.value:.4g}{f' from {self.kind}' if self.kind else ''}"
        low, high = self.limits or (-math.inf, math.inf)
        if math.isfinite(low) and math.isfinite(high):
            return f"{text}; healthy is {low:.4g} to {high:.4g}"
        if math.isfinite(high) or math.isfinite(low):
            return f"{text}; healthy is {f'below {high:.4g}' if math.isfinite(high) else f'above {low:.4g}'}"
        before = [
            value for step, value in self.curve() if self.step is not None and step < self.step and math.isfinite(value)
        ]
        return f"{text}; {min(before):.4g} to {max(before):.4g} was usual before" if len(before) > 2 else text

    def as_page(self) -> str:
        """Return the finding as a page of Markdown."""
        return "\n\n".join((f"**{self}**", *self.lines()))


def _severity(value: Any, place: str) -> Any:
    if value not in SEVERITIES:
        raise refused(place, f"one of {', '.join(SEVERITIES)}", value)
    return value


_STEP, _TEXTS = integer(-MAX_INT), list_of(text)
FIELDS: Mapping[str, Check] = {
    **dict.fromkeys(("rule", "message", "advice", "class_name", "source"), text),
    "severity": _severity,
    **dict.fromkeys(("module", "kind"), one_of(none, text)),
    **dict.fromkeys(("step", "ended"), one_of(none, _STEP)),
    **dict.fromkeys(("modules", "consequences", "against"), _TEXTS),
    "again": list_of(_STEP),
    "value": one_of(none, number),
    "limits": one_of(none, pair_of(number, number)),
    "evidence": list_of(pair_of(one_of(_STEP, text), number)),
    "version": _STEP,
}
"""The checks of the fields of a finding that is read from a file."""


def finding_of(entry: Any, place: str = "a finding") -> Finding:
    """Return a finding from its fields in a file; raise `ValueError` if one is missing or has a wrong type."""
    return Finding(**known_fields(entry, place, FIELDS, ("rule", "severity", "message")))
