"""A backend of a run, which is opened at its first value and never raises."""

import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ikkuna.backends.backend import Backend, last_defined
from ikkuna.store.names import SeriesGroup
from ikkuna.store.run_directory import ConfigValue
from ikkuna.store.values import ModuleEntry
from ikkuna.support.failures import FailureCounter, error_text, log, raise_users_exception

T = TypeVar("T")


class Sender(Protocol):
    """A sender of values, such as a registered subscriber; it equals only itself."""

    @property
    def label(self) -> str:
        """Its name in the log, such as ``NormSubscriber(weights)``."""


AddedValues = tuple[str, tuple[Any, ...], Sender | None]
"""The name of a method of a backend that adds values, such as ``add_group``, its arguments, and the sender of the values."""


class GuardedBackend:
    """Calls the methods of a backend and catches their exceptions.

    The first of consecutive failures is logged with its traceback.
    Failures of adding are counted for each sender: after 10 of them the backend gets no such values of this sender any more.
    After 10 failures of another method, or without a sender, the backend is disabled.
    Values that the backend did not accept are counted.

    Parameters
    ----------
    name : str
        The backend's name in the log.
    backend : Backend
        Opened once, before its first value.
    modules : sequence of ModuleEntry
        Passed to the backend's ``describe()``.
    config : mapping, optional
        The hyper-parameters, passed to the backend's ``add_config()`` if there are any.
    resumed_at : int, optional
        The step at which the run continues, passed to the backend's ``resume()``.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        modules: Sequence[ModuleEntry] = (),
        config: Mapping[str, ConfigValue] | None = None,
        resumed_at: int | None = None,
    ) -> None:
        self._name = name
        self._modules = modules
        self._config = config
        self._resumed_at = resumed_at
        self.backend = backend
        self._takes = last_defined(type(backend), "add_groups", "add_group", "add_scalar")
        self.disabled = False
        self._opened_at: int | None = None  # a step
        self._failures = FailureCounter()  # by method and sender, because one may work where another does not
        self._step = 0  # the last one among the pending values
        self._rewound: tuple[int, int] | None = None  # the acknowledged step then, and the last one that counts since
        self._pending = 0  # values not committed
        self._dropped = 0
        self._committed: int | None = None

    def add_all(self, added: Sequence[AddedValues], step: int, directory: Callable[[], Path]) -> None:
        """Call methods of the backend that add values of one step; open the backend first if these are its first values.

        The groups of values are added all at once, or one by one, or their values are, as the backend takes them.
        """
        if self._opened_at is None:
            self._open(directory, step)
        if not self._pending:
            self._step = step
        elif step > self._step:  # an exception has kept the step before from being committed
            self.commit(self._step)
            self._step = step
        groups: list[SeriesGroup] = []
        arrays: list[Any] = []
        count = 0
        for method, arguments, sender in added:
            if method != "add_group":
                self._add(method, arguments, 1, sender)
                continue
            group, values, at = arguments
            if self._takes == "add_groups":
                groups.append(group)
                arrays.append(values)
                count += len(values)
            elif self._takes == "add_group":
                self._add(method, arguments, len(values), sender)
            else:
                for series, value in zip(group.series, values.tolist(), strict=True):
                    self._add("add_scalar", (series, value, at), 1, sender)
        if groups:
            self._add("add_groups", (groups, arrays, step), count)

    def _add(self, method: str, arguments: tuple[Any, ...], count: int, sender: Sender | None = None) -> None:
        is_refused = self.disabled or (self._failures.counts and self._failures.is_exhausted((method, sender)))
        if not is_refused and self._call(method, *arguments, sender=sender):
            self._pending += count
        else:
            self._dropped += count

    def _open(self, directory: Callable[[], Path], step: int) -> None:
        try:
            if self.stores:  # otherwise there is no need to create the directory
                self.backend.open_later(directory)
        except BaseException as error:
            raise_users_exception(error)
            self.disable(f"cannot be opened, its values are lost: {error_text(error)}")
        else:
            self._call("describe", self._modules)
            if self._resumed_at is not None:
                self._call("resume", self._resumed_at)
            if self._config:
                self._call("add_config", self._config, step)
        self._opened_at = step

    @property
    def stores(self) -> bool:
        """Whether the backend has something to open, and so needs a directory."""
        return type(self.backend).open is not Backend.open

    @property
    def is_opened(self) -> bool:
        """Whether the first value has arrived."""
        return self._opened_at is not None

    def disable(self, why: str) -> None:
        """Stop calling the backend, and count every further value as lost."""
        log.error("backend %s %s", self._name, why)
        self.disabled = True
        self._dropped += self._pending
        self._pending = 0

    def commit(self, step: int) -> None:
        """Commit the step if the backend has got values since the last commit."""
        if not self._pending or self.disabled:
            return
        if not self._call("commit", step):
            self._dropped += self._pending
        self._pending = 0
        self._committed = step

    def flush(self, timeout: float | None) -> bool:
        """Flush the backend; return ``False`` if it fails or is disabled."""
        return self._opened_at is None or (not self.disabled and self._succeeds("flush", timeout))

    def draw(self, timeout: float | None) -> bool:
        """Commit pending values, and have the backend draw its pictures; return whether they have the last values."""
        if self._opened_at is None or self.disabled:
            return True
        if self._pending:
            self.commit(self._step)
        return self._succeeds("draw", timeout)

    @property
    def drawing_seconds(self) -> float:
        """The backend's ``drawing_seconds``; 0 if it cannot be read."""
        return self._read("drawing_seconds", float) or 0.0

    def close(self, timeout: float | None) -> bool:
        """Commit pending values and close the backend, even a disabled one; return whether all values were stored."""
        if self._opened_at is None:
            return self._dropped == 0
        if self._pending:
            self.commit(self._step)
        return self._succeeds("close", timeout) and self.dropped == 0

    @property
    def dropped(self) -> int:
        """Number of values lost here or in the backend."""
        return self._dropped + max(self._read("dropped", operator.index) or 0, 0)

    @property
    def acked_step(self) -> int | None:
        """The backend's ``acked_step``; ``None`` if it stores nothing or is disabled."""
        if self._opened_at is None or self.disabled:
            return None
        acked = self._read("acked_step", operator.index)
        if self._rewound is not None and acked is not None:
            before, last = self._rewound
            if acked == before:  # nothing was written since
                return min(acked, last)
            self._rewound = None
        return acked

    @property
    def has_all(self) -> bool:
        """Whether the operating system has all values that were committed since the last :meth:`rewind`, and there are some."""
        acked = self.acked_step
        return self._committed is not None and acked is not None and acked >= self._committed

    @property
    def is_behind(self) -> bool:
        """Whether the operating system lacks values that were committed, and the backend can store them now."""
        if self._committed is None or self.is_unwritable:
            return False
        acked = self.acked_step
        return acked is not None and acked < self._committed

    def rewind(self, step: int) -> None:
        """Prepare for values of steps from `step` on, which is earlier than steps that were flushed."""
        if self._opened_at is not None and (acked := self._read("acked_step", operator.index)) is not None:
            self._opened_at = min(self._opened_at, step)
            self._rewound = acked, step - 1
            self._committed = None
        if self._opened_at is not None and not self.disabled:
            self._call("resume", step)

    @property
    def safe_step(self) -> int | None:
        """As :attr:`acked_step`, but at least the step before the first value, since earlier steps have nothing to lose.

        It is before the steps of the values that are not committed.
        """
        acked, opened_at = self.acked_step, self._opened_at or 0
        if acked is None:
            return None
        return max(min(acked, self._step - 1) if self._pending else acked, opened_at - 1)

    def _read(self, name: str, as_type: Callable[[Any], T]) -> T | None:
        """Return an attribute of the backend; ``None`` if it is of another type or cannot be read."""
        try:
            value = getattr(self.backend, name)
            return None if value is None else as_type(value)
        except BaseException as error:
            raise_users_exception(error)
            return None

    def _succeeds(self, method: str, timeout: float | None) -> bool:
        try:
            return bool(getattr(self.backend, method)(timeout))
        except BaseException as error:
            raise_users_exception(error)
            log.exception("backend %s failed in %s()", self._name, method)
            return False

    @property
    def is_unwritable(self) -> bool:
        """Whether the backend is disabled, or has failed to store its last values."""
        is_failing = self.disabled or ("commit", None) in self._failures.counts
        return is_failing or bool(self._read("is_unwritable", bool))

    def _call(self, method: str, *arguments: Any, sender: Sender | None = None) -> bool:
        try:
            getattr(self.backend, method)(*arguments)
        except BaseException as error:
            raise_users_exception(error)
            self._count_failure(method, sender)
            return False
        if self._failures.counts:
            self._failures.reset((method, sender))
        return True

    def _count_failure(self, method: str, sender: Sender | None) -> None:
        key = method, sender
        count = self._failures.add(key)
        source = "" if sender is None else f" with a value of {sender.label}"
        if count == 1:
            log.exception("backend %s failed in %s()%s", self._name, method, source)
        if not self._failures.is_exhausted(key):
            return
        if sender is None:
            self.disable(f"failed in {method}() {count} times in a row and is disabled")
        else:
            what = "backend %s failed in %s() %d times in a row%s, and gets no more of them"
            log.error(what, self._name, method, count, source.replace("a value", "values"))
