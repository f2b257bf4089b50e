"""Generates a section for each rule from its docstring, a planted example, its picture, and the measured figures.

``.. ikkuna-rules::`` inserts the sections.  ``.. ikkuna-measured::`` inserts the sums of the measurement.
The figures are those of ``tests/diagnosis/measured.json``, which ``python -m tests.diagnosis.measure report --table FILE`` writes.
"""

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from ikkuna.diagnosis import Rule, get_rules

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # the tests are not installed
from tests.diagnosis.planted import FAULTS  # noqa: E402
from tests.diagnosis.rows import HELD_OUT, ROWS  # noqa: E402

MEASURED = ROOT / "tests" / "diagnosis" / "measured.json"
STEPS = 400
WIDTH, HEIGHT, MARGIN = 420, 110, 6
PLANTED, HEALTHY = "#c0392b", "#7f8c8d"

Points = list[tuple[int, float]]


def sections() -> list[tuple[str, str, str]]:
    """Return for each rule its name, the text of its section, and its picture."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    return [(rule.name, section(rule, measured), picture(rule.name)) for rule in get_rules("all")]


def section(rule: Rule, measured: Mapping[str, Any]) -> str:
    """Return the text of the section of a rule."""
    text = " ".join((type(rule).__doc__ or "").split())
    before, threshold, blind = re.fullmatch(r"(.*?) Threshold: (.*?) Cannot see: (.*)", text).groups()  # type: ignore[union-attr]
    fields = {
        "Severity": rule.severity + ("" if rule.is_default else "; it is not among the default rules"),
        "Threshold and its source": _sentence(threshold),
        "Measured": figures(rule.name, measured),
        "Cannot see": _sentence(blind),
        "Try": f"{rule.advice}.",
    }
    listed = "\n".join(f":{name}: {value}" for name, value in fields.items())
    return f"{before}\n\n{listed}\n\n{example(rule.name)}"


def figures(name: str, measured: Mapping[str, Any]) -> str:
    """Return the recall and the false alarms of a rule, in sentences."""
    counts = measured["rules"].get(name)
    healthy, alarms = measured["healthy"]["runs"], measured["healthy"]["rules"].get(name, 0)
    false = f"{alarms or 'No'} false alarm{'' if alarms == 1 else 's'} in {healthy} healthy runs."
    if not counts or not counts["runs"]:
        return f"No measured run has a mistake of this rule; the tests have one.  {false}"
    early = "" if counts["step"] is None else f", half of them by step {counts['step']:g}"
    others = (
        "" if counts["found"] == counts["named"] else f"; with the other rules for these mistakes {counts['found']}"
    )
    return f"It named {counts['named']} of {counts['runs']} planted mistakes that it may name{early}{others}.  {false}"


def example(name: str) -> str:
    """Return a mistake of the planted suite that the rule may name, as code; nothing if there is none."""
    found = [function for function, rules, _ in FAULTS.values() if name in rules]
    if not found:
        return ""
    shortest = min(map(inspect.getsource, found), key=len)
    body = shortest[shortest.index("def ") :].rstrip()
    return "A planted mistake that it may name:\n\n.. code-block:: python\n\n" + "\n".join(
        f"   {line}" for line in body.splitlines()
    )


def picture(name: str) -> str:
    """Return an SVG image of the series that shows the mistake, and of the same series in a similar healthy run."""
    planted, healthy, title = series_of(name)
    values = [value for _, value in (*planted, *healthy)]
    low, high = min(values), max(values)
    is_log = low > 0 and high > 50 * low
    scaled: Callable[[float], float] = math.log if is_log else float
    bottom, height = scaled(low), (scaled(high) - scaled(low)) or 1.0
    lines = [
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{_points(points, scaled, bottom, height)}"/>'
        for points, colour in ((healthy, HEALTHY), (planted, PLANTED))
        if points
    ]
    mistake = "red with the mistake" if planted else "no number with the mistake"
    extent = f"{low:.3g} to {high:.3g}{', logarithmic' if is_log else ''}, {STEPS} steps"
    label = f"{title}: {mistake}, grey in a similar healthy run; {extent}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT + 18}" '
        f'width="{WIDTH}" aria-label="{label}">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbbbbb"/>{"".join(lines)}'
        f'<text x="0" y="{HEIGHT + 13}" font-size="9" font-family="sans-serif" fill="currentColor">{label}</text></svg>'
    )


def series_of(name: str) -> tuple[Points, Points, str]:
    """Return the points of the series that differs between both runs, and its name."""
    if name in HELD_OUT:
        _, worse, better = HELD_OUT[name]
        kind = next(iter(worse))
        return _sampled(worse[kind]), _sampled(better[kind]), f"{kind} on held-out data"
    planted, healthy = ROWS[name]
    for key in (*planted, *healthy):
        runs = [_sampled(rows[key]) if key in rows else [] for rows in (planted, healthy)]
        if runs[0] != runs[1] and any(runs):
            kind, module = key
            return runs[0], runs[1], f"{kind} of {module}" if module else kind
    raise ValueError(f"the series of {name} with the mistake and without it are equal")


def _sampled(function: Callable[[int], float | None]) -> Points:
    values = ((step, function(step)) for step in range(STEPS))
    return [(step, float(value)) for step, value in values if value is not None and math.isfinite(value)]


def _points(points: Sequence[tuple[int, float]], scaled: Callable[[float], float], bottom: float, height: float) -> str:
    """Return the coordinates of a line; of many points every fourth."""
    inner = HEIGHT - 2 * MARGIN
    chosen = points if len(points) <= STEPS // 4 else points[::4]
    return " ".join(
        f"{step / STEPS * WIDTH:.0f},{HEIGHT - MARGIN - (scaled(value) - bottom) / height * inner:.1f}"
        for step, value in chosen
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def sums(measured: Mapping[str, Any]) -> str:
    """Return the sums over all measured runs, and the table of the faults that were missed, as reStructuredText."""
    healthy = measured["healthy"]
    total = measured["runs"] + healthy["runs"]
    lines = [
        f"* {measured['found']} of {measured['runs']} mistakes were found, {measured['named']} of them as the cause,"
        f" half of them by step {measured['step']:g}.",
        f"* The module with the mistake, or one of the two behind it, was named in {measured['near']} of {measured['with_module']} runs.",
        f"* {measured['others']} further findings in these runs name something else.",
        f"* {healthy['alarms'] or 'None'} of {healthy['runs']} healthy runs had a warning or an error.",
    ]
    if total < measured["planned"]:
        lines.append(f"* These are {total} of {measured['planned']} planned runs, drawn at random.")
    missed = [(name, counts) for name, counts in measured["faults"].items() if counts["missed"]]
    names = ", ".join(f"``{name}`` ({len(counts['missed'])} of {counts['runs']})" for name, counts in missed)
    lines.append(f"* Missed: {names or 'none'}.")
    if healthy["alarms"] == 0 and healthy["runs"]:
        bound = 1 - 0.05 ** (1 / healthy["runs"])
        lines.append(
            f"* The rate of false alarms is then below {bound:.1%} with a confidence of 95%, for networks like these."
        )
    return "\n".join(lines) + "\n"


class IkkunaRules(SphinxDirective):
    """Inserts the sections of the rules."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for name, text, svg in sections():
            part = nodes.section(ids=[f"rule-{name.replace('_', '-')}"], names=[name])
            part += nodes.title("", "", nodes.literal("", name))
            part += self.parse_text_to_nodes(text)
            part += nodes.raw("", svg, format="html")
            found.append(part)
        return found


class IkkunaMeasured(SphinxDirective):
    """Inserts the sums of the measurement."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(sums(json.loads(MEASURED.read_text(encoding="utf-8"))))


def setup(app: Any) -> dict[str, bool]:
    """Add the directives."""
    app.add_directive("ikkuna-rules", IkkunaRules)
    app.add_directive("ikkuna-measured", IkkunaMeasured)
    return {"parallel_read_safe": True}
