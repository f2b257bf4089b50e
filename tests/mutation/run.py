"""Runs the tests on mutants: ``python -m tests.mutation.run --count 300 --seed 0``.

The first run records which tests run which lines, with one run of the ordinary suite; ``--record PATH`` adds new tests.
Each mutant is then tested with tests of its lines, for 30 seconds at most: first those that run the fewest lines,
of these the fastest case of each function first.  One that fails a test is killed.
Results are kept in ``.mutation``, and a run that was interrupted goes on where it stopped.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.mutants import Mutant, draw

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".mutation"
LEFT_OUT = (".*", "build", "run", "*.egg-info", "__pycache__")


def record(paths: list[str]) -> None:
    """Run tests once, and store which of them run which lines, beside what is stored of others."""
    FOLDER.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "auto",
        "--dist",
        "loadfile",
        "-p",
        "tests.mutation.recording",
    ]
    subprocess.run([*command, *paths], cwd=ROOT, env={**os.environ, "MUTATION_FOLDER": str(FOLDER)}, check=False)
    import coverage

    data = coverage.CoverageData(basename=str(FOLDER / "coverage"))
    for path in FOLDER.glob("coverage.*"):
        part = coverage.CoverageData(basename=str(path))
        part.read()
        data.update(part)
    durations: dict[str, dict[str, float]] = {}
    for path in FOLDER.glob("durations.*.json"):
        durations |= json.loads(path.read_text())
    lines = {
        str(Path(file).relative_to(ROOT)): {
            line: [name for name in contexts if name] for line, contexts in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    (FOLDER / "recorded.json").write_text(json.dumps({"durations": durations, "lines": lines}))


class Selection:
    """Chooses the tests of a mutant.

    Parameters
    ----------
    path : Path
        The file that `record` has written.
    seconds : float
        How long the tests of a mutant take at most, by their recorded durations.
    known : set of str
        The names of all tests; those with seeds of the day have other names than when they were recorded.
    """

    def __init__(self, path: Path, seconds: float, known: set[str]) -> None:
        recorded = json.loads(path.read_text())
        self._known = known
        self._durations, self._lines, self._seconds = recorded["durations"], recorded["lines"], seconds
        contexts = (names for lines in self._lines.values() for names in lines.values())
        self._sizes = Counter[str](chain.from_iterable(contexts))  # how many lines a test runs
        self._setup: dict[str, float] = {}  # of a file's fixtures, which its first test makes
        for name, duration in self._durations.items():
            file = name.partition("::")[0]
            self._setup[file] = max(self._setup.get(file, 0.0), duration.get("setup", 0.0))

    def of(self, mutant: Mutant) -> list[str]:
        """Return tests that run the changed line, or, if it only runs at import, the function, class or file around it."""
        by_line = self._lines.get(mutant.file, {})
        names = set(by_line.get(str(mutant.line), ()))
        names = names or {name for line in mutant.lines for name in by_line.get(str(line), ())}
        names &= self._known
        chosen, total, files = [], 0.0, set[str]()
        for name in self._ranked(names):
            file = name.partition("::")[0]
            total += self._call(name) + (0.0 if file in files else self._setup.get(file, 1.0))
            if chosen and total > self._seconds:
                break
            chosen.append(name)
            files.add(file)
        return chosen

    def _ranked(self, names: Iterable[str]) -> list[str]:
        """Return the tests of few lines first; of about the same number the fastest case of each function, then the second."""
        cases: Counter[str] = Counter()
        ranked = []
        for name in sorted(names, key=lambda name: (self._cost(name), name)):
            function, size = name.partition("[")[0], self._sizes[name].bit_length()
            ranked.append((size, cases[function], self._cost(name), name))
            cases[function] += 1
        return [name for *_, name in sorted(ranked)]

    def _call(self, name: str) -> float:
        return self._durations.get(name, {}).get("call", 1.0)

    def _cost(self, name: str) -> float:
        return self._call(name) + self._setup.get(name.partition("::")[0], 1.0)


def all_tests() -> set[str]:
    """Return the names of all tests."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {line for line in listed.stdout.splitlines() if "::" in line}


def copy_tree(target: Path) -> None:
    """Copy the project without what commands write into it."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*LEFT_OUT))


def is_killed(mutant: Mutant, tests: list[str], tree: Path, seconds: float) -> bool:
    """Return whether one of the tests fails on the mutant, or takes longer than `seconds`."""
    path = tree / mutant.file
    original = path.read_bytes()
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(mutant.source, encoding="utf-8")
    child = os.fork()
    if child == 0:
        os.setsid()
        os._exit(_run_tests(tests, tree))
    try:
        end = time.monotonic() + seconds
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status) != 0
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return True
            time.sleep(0.02)
    finally:
        path.write_bytes(original)


def _run_tests(tests: list[str], tree: Path) -> int:
    """Run tests of the copy in this process, which is a fork that has imported torch."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{tree}:{tree / 'subscribers'}"}
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "subscribers")]
        for name in [name for name in sys.modules if name.split(".")[0] in ("ikkuna", "ikkuna_subscribers", "tests")]:
            del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")  # what processes that tests start would import
        import pytest

        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
    except BaseException:  # of whatever kind: the mutant broke the run
        return 1


def main() -> None:
    """Run the mutants that have no result yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="how long the tests of a mutant run at most; more on a busy machine"
    )
    parser.add_argument("--record", nargs="*", metavar="PATH", help="record which lines these tests run, or all tests")
    parser.add_argument("--again", action="store_true", help="test the survivors of an earlier run again")
    options = parser.parse_args()
    if options.record is not None or not (FOLDER / "recorded.json").is_file():
        record(options.record or [])
    import pytest  # noqa: F401  # imported once for all forks
    import torch  # noqa: F401

    selection = Selection(FOLDER / "recorded.json", 15, all_tests())
    path = FOLDER / f"results.{options.seed}.json"
    results: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    tree, checked = FOLDER / "tree", set[str]()
    copy_tree(tree)
    mutants = draw(ROOT, options.count, options.seed)
    for i, mutant in enumerate(mutants):
        name = mutant.name
        if name in EQUIVALENT:
            results[name] = "equivalent"
        elif name not in results or (options.again and results[name] != "killed"):
            tests = selection.of(mutant)
            if mutant.file not in checked and tests:
                checked.add(mutant.file)
                if is_killed(replace(mutant, source=(ROOT / mutant.file).read_text()), tests, tree, options.seconds):
                    raise SystemExit(f"the tests of {mutant.file} fail without a change")
            killed = bool(tests) and is_killed(mutant, tests, tree, options.seconds)
            results[name] = "killed" if killed else "survived" if tests else "no test"
            path.write_text(json.dumps(results, indent=0))
            print(
                f"{i + 1}/{len(mutants)} {results[name]} ({len(tests)} tests) line {mutant.line} of {name}", flush=True
            )
    _print_table(mutants, results)


def _print_table(mutants: list[Mutant], results: dict[str, str]) -> None:
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        counts.setdefault(mutant.file, Counter())[results[mutant.name]] += 1
    for file, counter in sorted(counts.items()):
        print(f"{file}: {dict(counter)}")
    total = sum(counts.values(), Counter())
    counted = total.total() - total["equivalent"]
    print(
        f"{total['killed']} of {counted} killed ({100 * total['killed'] / counted:.1f} %), {total['equivalent']} equivalent"
    )


if __name__ == "__main__":
    main()
