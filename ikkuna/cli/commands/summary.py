"""Show a run at a glance in the terminal.

Show the last values, curves and heat maps of a run in the terminal.
"""

import argparse
import time

from ikkuna.cli.terminal import Terminal, add_muted_argument, add_run_argument, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--kind", help="draw the heat map of this kind only")
    parser.add_argument("--watch", action="store_true", help="write the summary again whenever the run has grown")
    parser.add_argument(
        "--interval", type=float, default=2.0, help="seconds between two looks with --watch (default: 2)"
    )
    add_muted_argument(parser)


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.cli.run_summary import summary_values, write_summary
    from ikkuna.errors import ConfigError
    from ikkuna.store import StoredRun, read_run

    if not options.interval > 0:
        raise ConfigError(f"--interval needs a positive number, got {options.interval}")
    path = chosen_run(options.path, terminal)
    if not options.watch:
        run = read_run(path)
        terminal.answer(summary_values(run), lambda: write_summary(run, terminal, options.kind, options.muted))
        return 0

    def write() -> None:
        terminal.clear()
        write_summary(run, terminal, options.kind if run.count else None, options.muted)

    run, seen = StoredRun(path), None
    while True:  # until the user interrupts
        if (run.count, run.last_step) != seen:
            seen = run.count, run.last_step
            terminal.answer(summary_values(run), write)
            terminal.flush()
        time.sleep(options.interval)
        run.update()
