"""Statistics of tensors: records, the tables and kernels that fill them, and histograms of float codes."""

from ikkuna.numerics.statistics.record import FIELDS, HISTOGRAMS, Record, closure, merge

__all__ = ["FIELDS", "HISTOGRAMS", "Record", "closure", "merge"]
