"""A backend as a run holds it: opened at its first value, and unable to harm the training."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ikkuna.visualization.backend import Backend
from ikkuna.visualization.module_table import ModuleEntry

__all__ = ["GuardedBackend"]

log = logging.getLogger("ikkuna")

_PATIENCE = 10


class GuardedBackend:
    """Calls a backend and never raises.

    The first of a row of failures is logged with its traceback; after 10 in a row the backend is disabled.
    What it did not take is counted.

    Parameters
    ----------
    name : what to call it in the log
    backend : is opened once, before its first value
    modules : told to it then
    """

    def __init__(self, name: str, backend: Backend, modules: Sequence[ModuleEntry] = ()) -> None:
        self._name = name
        self._modules = modules
        self.backend = backend
        self.disabled = False
        self._opened_at: int | None = None  # a step
        self._failures: dict[str, int] = {}  # in a row, by verb: adding may work where committing does not
        self._step = 0  # of the last value
        self._pending = 0  # values not committed
        self._dropped = 0

    def add(self, verb: str, arguments: tuple[Any, ...], step: int, directory: Callable[[], Path]) -> None:
        """Call `verb` of the backend with a value; open it before if this is the first."""
        if self._opened_at is None:
            self._open(directory, step)
        self._step = step
        if not self.disabled and self._try(verb, *arguments):
            self._pending += 1
        else:
            self._dropped += 1

    def _open(self, directory: Callable[[], Path], step: int) -> None:
        self._opened_at = step
        try:
            if type(self.backend).open is not Backend.open:  # nothing to open: no reason to make a directory
                self.backend.open(directory())
        except Exception as error:
            self.disable(f"cannot be opened, its values are lost: {error}")
        else:
            self._try("describe", self._modules)

    def disable(self, why: str) -> None:
        """Call the backend no more, and count what it would have been given."""
        log.error("backend %s %s", self._name, why)
        self.disabled = True
        self._dropped += self._pending
        self._pending = 0

    def commit(self, step: int) -> None:
        """Commit, if the backend has been opened."""
        if self._opened_at is None or self.disabled:
            return
        if not self._try("commit", step):
            self._dropped += self._pending
        self._pending = 0

    def flush(self, timeout: float | None) -> bool:
        """Flush; no is the answer of a backend that fails or is disabled."""
        return self._opened_at is None or (not self.disabled and self._ask("flush", timeout))

    def close(self, timeout: float | None) -> bool:
        """Commit what has not been, and close, even when disabled; say whether all values were stored."""
        if self._opened_at is None:
            return self._dropped == 0
        if self._pending:
            self.commit(self._step)
        return self._ask("close", timeout) and self.dropped == 0

    @property
    def dropped(self) -> int:
        """Values lost here or in the backend."""
        return self._dropped + (self._read("dropped") or 0)

    @property
    def acked_step(self) -> int | None:
        """Last step that is safe; ``None`` if the backend stores nothing, or no longer does."""
        if self._opened_at is None or self.disabled:
            return None
        return self._read("acked_step")

    @property
    def safe_step(self) -> int | None:
        """As :attr:`acked_step`, but steps before the first value hold nothing that could be lost."""
        acked = self.acked_step
        return None if acked is None else max(acked, (self._opened_at or 0) - 1)

    def _read(self, name: str) -> int | None:
        try:
            value: int | None = getattr(self.backend, name)
        except Exception:
            return None
        return value

    def _ask(self, verb: str, timeout: float | None) -> bool:
        try:
            return bool(getattr(self.backend, verb)(timeout))
        except Exception:
            log.exception("backend %s failed in %s()", self._name, verb)
            return False

    def _try(self, verb: str, *arguments: Any) -> bool:
        try:
            getattr(self.backend, verb)(*arguments)
        except Exception:
            self._count_failure(verb)
            return False
        if self._failures:
            self._failures.pop(verb, None)
        return True

    def _count_failure(self, verb: str) -> None:
        count = self._failures[verb] = self._failures.get(verb, 0) + 1
        if count == 1:
            log.exception("backend %s failed in %s()", self._name, verb)
        if count == _PATIENCE:
            self.disable(f"failed in {verb}() {count} times in a row and is disabled")
