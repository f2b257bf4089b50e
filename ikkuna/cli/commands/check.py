"""Show the findings of a finished run.

Show the findings that the rules have stored while the model trained, or judge the run again. The exit status is 1 if a warning or an
error was found, and 2 for bad input.
"""

import argparse

from ikkuna.cli.terminal import Terminal, add_muted_argument, add_run_argument, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser, several=True)
    add_muted_argument(parser)
    parser.add_argument(
        "--rules",
        help='judge every step again: comma-separated names of rules, "default", or "all" for every installed rule',
    )
    parser.add_argument(
        "--learn", action="store_true", help="learn from at least 3 healthy runs what they have in common"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="with --learn: the file to write (default: baseline.npz)"
    )
    parser.add_argument(
        "--baseline", metavar="FILE", help="find where the run departs from the runs that FILE was learned from"
    )


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.errors import ConfigError

    runs = [chosen_run(path, terminal) for path in options.runs]
    if options.learn:
        return _learn(runs, options.output or "baseline.npz", terminal)
    if len(runs) > 1:
        raise ConfigError(f"without --learn, check needs one run, got {len(runs)}")
    if options.baseline:
        from ikkuna.diagnosis.baseline import check_baseline

        found = check_baseline(runs[0], options.baseline)
    else:
        from ikkuna.diagnosis.check import check

        found = check(runs[0], options.rules and options.rules.split(","), options.muted)
    facts = {
        "findings": [finding.as_dict() for finding in found],
        "judged": list(found.judged),
        "skipped": dict(found.skipped),
        "needed": dict(found.needed),
        "note": found.note,
    }
    terminal.answer(facts, lambda: terminal.write_lines(found.lines(terminal.styled)))
    return int(any(finding.severity != "info" for finding in found))


def _learn(runs: list[str], output: str, terminal: Terminal) -> int:
    from ikkuna.diagnosis.baseline import learn

    found = learn(runs)
    path = found.write(output)
    terminal.write(
        f"wrote {path}: {len(found.keys)} series of {found.runs} runs up to step {found.edges[-1] - 1}; "
        f"the limit of the score is {found.limit:.3g}"
    )
    return 0
