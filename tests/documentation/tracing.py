"""Traces the functions of ikkuna that run while one activation goes from the hook to the event file.

``python -m tests.documentation.tracing`` prints them.
"""

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from itertools import chain, groupby, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber

FOLDERS = [Path(path or "").parent for path in (ikkuna.__file__, sys.modules[NormSubscriber.__module__].__file__)]
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
NATIVE_FILE = "ikkuna/numerics/statistics/native/hooks.cpp"
NATIVE = ("record_output", "record_gradient")
WARM_UP = 3
TIMEOUT = 10.0


class Call(NamedTuple):
    """A call of a function.

    Parameters
    ----------
    thread : str
        ``"training"`` or ``"writer"``.
    file : str
        Such as ``"ikkuna/observation/session.py"``.
    function : str
        Qualified name of the function within its file.
    depth : int
        Number of functions of ikkuna that were running in this thread.
    """

    thread: str
    file: str
    function: str
    depth: int


class Tracer:
    """Records the calls of functions of ikkuna while `active`, of a thread until it calls `os.write`.

    A comprehension is part of the function that contains it.  Of native functions those are recorded that hooks call.
    """

    def __init__(self) -> None:
        self.active = False
        self.calls: list[Call] = []
        self._files: dict[CodeType, str | None] = {}
        self._training_thread = threading.get_ident()
        self._running: dict[int, list[FrameType]] = {}
        self._done: set[int] = set()
        self._generators: set[FrameType] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Trace this thread, and every thread that starts inside the ``with`` block."""
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def only_other_threads(self) -> Iterator[None]:
        """Stop tracing this thread inside the ``with`` block."""
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(self.profile)

    def profile(self, frame: FrameType, event: str, called: Any) -> None:
        """Record a call; see `sys.setprofile`."""
        thread = threading.get_ident()
        if not self.active or thread in self._done:
            return
        running = self._running.setdefault(thread, [])
        if event == "c_call" and called is os.write:
            self._done.add(thread)
        elif event == "c_call" and called.__name__ in NATIVE:
            self.calls.append(Call("training", NATIVE_FILE, called.__name__, len(running)))
        elif event == "call" and (file := self._file(frame.f_code)) is not None:
            if frame not in self._generators:  # otherwise a generator is resumed, not called
                name = "training" if thread == self._training_thread else "writer"
                self.calls.append(Call(name, file, frame.f_code.co_qualname, len(running)))
            if frame.f_code.co_flags & CO_GENERATOR:
                self._generators.add(frame)
            running.append(frame)
        elif event == "return" and running and running[-1] is frame:
            running.pop()

    def _file(self, code: CodeType) -> str | None:
        if code not in self._files:
            is_part = code.co_name in COMPREHENSIONS
            self._files[code] = None if is_part else name_of(Path(code.co_filename))
        return self._files[code]


def name_of(path: Path) -> str | None:
    """Return the name of a file of ikkuna or of its subscribers below its package's parent; ``None`` for other files."""
    for folder in FOLDERS:
        if path.is_relative_to(folder):
            return path.relative_to(folder.parent).as_posix()
    return None


def trace() -> list[Call]:
    """Train a `Linear` with a `NormSubscriber` for its activations, and return the calls of one step.

    The first steps are not traced, because they set up what later steps use.
    The calls of the writer thread come last, because it writes a step after the step has ended.
    """
    tracer = Tracer()
    model, inputs = nn.Linear(4, 3), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder, Exporter(log_dir=folder, message_bus=MessageBus()) as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(NormSubscriber("activations"))
        with tracer.installed():
            for step in range(WARM_UP + 1):
                tracer.active = step == WARM_UP
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
                with tracer.only_other_threads():
                    wait_until_written(exporter, step)
    return sorted(tracer.calls, key=lambda call: call.thread)


def wait_until_written(exporter: Exporter, step: int) -> None:
    """Wait until the values of a step are in the file."""
    run = exporter.message_bus.run
    if run is None or not run.settle(TIMEOUT):
        raise TimeoutError(f"step {step} was not written in {TIMEOUT:g} s: {exporter.health()}")


def files(calls: list[Call]) -> list[str]:
    """Return the files in the order of their first call."""
    return list(dict.fromkeys(call.file for call in calls))


def below(calls: list[Call], start: int) -> list[Call]:
    """Return a call and all calls that it makes, directly or not."""
    caller = calls[start]
    inside = takewhile(lambda call: call.depth > caller.depth and call.thread == caller.thread, calls[start + 1 :])
    return [caller, *inside]


def way(calls: list[Call]) -> dict[str, list[Call]]:
    """Return the calls that handle the activation: in the hook, in the delivery, and in the writer thread.

    All other calls of the step find out that a step begins and ends.
    """
    hooks = [below(calls, i) for i, call in enumerate(calls) if call.depth == 0 and call.thread == "training"]
    [hook] = [hook for hook in hooks if any(call.function == "ModuleHook.__call__" for call in hook)]
    [delivery] = [below(calls, i) for i, call in enumerate(calls) if call.function == "Delivery.drain"]
    return {"hook": hook, "delivery": delivery, "writer": [call for call in calls if call.thread == "writer"]}


def tree(calls: list[Call]) -> list[str]:
    """Return a line for each call, indented below its caller; the file is named where it changes."""
    lines, last, left = [], "", min(call.depth for call in calls)
    for call, repeated in groupby(calls):
        times = f" × {n}" if (n := len(list(repeated))) > 1 else ""
        lines.append((f"{'  ' * (call.depth - left)}{call.function}{times}", "" if call.file == last else call.file))
        last = call.file
    width = max(len(text) for text, _ in lines)
    return [f"{text:{width}}  {file}".rstrip() for text, file in lines]


def report(calls: list[Call]) -> str:
    """Return the tree of calls, and the number of calls of each file."""
    parts = way(calls)
    named = {**parts, "way": list(chain(*parts.values())), "step": calls}
    lines = [
        *tree(calls),
        "",
        *(f"{name:8}  {len(files(part)):3} files  {len(part):3} calls" for name, part in named.items()),
    ]
    lines += ["", *(f"{n:3}  {file}" for file, n in Counter(call.file for call in calls).most_common())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(report(trace()))
