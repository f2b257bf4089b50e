"""Findings about mistakes in a training run: checks before the first step, and rules over metrics."""

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.findings import Findings

__all__ = ["Finding", "Findings"]
