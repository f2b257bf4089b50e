"""Show what changed first before the loss jumped.

Show which quantities left their own band (running median and deviation) around a step, in the order in which they did. The exit status
is 1 if one did.
"""

import argparse
from typing import TYPE_CHECKING

from ikkuna.cli.terminal import Terminal, add_run_argument, chosen_run

if TYPE_CHECKING:
    from ikkuna.diagnosis.findings import Findings
    from ikkuna.report.first_changes import FirstChanges

_ROWS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--step", type=int, help="the step in question (default: the first jump of the loss)")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.diagnosis.check import check
    from ikkuna.report.first_changes import first_changes
    from ikkuna.store import read_run

    path = chosen_run(options.path, terminal)
    run = read_run(path)
    findings = check(path)
    found = first_changes(run, options.step, findings)
    terminal.answer({"run": str(run.path), **found.as_dict()}, lambda: _write(found, findings, terminal))
    return int(bool(found.changes))


def _write(found: "FirstChanges", findings: "Findings", terminal: Terminal) -> None:
    if found.step is None:
        terminal.write("The loss has no spike, or was not stored; --step asks about another step.")
        return
    if not found.changes:
        terminal.write(f"No quantity that is stored left its band around step {found.step}.")
        for finding in findings:
            is_earlier = finding.step is not None and finding.step < found.step and finding.severity != "info"
            if is_earlier or found.step in (finding.step, *finding.again):
                terminal.write(str(finding))
        return
    first = found.changes[0]
    place = f"{first.kind} of {first.module}" if first.module else first.kind
    terminal.write(terminal.styled(f"Step {found.step}: {place} changed first, at step {first.step}.", "bold"))
    if (cause := found.cause) is not None:
        terminal.write(f"Probably {cause[0]}. Try: {cause[1]}.")
    rows = [
        (
            str(c.step),
            c.module or "-",
            c.kind,
            f"{c.value:.4g}",
            f"{c.usual:.4g}",
            f"{c.distance:.3g}",
            c.finding or "-",
        )
        for c in found.changes[:_ROWS]
    ]
    terminal.write_table(("step", "module", "kind", "value", "usual", "distance", "finding"), rows)
    if len(found.changes) > _ROWS:
        terminal.write(f"… and {len(found.changes) - _ROWS} more" if terminal.can_write("…") else "...")
    terminal.write("The distance is in half-widths of the band of the values before; above 1 a value is outside.")
