from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.history import History
from ikkuna.diagnosis.installed import get_rules
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.network import Network
from ikkuna.diagnosis.rule import GROUP, Rule, Score
from ikkuna.diagnosis.time_series import TimeSeries
from ikkuna.flight_recorder.dump_reading import Dump, read_dump
from ikkuna.flight_recorder.options import RecorderOptions

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
