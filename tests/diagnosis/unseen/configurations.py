"""Run many healthy configurations, and write which warnings and errors they get.

``python -m tests.diagnosis.unseen.configurations [--plain] [-o FILE] [RECIPE…]`` goes on where an earlier run ended.
``--plain`` trains without ikkuna and shows how the losses fall.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.diagnosis.unseen import Case
from tests.diagnosis.unseen.__main__ import run
from tests.diagnosis.unseen.judge import COLUMNS, LOUD
from tests.diagnosis.unseen.moving_targets import RECIPES
from tests.diagnosis.unseen.programs import Program
from tests.diagnosis.unseen.recipes import PROGRAMS, Draw, healthy_case, varied

RESULTS = Path(__file__).parent / "configurations.json"
SEEDS = range(12)


@dataclass(frozen=True)
class Configuration:
    recipe: str
    family: str
    seed: int
    make: Callable[[Draw], Program]

    @property
    def name(self) -> str:
        return f"{self.recipe}:{self.seed}"

    def build(self, draw: Draw | None = None) -> Program:
        torch.manual_seed(1000 + self.seed)
        return self.make(draw or Draw(self.seed))


def configurations() -> Iterator[Configuration]:
    """Yield all recipes with the first seed, then all with the second one, and so on."""
    for seed in SEEDS:
        for name, (family, make) in RECIPES.items():
            yield Configuration(name, family, seed, make)
        for name, other_rate in PROGRAMS.items():
            case = healthy_case(name)
            yield Configuration(name, case.family, seed, functools.partial(varied, case, other_rate=other_rate))


def measured(configuration: Configuration) -> dict:
    """Return settings, seconds, and the warnings and errors of the watched training and of the check before it."""
    draw = Draw(configuration.seed)
    configuration.build(draw)
    result = run(Case(configuration.build, configuration.family, True))
    loud = [{"column": c, **f} for c in COLUMNS for f in result[c] if f["severity"] in LOUD]
    kept = ("column", "rule", "severity", "module", "step", "text")
    seconds = sum(result[f"{column}_seconds"] for column in COLUMNS)
    failed = [result[f"{column}_error"] for column in COLUMNS if f"{column}_error" in result]
    settings = {"family": configuration.family, "settings": draw.settings, "seconds": round(seconds, 2)}
    return settings | ({"failed": failed} if failed else {}) | {"found": [{k: f[k] for k in kept} for f in loud]}


def losses(configuration: Configuration) -> list[float]:
    """Return means of the loss over eight parts of a training without ikkuna."""
    program, values = configuration.build(), []
    if program.loss:
        inner = program.loss

        def loss(*arguments):
            value = inner(*arguments)
            values.append(value.item())
            return value

        program.loss = loss
    program.loop(program)
    size = max(1, len(values) // 8)
    return [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis.unseen.configurations", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("recipes", nargs="*")
    chosen = parser.parse_args()
    output = chosen.output.absolute()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    done = {} if chosen.plain or not output.exists() else json.loads(output.read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for configuration in configurations():
            if configuration.name in done or (chosen.recipes and configuration.recipe not in chosen.recipes):
                continue
            if chosen.plain:
                say(f"{configuration.name} {' '.join(f'{value:.3g}' for value in losses(configuration))}")
                continue
            done[configuration.name] = measured(configuration)
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in done.items())
            output.write_text(f"{{\n{lines}\n}}\n")
    accused = Counter(result["family"] for result in done.values() if result["found"])
    say(f"{len(done)} configurations, {accused.total()} with a warning or an error: {dict(accused)}")


if __name__ == "__main__":
    main()
