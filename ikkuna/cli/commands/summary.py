"""``ikkuna summary``: a run at a glance, in the terminal."""

import argparse
import time

from ikkuna.cli.runs import add_muted_argument, add_run_argument, chosen_run
from ikkuna.cli.terminal import Command, Terminal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--kind", help="draw the heat map of this kind only")
    parser.add_argument("--watch", action="store_true", help="write the summary again whenever the run has grown")
    parser.add_argument(
        "--interval", type=float, default=2.0, help="seconds between two looks with --watch (default: 2)"
    )
    add_muted_argument(parser)
    parser.add_argument("--json", action="store_true", help="write the last values as JSON")


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.cli.run_summary import summary_values, write_summary
    from ikkuna.errors import ConfigError
    from ikkuna.store import StoredRun, read_run

    if not options.interval > 0:
        raise ConfigError(f"--interval needs a positive number, got {options.interval}")
    path = chosen_run(options.path, terminal)
    if not options.watch:
        run = read_run(path)
        if options.json:
            terminal.write_json(summary_values(run))
        else:
            write_summary(run, terminal, options.kind, options.muted)
        return 0
    run, seen = StoredRun(path), None
    while True:  # until the user interrupts
        if (run.count, run.last_step) != seen:
            seen = run.count, run.last_step
            if options.json:
                terminal.write_json(summary_values(run))
            else:
                terminal.clear()
                write_summary(run, terminal, options.kind if run.count else None, options.muted)
            terminal.flush()
        time.sleep(options.interval)
        run.update()


command = Command(
    help="show a run at a glance in the terminal",
    description="Show the last values, curves and heat maps of a run in the terminal.",
    add_arguments=_add_arguments,
    run=_run,
)
