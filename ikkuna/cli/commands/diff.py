"""Find where two runs differ.

Find the first step, layer and kind at which two runs differ beyond the noise between them, and what changed in configuration and
environment. The exit status is 1 if they differ.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ikkuna.cli.terminal import Terminal, chosen_run

if TYPE_CHECKING:
    from ikkuna.report.difference import RunDifference

_ROWS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="a run: a directory, an event file, or a file of JSON lines")
    parser.add_argument("second", metavar="B", help="the other run")
    parser.add_argument(
        "--repeat", action="append", default=[], metavar="RUN", help="a repeat of A, which measures the noise"
    )
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative difference of rounding (default: 1e-4)")
    parser.add_argument("-o", "--output", help="write a page with both runs side by side")
    parser.add_argument(
        "--replay",
        type=int,
        metavar="STEP",
        help="run this step of A again with both programs, and name the first operation that differs",
    )
    parser.add_argument(
        "--script",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="with --replay, twice: a function of A's and of B's program that returns (model, loss, optimizer)",
    )


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.errors import ConfigError
    from ikkuna.report.difference import compare_paths, write_diff
    from ikkuna.report.page import page_target

    if not options.tolerance >= 0:
        raise ConfigError(f"--tolerance needs a number of at least 0, got {options.tolerance}")
    if options.output:
        page_target(options.output)
    one, other = (chosen_run(path, terminal, options.replay is None) for path in (options.first, options.second))
    if options.replay is not None:
        return _replay(options, terminal, Path(one), Path(other))
    repeats = [chosen_run(path, terminal) for path in options.repeat]
    terminal.progress("reading")
    found, first, second = compare_paths(one, other, repeats, options.tolerance)
    terminal.progress("")
    if options.output:
        write_diff(found, first, second, options.output, terminal.progress)
    terminal.answer(found.as_dict(), lambda: _write(found, first.name, second.name, terminal))
    if options.output and not options.json:
        terminal.write(f"wrote {options.output}")
    return int(bool(found.partings or found.config or not found.is_same_model or not found.compared))


def _replay(options: argparse.Namespace, terminal: Terminal, one: Path, other: Path) -> int:
    from ikkuna.errors import ConfigError
    from ikkuna.export.step_difference import compare_codes

    if len(options.script) != 2:
        raise ConfigError(
            f"--replay needs --script twice, for the program of A and that of B, got {len(options.script)}"
        )
    first, second = (run / "dumps" / f"step_{options.replay:06d}" for run in (one, other))
    found = compare_codes((first, second if second.is_dir() else None), tuple(options.script))
    terminal.answer(found.as_dict(), found)
    return int(not found.is_equal)


def _write(found: "RunDifference", first: str, second: str, terminal: Terminal) -> None:
    if not found.is_same_model:
        terminal.write(
            f"The runs have different models: {found.common} modules are common, {len(found.only_first)} are only in {first}, "
            f"{len(found.only_second)} only in {second}."
        )
    if found.partings:
        start = found.partings[0]
        place = f"{start.module}, " if start.module else ""
        terminal.write(terminal.styled(f"The runs differ from step {start.step} on: {place}{start.kind}", "bold"))
        terminal.write(f"{len(found.partings)} of {found.compared} compared series differ beyond the noise.")
        rows = [
            (str(p.step), p.module or "-", p.kind, f"{p.first:.6g}", f"{p.second:.6g}", f"{p.noise:.3g}")
            for p in found.partings[:_ROWS]
        ]
        terminal.write_table(("step", "module", "kind", first, second, "noise"), rows)
    elif found.compared:
        terminal.write(f"None of {found.compared} compared series differs beyond the noise.")
    else:
        terminal.write("The runs have no series with a common step.")
    for title, values in (("configuration", found.config), ("environment", found.environment)):
        if values:
            terminal.write()
            terminal.write_table((title, first, second), [(name, *pair) for name, pair in values.items()])
