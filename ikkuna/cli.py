"""The command ``ikkuna``."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from ikkuna.errors import IkkunaError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, 1 if something was found, or 2 for bad input.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (IkkunaError, OSError) as error:
        print(f"ikkuna: {error}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ikkuna", description="Find mistakes in the training of PyTorch models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="apply rules to a finished run",
        description="Apply rules to a finished run. The exit status is 1 if a warning or an error was found, and 2 for bad input.",
    )
    check.add_argument("path", metavar="RUN", help="the directory of a run, an event file, or a file of JSON lines")
    check.add_argument("--json", action="store_true", help="write JSON instead of a table")
    check.add_argument(
        "--rules", default="default", help='comma-separated names of rules; "all" for every installed rule'
    )
    check.set_defaults(run=_check)
    return parser


def _check(options: argparse.Namespace) -> int:
    from ikkuna.diagnosis.check import check

    found = check(options.path, options.rules.split(","))
    if options.json:
        report = {
            "findings": [finding.as_dict() for finding in found],
            "judged": list(found.judged),
            "skipped": dict(found.skipped),
        }
        print(json.dumps(_finite(report), indent=1))
    else:
        print(found)
    return int(any(finding.severity != "info" for finding in found))


def _finite(value: Any) -> Any:
    """Return a value with NaN and infinities as texts, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
