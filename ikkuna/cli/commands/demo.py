"""Train a small network with a planted mistake, and find it.

Train a small network with a planted mistake for some seconds, and show how ikkuna finds it.
"""

import argparse
from pathlib import Path

from ikkuna.cli.terminal import Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-dir", default="run", help="the directory of the runs (default: run)")
    parser.add_argument("--steps", type=int, default=300, help="the number of steps (default: 300)")
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: report.html)")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.cli.run_summary import write_summary
    from ikkuna.cli.sample_training import train_sample
    from ikkuna.cli.terminal import runs_by_age
    from ikkuna.diagnosis import Findings
    from ikkuna.diagnosis.check import check
    from ikkuna.errors import ConfigError
    from ikkuna.report import write_report
    from ikkuna.report.page import page_target
    from ikkuna.store import read_run

    if options.steps < 1:
        raise ConfigError(f"--steps needs a positive number, got {options.steps}")
    page_target(options.output)
    say = (lambda text="": None) if options.json else terminal.write
    say("Training a network of four hidden layers. All units of one layer are dead: its bias is -20.")
    train_sample(Path(options.log_dir), options.steps, **({"verbosity": 0} if options.json else {}))
    run = runs_by_age(Path(options.log_dir))[-1]
    findings = check(run)
    page = write_report(run, options.output, terminal.progress)
    if options.json:
        terminal.write_json({"run": str(run), "page": str(page), "findings": [each.as_dict() for each in findings]})
        return 0
    say()
    write_summary(read_run(run), terminal, heatmaps=2)
    say()
    terminal.write_lines(Findings(findings, findings.judged, note=findings.note).lines(terminal.styled))
    say()
    say(f"Open {page}: it shows the run with its findings.")
    say(f"Next:  ikkuna why {run}   ikkuna tensorboard {options.log_dir}   ikkuna summary {run}")
    return 0
