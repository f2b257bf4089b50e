"""Statistics of tensors: records, the tables and kernels that fill them, and histograms of float codes."""

from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna.numerics.statistics.record import EXACT_COUNTS, FIELDS, HISTOGRAMS, Record, merge, needed_fields

__all__ = ["EXACT_COUNTS", "FIELDS", "HISTOGRAMS", "Histogram", "Record", "merge", "needed_fields"]
