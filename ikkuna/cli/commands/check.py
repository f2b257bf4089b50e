"""``ikkuna check``: shows the findings of a finished run, or applies rules to it again."""

import argparse

from ikkuna.cli.runs import add_run_argument, chosen_run
from ikkuna.cli.terminal import Command, Terminal

__all__ = ["command"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    parser.add_argument(
        "--rules",
        help='judge every step again: comma-separated names of rules, "default", or "all" for every installed rule',
    )


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.diagnosis.judge import check

    found = check(chosen_run(options.path, terminal), options.rules and options.rules.split(","))
    if options.json:
        terminal.write_json(
            {
                "findings": [finding.as_dict() for finding in found],
                "judged": list(found.judged),
                "skipped": dict(found.skipped),
                "needed": dict(found.needed),
                "note": found.note,
            }
        )
    else:
        terminal.write_lines(found.lines(terminal.styled))
    return int(any(finding.severity != "info" for finding in found))


command = Command(
    help="show the findings of a finished run",
    description="Show the findings that the rules have stored while the model trained, or judge the run again. "
    "The exit status is 1 if a warning or an error was found, and 2 for bad input.",
    add_arguments=_add_arguments,
    run=_run,
)
