"""Train a small network with a planted mistake, and find it.

Train a small network with a planted mistake for some seconds, and show how ikkuna finds it.
"""

import argparse
import itertools
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikkuna.cli.terminal import Terminal

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-dir", default="run", help="the directory of the runs (default: run)")
    parser.add_argument("--steps", type=int, default=300, help="the number of steps (default: 300)")
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: report.html)")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.cli.run_summary import write_summary
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


def _data() -> "tuple[Tensor, Tensor]":
    """Return four clusters of points in 16 dimensions."""
    import torch

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4, device="cpu").repeat(128)
    centres = torch.randn(4, 16, generator=generator, device="cpu")
    return centres[labels] + 0.4 * torch.randn(512, 16, generator=generator, device="cpu"), labels


def _model() -> "nn.Module":
    """Return a network with one layer whose units are all dead: its bias is too negative."""
    import torch
    from torch import nn

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    sizes = (16, 64, 64, 64, 64)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
        layers[f"hidden{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
    layers["classifier"] = nn.Linear(64, 4)
    model = nn.Sequential(layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
        layers["hidden3"].get_parameter("bias").fill_(-20.0)
    return model


def train_sample(log_dir: Path, steps: int = 200, **options: Any) -> None:
    """Train a network with a dead layer, watched with its loss.

    Parameters
    ----------
    log_dir : Path
        The directory of the runs.
    steps : int
        The number of steps.
    **options : Any
        Further arguments of `ikkuna.watch`.
    """
    import torch
    from torch import nn

    from ikkuna.export.watch import watch

    model, loss = _model(), nn.CrossEntropyLoss()
    points, labels = _data()
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(1), device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, loss=loss, log_dir=log_dir, **options):
        for step in range(steps):
            rows = order[torch.arange(step * 32, step * 32 + 32, device="cpu") % len(order)]
            optimizer.zero_grad()
            loss(model(points[rows]), labels[rows]).backward()
            optimizer.step()
