"""The backend that stores the findings of the rules and the values that they have read."""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from ikkuna.backends.backend import FileBackend
from ikkuna.diagnosis.stored_findings import event_line, event_text
from ikkuna.diagnosis.stored_values import ReadValues, RuleValuesFormat
from ikkuna.store.json_lines import LinesFormat
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.values import ModuleEntry
from ikkuna.store.writer import FileWriter

JudgedStep = tuple[int, list[ReadValues]]
"""A step that was judged, and what the rules have read since the one before."""


class JudgementBackend(FileBackend):
    """Write ``findings.*.jsonl`` and ``rule_values.*.f64``, with the acknowledgement of all files of values.

    A page of text is an event.
    The formats are those of `ikkuna.diagnosis.stored_findings` and `ikkuna.diagnosis.stored_values`.
    """

    _events: FileWriter | None = None

    def __init__(self) -> None:
        super().__init__()
        self._values_format = RuleValuesFormat()
        self._block: list[bytes] = []
        self._lines: list[str] = []
        self._lost = 0

    def _format(self) -> RuleValuesFormat:
        return self._values_format

    def _new_writer(self, directory: Path | Callable[[], Path]) -> FileWriter:
        self._events = FileWriter(directory, LinesFormat("findings"), capacity=self._capacity)
        return super()._new_writer(directory)

    def describe(self, modules: Sequence[ModuleEntry]) -> None:
        """Add the modules."""
        self._block.append(self._values_format.modules(modules))

    def add_judged(self, steps: Iterable[JudgedStep]) -> None:
        """Add judged steps, with what the rules have read of each."""
        for step, read in steps:
            self._block.append(self._values_format.step(step, read))
            for _, values, _ in read:
                self._values += len(values)

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a step of which the rules have read this value alone."""
        self.add_judged(
            [(step, [(SeriesGroup(series.kind, (series.name,), series.pass_name), np.array([value]), step)])]
        )

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add an event, which is JSON."""
        self._lines.append(event_line(text, step, self._clock.now()))

    def resume(self, step: int) -> None:
        """Add the records by which readers drop the findings of `step` and later ones."""
        self._block.append(self._values_format.resumed(step))
        self._lines.append(event_line(event_text({"event": "resumed"}), step, self._clock.now()))

    def _take_block(self, step: int) -> bytes:
        block, self._block = self._block, []
        if (
            self._writer is not None and self._writer.dropped != self._lost
        ):  # the definitions of groups may be among them
            self._lost = self._writer.dropped
            block.insert(0, self._values_format.definitions)
        return b"".join(block)

    def commit(self, step: int) -> None:
        """Queue the values and the events for the threads."""
        super().commit(step)
        lines, self._lines = self._lines, []
        if self._events is not None:
            self._events.submit("".join(lines).encode(), step, len(lines))

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything committed to the disk, and return whether that was done within `timeout` seconds."""
        rest, stored = _events_first(None if self._events is None else self._events.flush, timeout)
        return super().flush(rest) and stored

    def close(self, timeout: float | None = 2.0) -> bool:
        """Write everything committed to the disk, release the files, and return whether nothing was lost."""
        rest, stored = _events_first(None if self._events is None else self._events.close, timeout)
        return super().close(rest) and stored

    @property
    def acked_step(self) -> int:
        """Last step whose findings and values the operating system has; -1 before."""
        return min(super().acked_step, -1 if self._events is None else self._events.acked_step)

    @property
    def is_unwritable(self) -> bool:
        """Whether the last attempt to write to one of the files failed."""
        return super().is_unwritable or (self._events is not None and self._events.is_failing)

    @property
    def dropped(self) -> int:
        """Number of values and events that did not reach the files."""
        return super().dropped + (0 if self._events is None else self._events.dropped)


def _events_first(method: Callable[[float | None], bool] | None, timeout: float | None) -> tuple[float | None, bool]:
    """Call a method of the writer of events with half of the time; return the time that is left, and its result."""
    if method is None:
        return timeout, True
    if timeout is None:
        return None, method(None)
    begin = time.monotonic()
    stored = method(timeout / 2)
    return max(timeout - (time.monotonic() - begin), 0.0), stored
