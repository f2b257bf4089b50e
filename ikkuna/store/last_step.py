"""Finds the last step of a stored run without reading all of it."""

import json
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

from ikkuna.store.event_records import whole_records
from ikkuna.support.failures import raise_users_exception

__all__ = ["last_step"]


_TAIL = 2**20  # bytes
_HEAD, _FOOT = 12, 4  # bytes of a record before and behind its payload


def last_step(directory: Path) -> int:
    """Return the last step with a value in the files of a run; -1 if there is none.

    Only the last mebibyte of each file is read.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.store.names import Series
    >>> from ikkuna.backends.jsonl import JSONLinesBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = JSONLinesBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("loss"), 0.5, 12)
    ...     backend.commit(12)
    ...     backend.close(), last_step(Path(directory))
    (True, 12)
    """
    events = [_last_of_events(_tail(file)) for file in sorted(directory.glob("events.out.tfevents.*"))]
    lines = [_last_of_lines(_tail(file)) for file in sorted(directory.glob("values.*.jsonl"))]
    last = [next((step for step in reversed(steps) if step >= 0), -1) for steps in (events, lines)]
    return max(last)


def _tail(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _TAIL, 0))
        return stream.read()


def _last_of_events(data: bytes) -> int:
    """Return the step of the last record with a number; images are written later than the values of their steps."""
    last = -1
    for record in whole_records(data):
        try:
            event = Event.FromString(record[_HEAD:-_FOOT])
        except Exception as error:  # protobuf's own error; the record belongs to something else
            raise_users_exception(error)
            continue
        if any(value.WhichOneof("value") == "simple_value" for value in event.summary.value):
            last = int(event.step)
    return last


def _last_of_lines(data: bytes) -> int:
    for line in reversed(data.splitlines()):
        try:
            entry = json.loads(line)
            if "kind" in entry:
                return int(entry["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise_users_exception(error)
            continue
    return -1
