"""The draw of mutants, and the decision whether tests kill one."""

import ast
import json
import os
import subprocess
import sys

import pytest

from tests.mutation.mutants import LOGIC, draw
from tests.mutation.run import ROOT

SOURCE = """
def share(part, whole):
    if whole == 0:
        return 0.0
    return part / whole
"""
SCRIPT = """
import json, os
from dataclasses import replace
from pathlib import Path
from tests.mutation.mutants import mutants_of
from tests.mutation.run import is_killed

tree = Path(os.environ["TREE"])
source = (tree / "code_under_test.py").read_text()
found = {mutant.after: mutant for mutant in mutants_of("code_under_test.py", source)}
found["unchanged"] = replace(found["part * whole"], source=source)
print(json.dumps({after: is_killed(mutant, ["test_share.py"], tree, 60) for after, mutant in found.items()}))
"""
TEST = """
from code_under_test import share

def test_share():
    assert share(1, 4) == 0.25
"""


def test_a_draw_depends_on_the_seed_alone():
    first, second, other = (draw(ROOT, 5, seed, LOGIC[:3]) for seed in (0, 0, 1))
    assert first == second
    assert [mutant.name for mutant in first] != [mutant.name for mutant in other]


@pytest.mark.parametrize("mutant", draw(ROOT, 8, 0, LOGIC[:6]), ids=lambda mutant: f"{mutant.file}:{mutant.line}")
def test_a_mutant_is_a_valid_program_that_differs(mutant):
    original = ast.parse((ROOT / mutant.file).read_text())
    assert ast.dump(ast.parse(mutant.source)) != ast.dump(original)


def test_a_mutant_is_killed_if_a_test_of_it_fails(tmp_path):
    (tmp_path / "code_under_test.py").write_text(SOURCE)
    (tmp_path / "test_share.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TREE": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    outcomes = json.loads(done.stdout)
    assert all(outcomes[after] for after in ("part * whole", "if not whole == 0:", "whole != 0"))
    assert not outcomes["unchanged"]
    assert not outcomes["1.0"], "no test calls it with an empty whole"
    assert (tmp_path / "code_under_test.py").read_text() == SOURCE
