"""Run the step of a dump again.

Run the step of a dump again, and compare findings and values. The exit status is 1 if they differ, or if --find does not find all
rows, and 2 for bad input.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from ikkuna.cli.terminal import Terminal, chosen_run
from ikkuna.errors import ConfigError
from ikkuna.support.failures import error_text

if TYPE_CHECKING:
    from ikkuna.flight_recorder.dump_reading import Dump

_PARTNERS = {
    "rows": ("script",),
    "verdict": ("script",),
    "skip": ("rows", "verdict"),
    "operations": ("script",),
    "keep": ("operations",),
}
"""For each option, those of which it needs one."""
_NAMES = ("model", "loss", "optimizer", "step", "rules", "names")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="DUMP", help="the directory of a dump, or of a run with --step")
    parser.add_argument("--step", metavar="N", type=int, help="the step whose dump in the run is meant")
    parser.add_argument(
        "--script",
        metavar="MODULE:FUNCTION",
        help="a function that returns (model, loss, optimizer); MODULE may be the path of a script; "
        "without it, the content of the dump is shown",
    )
    parser.add_argument("--rows", action="store_true", help="rank the rows of the batch by their own loss and gradient")
    parser.add_argument(
        "--skip", metavar="FILE", help="with --rows: write the names of the rows that stand out, one a line"
    )
    parser.add_argument(
        "--find",
        metavar="MODULE:FUNCTION",
        help="a function that returns a data set, in which the rows of the batch are looked up",
    )
    parser.add_argument("--verdict", action="store_true", help="name the cause of a loss that jumped")
    parser.add_argument(
        "--operations", metavar="FILE", help="write the operations of the step as JSON, and compare nothing"
    )
    parser.add_argument(
        "--keep",
        metavar="N",
        type=int,
        help="with --operations: write the outputs of operation N beside FILE, as '.pt'",
    )


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    for name, partners in _PARTNERS.items():
        if name in given and given.isdisjoint(partners):
            raise ConfigError(f"--{name} needs --{' or --'.join(partners)}")
    dump = _chosen_dump(options, terminal)
    facts = {
        "dump": str(dump.path),
        "step": dump.step,
        "reasons": list(dump.reasons),
        "steps": list(map(int, dump.steps)),
    }
    if options.find is not None:
        return _find(dump, options, terminal, facts)
    if options.script is None:
        terminal.answer(facts | {"reproduced": None}, dump)
        return 0
    if options.operations is not None:
        return _record(dump, options)
    from ikkuna.export.replay import replay
    from ikkuna.export.row_ranking import rank_rows
    from ikkuna.export.verdict import Verdict, verdict

    arguments = arguments_of_script(options.script)
    arguments.pop("names", None)  # `ikkuna diff` needs them
    if options.rows or options.verdict:
        arguments.pop("rules", None)
        found = verdict(dump, **arguments) if options.verdict else rank_rows(dump, **arguments)
        if options.skip is not None:
            rows = found.rows if isinstance(found, Verdict) else found.outliers
            Path(options.skip).write_text("".join(f"{row.name}\n" for row in rows), encoding="utf-8")
        terminal.answer(facts | found.as_dict(), found)
        return 0
    result = replay(dump, **arguments)
    terminal.answer(facts | {"reproduced": result.is_reproduced}, result)
    return int(not result.is_reproduced)


def _chosen_dump(options: argparse.Namespace, terminal: Terminal) -> "Dump":
    """Return the dump in a directory, or that of a step in a run."""
    from ikkuna.flight_recorder.dump_reading import read_dump
    from ikkuna.flight_recorder.dump_writing import INDEX

    path = Path(options.path)
    if (path / INDEX).exists() or options.step is None:
        dump = read_dump(path)
        if options.step not in (None, dump.step):
            raise ConfigError(f"'{path}' is the dump of step {dump.step}, not of step {options.step}")
        return dump
    run = Path(chosen_run(options.path, terminal, needs_values=False))
    numbers = {index.parent: index.parent.name.split("_")[1] for index in sorted(run.glob(f"dumps/step_*/{INDEX}"))}
    dumps = {dump: int(number) for dump, number in numbers.items() if number.isdecimal()}
    if not (found := [dump for dump, step in dumps.items() if step == options.step]):
        there = f"; there are dumps of the steps {', '.join(map(str, sorted(set(dumps.values()))))}" if dumps else ""
        raise ConfigError(f"the run '{run}' has no dump of step {options.step}{there}")
    return read_dump(found[-1])


def _find(dump: "Dump", options: argparse.Namespace, terminal: Terminal, facts: dict[str, Any]) -> int:
    from ikkuna.export.row_ranking import find_rows

    found = find_rows(dump, _result(options.find, "--find"))
    arrays = dump.arrays("batch_rows.npz")
    count = int((arrays["steps"] == dump.step).sum())
    lines = [f"step {dump.step}: {len(found)} of {count} rows are in the data set"]
    lines += [f"  row {row}: {', '.join(map(str, found[row][:10]))}" for row in sorted(found)]
    terminal.answer(facts | {"rows": count, "found": found}, lambda: terminal.write_lines(lines))
    return int(len(found) < count)


def _record(dump: "Dump", options: argparse.Namespace) -> int:
    import torch

    from ikkuna.export.step_difference import record_operations

    path = Path(options.operations)
    found, kept = record_operations(dump, arguments_of_script(options.script), options.keep)
    if options.keep is not None:
        torch.save(kept, path.with_suffix(".pt"))
    found.write(path)
    return 0


def arguments_of_script(reference: str) -> dict[str, Any]:
    """Return the arguments of `replay` that a function of a script returns.

    Parameters
    ----------
    reference : str
        ``module:function`` or ``path/to/script.py:function``.  The function takes no argument, and returns
        the model, a tuple ``(model, loss, optimizer)``, or a dict with the names of the arguments.

    Raises
    ------
    ConfigError
        If there is no such function, or if it returns something else.
    """
    made = _result(reference, "--script")
    if isinstance(made, Mapping):
        if unknown := made.keys() - set(_NAMES):
            raise ConfigError(f"{reference} returns {sorted(map(str, unknown))[0]!r}; known are {', '.join(_NAMES)}")
        found = dict(made)
    else:
        found = dict(zip(_NAMES, made if isinstance(made, tuple) else (made,), strict=False))
    if "model" not in found:
        raise ConfigError(f"{reference} returns no model")
    return found


def _result(reference: str, option: str) -> Any:
    """Return what a function of a module or of a script returns."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{option} needs module:function or script.py:function, got {reference!r}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"there is no script '{place}'")
    try:
        function = getattr(_module(place), name, None)
        if callable(function):
            return function()
    except ModuleNotFoundError as error:
        raise ConfigError(f"the module of {reference!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        frame = extract_tb(error.__traceback__)[-1]
        raise ConfigError(f"{error_text(error)} (line {frame.lineno} of {frame.filename})") from error
    raise ConfigError(f"{place} has no function {name!r}")


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
