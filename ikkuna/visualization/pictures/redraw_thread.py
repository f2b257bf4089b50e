"""Draws what has changed, in a thread of its own, and at a pace that training does not feel."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Easel", "RedrawThread"]

log = logging.getLogger("ikkuna")

_FIRST = 0.5  # seconds to the first round: whoever sits in front of a notebook wants to see that something happens
_SHARE = 20  # a drawing thread takes the interpreter's lock from training: at most a twentieth of the time
_PATIENCE = 3


class Easel(Protocol):
    """A picture that can be drawn again."""

    @property
    def name(self) -> str:
        """What to call it in the log."""

    @property
    def changed(self) -> bool:
        """Whether it is not yet drawn as it is now."""

    def draw(self) -> None:
        """Draw and store it."""


class _Bell:
    """Wakes the thread, and tells of its rounds; the thread holds it in place of the studio, which may go."""

    def __init__(self) -> None:
        self.state = threading.Condition()  # guards the rest; a signal handler may enter its lock again
        self.asked = self.done = 0  # rounds
        self.deadline: float | None = None
        self.is_last = False

    def wait(self, pause: float) -> bool:
        """Wait until the next round is due, and say whether it is the last."""
        with self.state:
            self.state.wait_for(lambda: self.is_last or self.asked > self.done, pause)
            return self.is_last

    def end(self, deadline: float | None = None) -> None:
        """Make the next round the last, and let it begin."""
        with self.state:
            self.deadline = deadline
            self.is_last = True
            self.state.notify_all()

    def has_time(self) -> bool:
        """Whether another picture can be drawn: not when the interpreter is about to end, which does not wait for daemons."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return not late or threading.main_thread().is_alive()


class RedrawThread:
    """Redraws easels that have changed every `interval` seconds, or less often if that would take too much time.

    The thread is a daemon, begins with :meth:`open`, and ends with :meth:`close`, or when the studio is forgotten.
    A picture that fails is logged once, and given up after 3 failures in a row.

    Parameters
    ----------
    easels : returns the pictures there are
    interval : seconds
    """

    def __init__(self, easels: Callable[[], Sequence[Easel]], interval: float) -> None:
        self._easels = easels
        self._interval = interval
        self._bell = _Bell()
        self._thread: threading.Thread | None = None
        self._failures: dict[str, int] = {}  # in a row

    def open(self) -> None:
        """Begin to draw; a second call does nothing."""
        if self._thread is not None:
            return
        bell = self._bell
        reference = weakref.ref(self, lambda _: bell.end())
        thread = threading.Thread(target=_work, args=(reference, bell), name="ikkuna-pictures", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: at the end it is drawn without
            return
        self._thread = thread

    def flush(self, timeout: float | None = None) -> bool:
        """Have everything drawn, and wait for it; say whether it is."""
        bell = self._bell
        with bell.state:
            bell.asked = wanted = max(bell.asked, bell.done) + 1
            bell.state.notify_all()
            if self._thread is not None and not bell.is_last:
                bell.state.wait_for(lambda: bell.done >= wanted, timeout)
        return self.is_up_to_date()

    def close(self, timeout: float | None = None) -> bool:
        """Draw what has changed, and end; what takes longer than `timeout` seconds goes on as long as the process does.

        The log then says which pictures these are.
        """
        self._bell.end(None if timeout is None else time.monotonic() + timeout)
        if self._thread is not None:
            self._thread.join(timeout)
        else:
            self.draw()
        if late := [easel.name for easel in self._easels() if easel.changed and not self._is_given_up(easel)]:
            what = "pictures that are not drawn yet, or not with their last values: %s; they will be if this process lives on"
            log.warning(what, ", ".join(late))
        return self.is_up_to_date()

    def _is_given_up(self, easel: Easel) -> bool:
        return self._failures.get(easel.name, 0) >= _PATIENCE

    def is_up_to_date(self) -> bool:
        """Whether all is drawn as it is now."""
        return not any(easel.changed for easel in self._easels())

    def draw(self) -> float:
        """Draw what has changed, and return how long to pause after it."""
        begin, wanted = time.monotonic(), self._bell.asked
        for easel in self._easels():
            if easel.changed and self._bell.has_time() and not self._is_given_up(easel):
                self._try(easel)
        with self._bell.state:
            self._bell.done = max(self._bell.done, wanted)
            self._bell.state.notify_all()
        return max(self._interval, _SHARE * (time.monotonic() - begin))

    def _try(self, easel: Easel) -> None:
        try:
            easel.draw()
        except Exception:
            count = self._failures[easel.name] = self._failures.get(easel.name, 0) + 1
            if count == 1:
                log.exception("the picture of %s cannot be drawn", easel.name)
            if count == _PATIENCE:
                log.error("the picture of %s failed %d times in a row and is given up", easel.name, count)
        else:
            self._failures.pop(easel.name, None)


def _work(reference: "weakref.ref[RedrawThread]", bell: _Bell) -> None:
    pause, is_last = _FIRST, False
    while not is_last:
        is_last = bell.wait(pause)
        if (studio := reference()) is None:
            return
        pause = studio.draw()
        del studio
