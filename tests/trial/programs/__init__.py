"""All programs of the trial, by theme."""

from tests.trial.program import PROGRAMS
from tests.trial.programs import (
    adversarial,
    classification,
    generative,
    optimizers,
    reinforcement,
    sequences,
    structures,
    trainers,
)

__all__ = [
    "PROGRAMS",
    "adversarial",
    "classification",
    "generative",
    "optimizers",
    "reinforcement",
    "sequences",
    "structures",
    "trainers",
]
