"""Findings about mistakes in a training run: checks before the first step, and rules over metrics."""

from ikkuna.diagnosis.findings import Finding, Findings
from ikkuna.diagnosis.flight_recorder.dump import Dump, read_dump
from ikkuna.diagnosis.flight_recorder.options import RecorderOptions
from ikkuna.diagnosis.history import History, Network, TimeSeries
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.rule import GROUP, Rule, Score, get_rules

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
