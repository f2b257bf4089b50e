"""Training programs by an author who had not read the rules: with a fault each, or healthy.

Each fault has a label, which was committed before any program was run:

- *cause*: the cause, in the words of a user;
- *module*: the name of the module at fault, or None where there is no such module;
- *knowable*: whether one run shows the cause to an observer of model, batch, loss and optimizer;
- *why*: by which observation it is knowable, or why it is not (the later sets state this for each program);
- *report*: the address of the published bug report that the program is rebuilt from, if it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.diagnosis.unseen.programs import Program


@dataclass(frozen=True)
class Case:
    build: Callable[[], Program]
    family: str
    healthy: bool
    cause: str = ""
    module: str | None = None
    knowable: bool = True
    report: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        return self.build.__name__


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    if case.name in CASES:
        raise ValueError(f"two cases have the name {case.name!r}")
    CASES[case.name] = case


def fault(family: str, cause: str, module: str | None = None, knowable: bool = True, report: str = "", why: str = ""):
    """Register a program with a fault, with its label."""

    def decorate(build: Callable[[], Program]) -> Callable[[], Program]:
        add(Case(build, family, False, cause, module, knowable, report, why))
        return build

    return decorate


def healthy(family: str):
    """Register a program without a fault."""

    def decorate(build: Callable[[], Program]) -> Callable[[], Program]:
        add(Case(build, family, True))
        return build

    return decorate


#: the files of each set; the rules were developed after the first set was known, and before the later one was;
#: the authors of the third and of the fourth set had not read them either
SETS = {
    "first": ("supervised", "sequences", "generative", "other_models", "loops", "reports", "sound", "sound_more"),
    "later": ("later_supervised", "later_sequences", "later_generative", "later_loops"),
    "third": (
        *("third_data", "third_losses", "third_training", "third_networks"),
        *("third_sequences", "third_generative", "third_decisions", "third_images"),
    ),
    "fourth": (
        *("fourth_tables", "fourth_vision", "fourth_losses", "fourth_layers", "fourth_loops"),
        *("fourth_rates", "fourth_language", "fourth_generative", "fourth_decisions"),
    ),
}


def cases(*chosen: str) -> dict[str, Case]:
    """Return the cases of these sets by name, the faults of the first set first; without arguments those of the first set."""
    topics = [f"{__name__}.{topic}" for name in chosen or ("first",) for topic in SETS[name]]
    for topic in topics:
        importlib.import_module(topic)
    return {name: case for name, case in CASES.items() if case.build.__module__ in topics}
