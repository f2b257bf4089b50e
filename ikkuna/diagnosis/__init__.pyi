from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.history import History, Network, TimeSeries
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.rule import GROUP, Rule, Score, get_rules
from ikkuna.flight_recorder.dump_reading import Dump, read_dump
from ikkuna.flight_recorder.options import RecorderOptions
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
