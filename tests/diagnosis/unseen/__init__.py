"""Training programs by an author who had not read the rules: with a fault each, or healthy.

Each fault has a label, which was committed before any program was run:

- *cause*: the cause, in the words of a user;
- *module*: the name of the module at fault, or None where there is no such module;
- *knowable*: whether one run shows the cause to an observer of model, batch, loss and optimizer;
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

    @property
    def name(self) -> str:
        return self.build.__name__


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    if case.name in CASES:
        raise ValueError(f"two cases have the name {case.name!r}")
    CASES[case.name] = case


def fault(family: str, cause: str, module: str | None = None, knowable: bool = True, report: str = ""):
    """Register a program with a fault, with its label."""

    def decorate(build: Callable[[], Program]) -> Callable[[], Program]:
        add(Case(build, family, False, cause, module, knowable, report))
        return build

    return decorate


def healthy(family: str):
    """Register a program without a fault."""

    def decorate(build: Callable[[], Program]) -> Callable[[], Program]:
        add(Case(build, family, True))
        return build

    return decorate


def cases() -> dict[str, Case]:
    """Return all cases by name, the faults first."""
    for topic in ("supervised", "sequences", "generative", "other_models", "loops", "reports", "sound", "sound_more"):
        importlib.import_module(f"{__name__}.{topic}")
    return CASES
