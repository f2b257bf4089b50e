"""Calls what watches a training when an exception ends the process, and when a signal arrives."""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from ikkuna.errors import ConfigError
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.modules import NamedModule

_HARMLESS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINFO")  # a signal that is asked for does not end the process


def raised_in(error: BaseException, modules: Iterable[NamedModule]) -> tuple[str | None, str]:
    """Return the innermost of some modules whose method raised an exception, and the innermost line of the user's program.

    The user's program is what lies outside of torch and of this package.

    Parameters
    ----------
    error : BaseException
        With its traceback.
    modules : iterable of NamedModule
        The modules with their names.

    Returns
    -------
    module : str or None
        The name of the module.
    line : str
        The file and the line, such as ``"net.py:12"``; empty without one.

    Examples
    --------
    >>> import torch
    >>> layer, module = torch.nn.Linear(3, 2), None
    >>> try:
    ...     layer(torch.ones(4))
    ... except RuntimeError as error:
    ...     module, line = raised_in(error, [NamedModule("0", layer)])
    >>> module
    '0'
    """
    names = {id(named.module): named.name for named in modules}
    module, line, traceback = None, "", error.__traceback__
    while traceback is not None:
        frame, number = traceback.tb_frame, traceback.tb_lineno
        module = names.get(id(frame.f_locals.get("self")), module)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "ikkuna"):
            line = f"{Path(frame.f_code.co_filename).name}:{number}"
        traceback = traceback.tb_next
    return module, line


class _Listener(Protocol):
    def process_fails(self, error: BaseException) -> None:
        """Handle an exception that ends the process."""

    def signal_arrived(self, name: str, is_end: bool) -> None:
        """Handle a signal."""


class ProcessHooks:
    """The hooks of this process, which call all open listeners, and then what was installed before.

    ``sys.excepthook`` is replaced while a listener is open, and signal handlers while a listener asks for the signal.
    A hook that was installed later is left as it is.
    """

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._signals: dict[int, weakref.WeakSet[Any]] = {}
        self._former: dict[int, Any] = {}
        self._former_hook: Callable[..., Any] | None = None

    def add(self, listener: _Listener, signals: tuple[str, ...]) -> Callable[[], None]:
        """Call a listener from now on; return a function that ends this.

        Raises
        ------
        ConfigError
            If a signal cannot be handled, or outside the main thread, where Python does not allow it.
        """
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signals can be handled in the main thread only; create the exporter there, or leave signals out"
            )
        numbers = [int(signal.Signals[name]) for name in signals]
        try:
            for number in numbers:
                self._install(number)
                self._signals[number].add(listener)
        except (OSError, ValueError) as error:
            self._remove(listener, numbers)
            raise_users_exception(error)
            raise ConfigError(f"a handler of {', '.join(signals)} cannot be installed: {error}") from error
        if self._former_hook is None:
            self._former_hook, sys.excepthook = sys.excepthook, self.exception_hook
        self._listeners.add(listener)
        reference = weakref.ref(listener)
        return lambda: self._remove(reference(), numbers)

    def _remove(self, listener: Any, numbers: list[int]) -> None:
        if listener is not None:  # the garbage collector has not deleted it
            self._listeners.discard(listener)
        if not self._listeners and self._former_hook is not None and sys.excepthook == self.exception_hook:
            sys.excepthook, self._former_hook = self._former_hook, None
        for number in numbers:
            users = self._signals.get(number)
            if users is not None and listener is not None:
                users.discard(listener)
            if not users and number in self._former:
                self._restore(number)

    # -- exceptions -----------------------------------------------------------------------------------------------

    def exception_hook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Call the listeners, then the former hook."""
        if not isinstance(error, KeyboardInterrupt):
            for listener in list(self._listeners):
                listener.process_fails(error)
        (self._former_hook or sys.__excepthook__)(kind, error, traceback)

    # -- signals --------------------------------------------------------------------------------------------------

    def _install(self, number: int) -> None:
        if number not in self._former:
            self._former[number] = signal.signal(number, self.signal_handler)
            self._signals[number] = weakref.WeakSet()

    def _restore(self, number: int) -> None:
        """Install the former handler, unless that is impossible now; this one then goes on to call it."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) == self.signal_handler:
            former = self._former[number]
            signal.signal(number, signal.SIG_DFL if former is None else former)
            del self._former[number]

    def signal_handler(self, number: int, frame: FrameType | None) -> None:
        """Call the listeners, then the former handler; a signal that would have ended the process still does."""
        name = signal.Signals(number).name
        for listener in list(self._signals.get(number, ())):
            try:
                listener.signal_arrived(name, name not in _HARMLESS)
            except Exception as error:
                raise_users_exception(error)
                log.exception("a dump at %s failed", name)
        former = self._former.get(number)
        if callable(former):
            former(number, frame)
        elif former is signal.SIG_DFL and name not in _HARMLESS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_HOOKS = ProcessHooks()  # of this process, which has one of each


def hook_process(listener: _Listener, signals: tuple[str, ...]) -> Callable[[], None]:
    """Call a listener at the end of the process and at signals, see :class:`ProcessHooks`."""
    return _HOOKS.add(listener, signals)
