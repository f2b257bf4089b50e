"""The backend that writes one JSON object for each value, in double precision.

JSON cannot represent NaN and infinities.
They are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as by Protocol Buffers,
so that every line is valid JSON; ``float()`` of the string returns the value.
"""

import json
import math
from typing import Any

from ikkuna.backends.backend import FileBackend
from ikkuna.store.json_lines import LinesFormat
from ikkuna.store.names import Series
from ikkuna.store.values import LISTS, NUMBERS, Matrix


def _number(value: float) -> str:
    """Return the shortest JSON that is parsed to exactly `value`."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _numbers(values: Any) -> str:
    return f"[{', '.join(map(_number, values))}]"


class JSONLinesBackend(FileBackend):
    """Write ``values.*.jsonl``: a line for each value, with ``kind``, ``module``, ``pass``, ``step``, ``time``, ``value``.

    ``module`` is ``null`` for the whole network.
    A histogram has ``histogram`` instead of ``value``.
    A matrix has ``matrix`` instead, with ``rows``, ``columns`` and ``values``.
    A page of text has ``title``, ``text``, ``step`` and ``time``.
    A line with ``lost`` has the number of values that could not be written.
    A line with ``resumed`` begins a resumed run: values of this step and later ones in the lines before are replaced.
    After an error of the disk, the first line of a new file has ``replaces``, the name of an earlier file, and ``size``, the
    number of its bytes that remain valid; the lines after these are repeated in the new file.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lines: list[str] = []
        self._heads: dict[Series, str] = {}

    def _format(self) -> LinesFormat:
        return LinesFormat("values")

    def _head(self, series: Series) -> str:
        head = self._heads.get(series)
        if head is None:
            names = {"kind": series.kind, "module": series.name, "pass": series.pass_name}
            head = self._heads[series] = json.dumps(names)[:-1]
        return head

    def _add(self, head: str, step: int, rest: str) -> None:
        self._lines.append(f'{head}, "step": {step}, "time": {self._clock.now():.3f}, {rest}}}\n')
        self._values += 1

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a line with the value."""
        self._add(self._head(series), step, f'"value": {_number(value)}')

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a line with the histogram's fields."""
        fields = [f'"{name}": {_number(getattr(histogram, name))}' for name in NUMBERS]
        fields += [f'"{name}": {_numbers(getattr(histogram, name))}' for name in LISTS]
        self._add(self._head(series), step, f'"histogram": {{{", ".join(fields)}}}')

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Add a line with the names and values of a matrix."""
        names = f'"rows": {json.dumps(matrix.rows)}, "columns": {json.dumps(matrix.columns)}'
        values = ", ".join(map(_numbers, matrix.values))
        self._add(self._head(series), step, f'"matrix": {{{names}, "values": [{values}]}}')

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add a line with the page."""
        self._add(json.dumps({"title": title})[:-1], step, f'"text": {json.dumps(text)}')

    def resume(self, step: int) -> None:
        """Add a line by which readers drop `step` and later ones of what was written before."""
        self._lines.append(json.dumps({"resumed": step}) + "\n")

    def _take_block(self, step: int) -> bytes:
        lines, self._lines = self._lines, []
        return "".join(lines).encode()
