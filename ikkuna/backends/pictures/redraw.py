"""Draws changed pictures in a thread, to files and in notebooks."""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from uuid import uuid4

from ikkuna.support.failures import FailureCounter, log, raise_users_exception, suppressed
from ikkuna.support.threads import START_SECONDS, BackgroundThread

__all__ = ["Drawable", "NotebookDisplay", "PNGPicture", "RedrawThread", "in_notebook"]


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


class _Rounds:
    """Requests rounds of drawing and waits for them.

    The thread refers to it instead of the :class:`RedrawThread`, so that the latter can be deleted.
    """

    def __init__(self) -> None:
        self.state = threading.Condition()  # guards the attributes; its lock is reentrant, for signal handlers
        self.requested = self.done = 0
        self.deadline: float | None = None
        self.is_last = False

    def wait(self, pause: float) -> bool:
        """Wait until the next round is due; return whether it is the last."""
        with self.state:
            self.state.wait_for(lambda: self.is_last or self.requested > self.done, pause)
            return self.is_last

    def end(self, deadline: float | None = None) -> None:
        """Start the last round."""
        with self.state:
            self.deadline = deadline
            self.is_last = True
            self.state.notify_all()

    def has_time(self) -> bool:
        """Return whether there is time for another picture: not at the end of the interpreter, which stops daemon threads."""
        late = self.deadline is not None and time.monotonic() > self.deadline
        return not late or threading.main_thread().is_alive()


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
    prepare : callable
        Called in the thread before the first round, such as an import that takes long.

    Attributes
    ----------
    seconds : float
        CPU time of drawing so far.
    """

    def __init__(
        self,
        drawables: Callable[[], Iterable[Drawable]],
        interval: float,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._drawables = drawables
        self._interval = interval
        self._prepare: Callable[[], object] | None = prepare
        self._rounds = _Rounds()
        self._thread: BackgroundThread | None = None
        self._failures = FailureCounter()
        self.seconds = 0.0

    def open(self) -> None:
        """Start the thread; further calls do nothing."""
        if self._thread is not None:
            return
        rounds = self._rounds
        reference = weakref.ref(self, lambda _: rounds.end())
        thread = BackgroundThread(lambda: _work(reference, rounds), "ikkuna-pictures")
        if thread.start():  # otherwise close() draws
            self._thread = thread

    def flush(self, timeout: float | None = None) -> bool:
        """Draw all changed pictures, and return whether that was done within `timeout` seconds."""
        rounds = self._rounds
        with rounds.state:
            rounds.requested = wanted = max(rounds.requested, rounds.done) + 1
            rounds.state.notify_all()
            if self._thread is not None and self._thread.has_begun(START_SECONDS) and not rounds.is_last:
                rounds.state.wait_for(lambda: rounds.done >= wanted, timeout)
        return self.is_up_to_date()

    def close(self, timeout: float | None = None) -> list[str]:
        """Draw all changed pictures and end; return the names of those that were not finished within `timeout` seconds.

        The thread continues with these until the process ends.
        """
        self._rounds.end(None if timeout is None else time.monotonic() + timeout)
        if self._thread is not None and self._thread.is_current:
            return []
        if self._thread is not None and self._thread.has_begun(START_SECONDS):
            self._thread.join(timeout)
        else:
            self.draw()
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

    def draw(self) -> float:
        """Draw all changed pictures, and return the seconds to wait before the next round."""
        prepare, self._prepare = self._prepare, None
        if prepare is not None:
            with suppressed(Exception):  # the drawings fail too, and say why
                prepare()
        begin, wanted = time.monotonic(), self._rounds.requested
        for drawable in self._drawables():
            if drawable.changed and self._rounds.has_time() and not self.has_given_up(drawable.name):
                self._draw(drawable)
        with self._rounds.state:
            self._rounds.done = max(self._rounds.done, wanted)
            self._rounds.state.notify_all()
        return max(self._interval, _SHARE * (time.monotonic() - begin))

    def _draw(self, drawable: Drawable) -> None:
        name, began = drawable.name, time.thread_time()
        try:
            drawable.draw()
        except Exception as error:
            raise_users_exception(error)
            count = self._failures.add(name)
            if count == 1:
                log.exception("the picture %s cannot be drawn", name)
            if count == self._failures.limit:
                log.error("the picture %s failed %d times in a row and is no longer drawn", name, count)
        else:
            self._failures.reset(name)
        finally:
            self.seconds += time.thread_time() - began


def _work(reference: "weakref.ref[RedrawThread]", rounds: _Rounds) -> None:
    pause, is_last = _FIRST, False
    while not is_last:
        is_last = rounds.wait(pause)
        if (thread := reference()) is None:
            return
        pause = thread.draw()
        del thread
