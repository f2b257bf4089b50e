"""Run the programs as the README says, with the default options, and write what was found.

``python -m tests.diagnosis.unseen [--set later] [-o FILE] [NAME…]`` watches each program, checks a second copy of it before
the first step, and writes the findings of both as JSON.
"""

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import ikkuna
from tests.diagnosis.unseen import SETS, Case, cases
from tests.diagnosis.unseen.programs import Program

RESULTS = {
    "first": "results.json",
    "later": "later_results.json",
    "third": "third_results.json",
    "fourth": "fourth_results.json",
}


def rows(findings) -> list[dict]:
    return [
        {
            "rule": f.rule,
            "severity": f.severity,
            "module": f.module,
            "modules": f.modules,
            "step": f.step,
            "text": f.message,
            "advice": f.advice,
        }
        for f in findings
    ]


def watched(case: Case) -> list[dict]:
    """Return the findings of a training that is watched as in the README."""
    torch.manual_seed(0)
    program = case.build()
    monitors = [ikkuna.watch(program.model, program.loss) if program.loss else ikkuna.watch(program.model)]
    monitors += [ikkuna.watch(model) for model in program.others]
    try:
        program.loop(program)
    except Exception as error:  # a training may stop with an error of its own; what was found until then counts
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(Path(ikkuna.__file__).parent):
            raise
    for monitor in monitors:
        monitor.close()
    return [row for monitor in monitors for row in rows(monitor.findings)]


def checked(case: Case) -> list[dict]:
    """Return the findings of the check before the first step."""
    torch.manual_seed(0)
    program = case.build()
    if program.loss is None and program.objective is None:
        return []  # the check wants a loss of outputs and labels, or a function that returns what the loop minimises
    given = {"loss": program.loss} if program.loss else {"objective": partial(of_model, program)}
    return rows(ikkuna.preflight(program.model, next(iter(program.loader)), optimizer=program.optimizer, **given))


def of_model(program: Program, model: torch.nn.Module, batch: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the objective of a program with this model."""
    return program.objective(replace(program, model=model), *batch)


def run(case: Case) -> dict:
    """Return the findings of both, the CPU seconds of the watched training, and what failed."""
    result = {}
    for column, find in (("watch", watched), ("preflight", checked)):
        begin = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                result[column] = find(case)
        except Exception as error:  # a program that stops is a result
            result[column] = []
            result[f"{column}_error"] = f"{type(error).__name__}: {error}"[:300]
        result[f"{column}_seconds"] = round(time.process_time() - begin, 2)
    return result


def write(path: Path, results: dict) -> None:
    """Write a line for each program."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    path.write_text(f"{{\n{lines}\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis.unseen", description=__doc__)
    parser.add_argument("--set", choices=SETS, default="first")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    output = (chosen.output or Path(__file__).parent / RESULTS[chosen.set]).absolute()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = json.loads(output.read_text()) if chosen.names and output.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, case in cases(chosen.set).items():
            if not chosen.names or name in chosen.names:
                results[name] = run(case)
                write(output, results)


if __name__ == "__main__":
    main()
