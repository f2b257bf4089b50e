"""Reports about runs: pages of HTML that need no other file and no network."""

from ikkuna.report.page import write_report

__all__ = ["write_report"]
