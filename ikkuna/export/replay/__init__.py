"""Runs the step of a dump again."""

from ikkuna.export.replay.replay import replay
from ikkuna.export.replay.result import Replay

__all__ = ["Replay", "replay"]
