"""Write what a bug report needs, and make a test measurement.

Write versions, compiler, devices and plugins, and make a test measurement. The exit status is 1 if something fails.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from ikkuna.cli.terminal import Terminal


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.store.run_directory import environment

    rows = [(name, "", value) for name, value in environment().items()]
    checks: dict[str, Callable[[], str]] = {
        "C++ compiler": _compiler,
        "statistics kernels": _kernels,
        "event file reader": _reader,
        "devices": _devices,
        "plugins": _plugins,
        "test measurement": _measurement,
    }
    failed = False
    for name, check in checks.items():
        terminal.progress(name)
        try:
            rows.append((name, "ok", check()))
        except Exception as error:  # every failure is a line of the report
            rows.append((name, "FAILED", f"{type(error).__name__}: {error}".partition("\n")[0]))
            failed = True
    terminal.progress("")
    facts = {name: {"state": state, "text": text} for name, state, text in rows}
    terminal.answer(facts, lambda: terminal.write_table(("item", "state", "text"), rows))
    return int(failed)


def _compiler() -> str:
    from ikkuna.support.native import Compiler

    return str(Compiler())


def _kernels() -> str:
    from ikkuna.numerics.statistics.native import library

    return "native" if library() is not None else "numpy: there is no working compiler; statistics cost more"


def _reader() -> str:
    from ikkuna.store.event_records import event_library

    return "native" if event_library() is not None else "Python: there is no working compiler; reading takes longer"


def _devices() -> str:
    import torch

    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return ", ".join(["cpu", *names])


def _plugins() -> str:
    from ikkuna.cli.commands.list import TYPES, plugin_state
    from ikkuna.errors import PluginError
    from ikkuna.support.plugins import plugins

    states = [plugin_state(topic, name) for topic, plugin_type in TYPES.items() for name in plugins(plugin_type.group)]
    if broken := [state for state in states if state != "works"]:
        raise PluginError("; ".join(broken))
    return f"{len(states)} plugins can be imported"


def _measurement() -> str:
    """Train a small model for a few steps, and read back what was written."""
    from ikkuna.cli.commands.demo import train_sample
    from ikkuna.store import find_runs, read_run

    with tempfile.TemporaryDirectory() as directory:
        train_sample(Path(directory), steps=12, rules=None, every=1)
        (found,) = find_runs(Path(directory))
        run = read_run(found)
        if run.lost or run.last_step != 11:
            raise RuntimeError(f"wrote 12 steps, read {run.last_step + 1} with {run.lost} damaged bytes")
        return f"{run.count} values of {len(run.kinds())} kinds were written and read"
