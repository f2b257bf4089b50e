"""Reads event files with the native library ``events.cpp``."""

import ctypes
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ikkuna.logger import log
from ikkuna.native import build_library
from ikkuna.reading.event_columns import OTHER_FIELDS, START_FIELDS, EventColumns

__all__ = ["EventLibrary", "NativeScanner", "event_library"]

_SOURCE = Path(__file__).with_name("events.cpp")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "events_checksum": (ctypes.c_uint32, (_POINTER, _INT)),
    "events_open": (_POINTER, ()),
    "events_close": (None, (_POINTER,)),
    "events_scan": (_INT, (_POINTER, _POINTER, _INT, _INT, ctypes.c_int)),
    "events_sizes": (None, (_POINTER, _POINTER)),
    "events_copy": (None, (_POINTER,) * 10),
}
_CHECKED, _CHECKSUM = b"ikkuna reads event files", 0xE74D1761


class EventLibrary:
    """The functions of the native library.

    Parameters
    ----------
    library : CDLL
        The loaded library.

    Raises
    ------
    RuntimeError
        If it lacks a function, or if its checksum is wrong.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.functions: dict[str, Any] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise RuntimeError(f"the native library has no function {name}") from error
            function.restype, function.argtypes = result, arguments
            self.functions[name] = function
        if self.functions["events_checksum"](_CHECKED, len(_CHECKED)) != _CHECKSUM:
            raise RuntimeError("the native library computes a wrong checksum")


@cache
def event_library() -> EventLibrary | None:
    """Return the native library; ``None``, after one line in the log, if there is no compiler or it cannot be loaded."""
    try:
        return build_library(_SOURCE.read_bytes(), EventLibrary)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        log.info("event files are read by Python, which takes longer: %s", reason[0] if reason else error)
        return None


class NativeScanner:
    """Reads the records of an event file, one part of the file after another.

    Parameters
    ----------
    library : EventLibrary
        The native library.
    """

    def __init__(self, library: EventLibrary) -> None:
        self._functions = library.functions
        self._scanner = self._functions["events_open"]()
        if not self._scanner:
            raise MemoryError

    def scan(self, data: bytes, place: int, is_end: bool) -> int:
        """Read a part of the file, and return how many of its bytes are done with.

        Parameters
        ----------
        data : bytes
            The part.
        place : int
            Its position in the file.
        is_end : bool
            Whether the file ends with it.
        """
        done: int = self._functions["events_scan"](self._scanner, data, len(data), place, is_end)
        if done < 0:
            raise MemoryError
        return done

    def columns(self) -> EventColumns:
        """Return everything that has been read."""
        sizes = np.zeros(7, np.int64)
        self._functions["events_sizes"](self._scanner, sizes.ctypes.data)
        events, scalars, others, starts, tags, names_size, lost = sizes.tolist()
        steps, times = np.empty(events, np.int64), np.empty(events, np.float64)
        tag, event = np.empty(scalars, np.int32), np.empty(scalars, np.int32)
        value = np.empty(scalars, np.float32)
        other = np.empty((others, OTHER_FIELDS), np.int64)
        start = np.empty((starts, START_FIELDS), np.int64)
        ends, names = np.empty(tags, np.int64), np.empty(names_size, np.uint8)
        arrays = steps, times, tag, event, value, other, start, ends, names
        self._functions["events_copy"](self._scanner, *(array.ctypes.data for array in arrays))
        text, bounds = names.tobytes(), [0, *ends.tolist()]
        found = [text[a:b].decode(errors="replace") for a, b in itertools.pairwise(bounds)]
        return EventColumns(steps, times, found, tag, event, value, other, start, lost)

    def close(self) -> None:
        """Free the memory of the scanner."""
        scanner, self._scanner = self._scanner, None
        if scanner:
            self._functions["events_close"](scanner)
