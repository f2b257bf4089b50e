"""Keeps one finding for each cause."""

from collections.abc import Iterable
from dataclasses import replace

from ikkuna.diagnosis.finding import SEVERITIES, Finding

__all__ = ["without_consequences"]

_SIGNAL = ("signal_scale", "signal_lost", "gradient_scale", "dead_units", "loss_at_init")

# Which findings a finding explains; the earlier entry explains the later one.
_EXPLAINS = {
    "nonfinite": (*_SIGNAL, "input_scale", "loss_scale", "ignores_input", "batch_leak", "time_leak", "softmax_twice"),
    "input_scale": ("signal_scale", "loss_at_init", "gradient_scale"),
    "identical_units": ("signal_lost", "gradient_scale"),
    "dead_units": ("signal_lost", "gradient_scale", "ignores_input"),
    "signal_scale": ("loss_at_init", "gradient_scale"),
    "signal_lost": ("ignores_input", "gradient_scale"),
    "ignores_input": ("gradient_scale",),
}


def without_consequences(findings: Iterable[Finding]) -> list[Finding]:
    """Return `findings` without those that another one explains.

    The finding that remains lists the others as ``consequences``, and has the highest of their severities.

    Examples
    --------
    >>> a, b = Finding("input_scale", "info", "large inputs"), Finding("loss_at_init", "warning", "large loss")
    >>> [(f.rule, f.severity, f.consequences) for f in without_consequences([a, b])]
    [('input_scale', 'warning', ('loss_at_init',))]
    """
    left = list(findings)
    for cause, explained in _EXPLAINS.items():
        causes = [finding for finding in left if finding.rule == cause]
        consequences = [finding for finding in left if finding.rule in explained]
        if not causes or not consequences:
            continue
        severity = max((f.severity for f in (causes[0], *consequences)), key=SEVERITIES.index)
        rules = (*causes[0].consequences, *(r for f in consequences for r in (f.rule, *f.consequences)))
        first = replace(causes[0], severity=severity, consequences=tuple(dict.fromkeys(rules)))
        left = [first if finding is causes[0] else finding for finding in left if finding not in consequences]
    return left
