"""Findings about mistakes in a training run: checks before the first step, and rules over metrics.

`Dump`, `read_dump` and `RecorderOptions` are imported from `ikkuna.flight_recorder` on first use: that package imports this one.
"""

from importlib import import_module
from typing import Any

from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.history import History, Network, TimeSeries
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.rule import GROUP, Rule, Score, get_rules
from ikkuna.store.finding import Finding

__all__ = [
    "GROUP",
    "Dump",
    "Finding",
    "Findings",
    "History",
    "Judge",
    "Network",
    "RecorderOptions",
    "Rule",
    "Score",
    "TimeSeries",
    "get_rules",
    "read_dump",
]

_OF_THE_RECORDER = {"Dump": "dump_reading", "RecorderOptions": "options", "read_dump": "dump_reading"}


def __getattr__(name: str) -> Any:
    if name in _OF_THE_RECORDER:
        return getattr(import_module(f"ikkuna.flight_recorder.{_OF_THE_RECORDER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
