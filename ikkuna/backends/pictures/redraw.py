"""Draws changed pictures in a thread, to files and in notebooks."""

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from uuid import uuid4

from ikkuna.support.failures import FailureCounter, log, raise_users_exception
from ikkuna.support.threads import Worker


class PNGPicture:
    """A drawn picture that a notebook displays.

    Parameters
    ----------
    name : str
        The picture's name.
    png : bytes
        The picture encoded as PNG; empty before it is drawn.
    """

    def __init__(self, name: str, png: bytes = b"") -> None:
        self.name = name
        self.png = png

    def _repr_png_(self) -> bytes | None:
        return self.png or None

    def __repr__(self) -> str:
        return f"<picture of {self.name}>" if self.png else f"<picture of {self.name}, not drawn yet>"


class NotebookDisplay:
    """The output of one picture in a notebook.

    The thread that runs a cell makes it, so that it belongs to that cell; any thread may update it.

    Parameters
    ----------
    picture : PNGPicture
        Displayed at once.

    Raises
    ------
    ImportError
        Outside IPython.
    """

    def __init__(self, picture: PNGPicture) -> None:
        from IPython.display import display

        self._display: Callable[..., object] = display
        self._id = uuid4().hex
        display(picture, display_id=self._id)

    def update(self, picture: PNGPicture) -> None:
        """Replace the displayed picture."""
        self._display(picture, display_id=self._id, update=True)


def in_notebook() -> bool:
    """Return whether the process is the kernel of a notebook; does not import IPython.

    Examples
    --------
    >>> in_notebook()
    False
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


_FIRST = 0.5  # seconds to the first round, so that a notebook soon shows something
_SHARE = 20  # the thread holds the interpreter's lock while it draws: at most a twentieth of the time


class Drawable(Protocol):
    """A picture that can be drawn again."""

    @property
    def name(self) -> str:
        """Its name in the log."""

    @property
    def changed(self) -> bool:
        """Whether it has to be drawn."""

    def draw(self) -> None:
        """Draw and store it."""


class RedrawThread:
    """Draws changed pictures every `interval` seconds, or less often if drawing would take more than 5 % of the time.

    The thread is a daemon.  It starts with :meth:`open`, and ends with :meth:`close` or when this object is deleted.
    The first of consecutive failures of a picture is logged; after 10 of them the picture is no longer drawn.

    Parameters
    ----------
    drawables : callable
        Returns the pictures.
    interval : float
        In seconds.

    Attributes
    ----------
    seconds : float
        CPU time of drawing so far.
    """

    def __init__(
        self,
        drawables: Callable[[], Iterable[Drawable]],
        interval: float,
    ) -> None:
        self._drawables = drawables
        self._interval = interval
        self._failures = FailureCounter()
        self._requested = self._done = 0  # rounds
        self._next_at = math.inf  # the time of the next round
        self._deadline = math.inf
        self.seconds = 0.0
        # The worker refers to this object weakly, so that it can be deleted.
        reference = weakref.ref(self, lambda _: worker.close(0.0))
        worker = self._worker = Worker(
            "ikkuna-pictures",
            lambda: None if (thread := reference()) is None else thread._job(),
            due=lambda: math.inf if (thread := reference()) is None else thread._next_at,
        )

    def _job(self) -> Callable[[], None] | None:
        is_due = self._requested > self._done or (time.monotonic() >= self._next_at and not self._worker.is_closing)
        return self.draw if is_due else None

    def open(self) -> None:
        """Start the thread; further calls do nothing."""
        if self._next_at == math.inf:
            self._next_at = time.monotonic() + _FIRST
            self._worker.wake()

    def flush(self, timeout: float | None = None) -> bool:
        """Draw all changed pictures, and return whether that was done within `timeout` seconds."""
        wanted = self._request()
        self._worker.wake()
        self._worker.wait_for(lambda: self._done >= wanted, timeout)
        return self.is_up_to_date()

    def _request(self) -> int:
        with self._worker.lock:
            if self.is_up_to_date():
                return self._requested
            self._requested += 1
            return self._requested

    def close(self, timeout: float | None = None) -> list[str]:
        """Draw all changed pictures and end; return the names of those that were not finished within `timeout` seconds.

        The thread continues with these until the process ends.
        """
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._request()
        self._worker.close(timeout)
        late = [drawable.name for drawable in self._drawables() if drawable.changed]
        return [name for name in late if not self.has_given_up(name)]

    def has_given_up(self, name: str) -> bool:
        """Return whether a picture is no longer drawn, because it failed too often."""
        return self._failures.is_exhausted(name)

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to draw some picture failed."""
        return bool(self._failures.counts)

    def is_up_to_date(self) -> bool:
        """Return whether no picture has changed since it was drawn."""
        return not any(drawable.changed for drawable in self._drawables())

    def draw(self) -> None:
        """Draw all changed pictures."""
        begin, wanted = time.monotonic(), self._requested
        try:
            for drawable in self._drawables():
                if drawable.changed and self._has_time() and not self.has_given_up(drawable.name):
                    self._draw(drawable)
        finally:
            self._done = max(self._done, wanted)
            self._next_at = time.monotonic() + max(self._interval, _SHARE * (time.monotonic() - begin))

    def _has_time(self) -> bool:
        """Return whether there is time for another picture: not at the end of the interpreter, which stops daemon threads."""
        return time.monotonic() <= self._deadline or threading.main_thread().is_alive()

    def _draw(self, drawable: Drawable) -> None:
        name, began = drawable.name, time.thread_time()
        try:
            drawable.draw()
        except Exception as error:
            raise_users_exception(error)
            count = self._failures.add(name)
            if count == 1:
                log.exception("the picture %s cannot be drawn", name)
            if self._failures.is_exhausted(name):
                log.error("the picture %s failed %d times in a row and is no longer drawn", name, count)
        else:
            self._failures.reset(name)
        finally:
            self.seconds += time.thread_time() - began
