"""Reads stored runs: their series as arrays, also while they are being written."""

from ikkuna.reading.read_run import read_run
from ikkuna.reading.run import Point, SeriesValues, StoredRun
from ikkuna.reading.run_files import find_runs
from ikkuna.reading.stored_value import StoredHistogram

__all__ = ["Point", "SeriesValues", "StoredHistogram", "StoredRun", "find_runs", "read_run"]
