"""The file through which another process changes the sampling of a run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from ikkuna.logger import log

__all__ = ["CONTROL_FILE", "ControlFile", "SamplingRequest"]

CONTROL_FILE = "control.json"
_KEYS = ("paused", "every")


class SamplingRequest(NamedTuple):
    """Contents of a control file.

    Parameters
    ----------
    paused : bool, optional
        Whether nothing is sampled; ``None`` for no change.
    every : int or None
        All subscribers sample each multiple of this number; ``None`` for their own steps, -1 for no change.
    """

    paused: bool | None = None
    every: int | None = -1

    @classmethod
    def parse(cls, text: str) -> "SamplingRequest":
        """Return the request that a text in JSON contains.

        Raises
        ------
        ValueError
            If it is not an object with ``paused``, a bool, and ``every``, a positive int or null, or with one of them.

        Examples
        --------
        >>> SamplingRequest.parse('{"every": 1}')
        SamplingRequest(paused=None, every=1)
        """
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(content, dict):
            raise ValueError(f"expected an object with {' or '.join(_KEYS)}, got {type(content).__name__}")
        if unknown := [key for key in content if key not in _KEYS]:
            raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
        paused, every = content.get("paused"), content.get("every", -1)
        if "paused" in content and not isinstance(paused, bool):
            raise ValueError(f"paused must be true or false, got {paused!r}")
        is_number = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if "every" in content and every is not None and not is_number:
            raise ValueError(f"every must be an int >= 1 or null, got {every!r}")
        return cls(paused, every)


class ControlFile:
    """Reads ``control.json`` in the directory of a run when it changes; the thread of a writer calls :meth:`check`.

    Examples
    --------
    >>> import tempfile
    >>> control = ControlFile()
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "control.json").write_text('{"paused": true}')
    ...     control.check(Path(directory))
    >>> control.take(), control.take()
    (SamplingRequest(paused=True, every=-1), None)
    """

    def __init__(self) -> None:
        self._seen: Any = None
        self._request: SamplingRequest | None = None

    def check(self, directory: Path) -> None:
        """Read the file if it has changed since the last call; what it does not contain properly is logged."""
        path = directory / CONTROL_FILE
        try:
            status = path.stat()
            state = status.st_mtime_ns, status.st_size, status.st_ino
            if state == self._seen:
                return
            self._seen = state
            request = SamplingRequest.parse(path.read_text("utf-8"))
        except FileNotFoundError:
            self._seen = None
        except (OSError, ValueError) as error:
            log.warning("'%s' is ignored: %s", path, error)
        else:
            self._request = request

    def take(self) -> SamplingRequest | None:
        """Return what was read since the last call; ``None`` if the file has not changed."""
        if self._request is None:
            return None
        request, self._request = self._request, None
        return request
