"""``ikkuna demo``: trains a small network with a planted mistake, and shows how ikkuna finds it."""

import argparse
from pathlib import Path

from ikkuna.cli.terminal import Command, Terminal

__all__ = ["command"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-dir", default="run", help="the directory of the runs (default: run)")
    parser.add_argument("--steps", type=int, default=300, help="the number of steps (default: 300)")


def _run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.cli.run_summary import write_summary
    from ikkuna.cli.sample_training import train_sample
    from ikkuna.diagnosis import Findings
    from ikkuna.diagnosis.judge import check
    from ikkuna.errors import ConfigError
    from ikkuna.store import find_runs, read_run

    if options.steps < 1:
        raise ConfigError(f"--steps needs a positive number, got {options.steps}")
    terminal.write("Training a network of four hidden layers. All units of one layer are dead: its bias is -20.")
    train_sample(Path(options.log_dir), options.steps)
    run = find_runs(Path(options.log_dir))[-1]
    terminal.write()
    write_summary(read_run(run), terminal, heatmaps=2)
    terminal.write()
    findings = check(run)
    terminal.write(Findings(findings, findings.judged, note=findings.note))
    terminal.write()
    terminal.write(f"Next:  ikkuna report {run}   ikkuna tensorboard {options.log_dir}   ikkuna summary {run}")
    return 0


command = Command(
    help="train a small network with a planted mistake, and find it",
    description="Train a small network with a planted mistake for some seconds, and show how ikkuna finds it.",
    add_arguments=_add_arguments,
    run=_run,
)
