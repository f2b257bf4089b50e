"""The package that is built has its native functions compiled, and needs no compiler where it is installed."""

import shutil

import pytest

from tests.plugins.children import ROOT, answer_of, run_python

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory in which a wheel of this checkout is installed."""
    work = tmp_path_factory.mktemp("wheel")
    for folder in ("ikkuna", "subscribers"):
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, work / "project" / folder, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "project")
    pip = ("-W", "ignore", "-m", "pip", "--quiet", "--disable-pip-version-check")
    alone = ("--no-index", "--no-deps")
    run_python(*pip, "wheel", *alone, "--no-build-isolation", "-w", "wheels", "./project", cwd=work)
    [wheel] = (work / "wheels").iterdir()
    assert wheel.name.split("-")[2:4] == ["py3", "none"]  # for any Python
    assert not wheel.name.endswith("-any.whl")  # on this kind of machine
    run_python(*pip, "install", *alone, "--target", "site", str(wheel), cwd=work)
    return work / "site"


@pytest.fixture
def site(installed, tmp_path, monkeypatch):
    """A copy of it, where neither a compiler nor a cache can be found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shutil.copytree(installed, tmp_path / "site")


CODE = """
import json
import ikkuna
from ikkuna.numerics.statistics.native import library
from ikkuna.store.event_records import event_library
print(json.dumps([ikkuna.__file__, library() is not None, event_library() is not None]))
"""


def test_native_functions_work_without_a_compiler(site, tmp_path):
    assert answer_of(CODE, site, cwd=tmp_path) == [str(site / "ikkuna" / "__init__.py"), True, True]


def test_libraries_that_are_cut_or_of_other_sources_are_not_used(site, tmp_path):
    cut, other = (site / "ikkuna" / "libraries").iterdir()
    if cut.stat().st_size < other.stat().st_size:
        cut, other = other, cut
    cut.write_bytes(cut.read_bytes()[:-1000])  # the larger one, of the statistics
    with open(site / "ikkuna" / "store" / "events.cpp", "a") as file:
        file.write("// changed\n")
    assert answer_of(CODE, site, cwd=tmp_path)[1:] == [False, False]
