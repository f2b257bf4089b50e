"""The build of the native library and its cache: other users, damaged files, and compilers that fail.

A compiler that copies a library, made once for all tests, takes the place of the real one.
"""

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from ikkuna.numerics.statistics import native, needed_fields
from ikkuna.numerics.statistics.host import measure
from ikkuna.numerics.statistics.native import hook_functions, kernels
from ikkuna.numerics.statistics.native.kernels import Library
from ikkuna.support import native as loading
from ikkuna.support.native import SOURCES, Compiler, LibraryCache, joined_source

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
STRANGER = 12_345  # the id of another user

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files"),
]
needs_root = pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root can give files away")

FOREIGN = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void run() {
    if (const char *marker = std::getenv("IKKUNA_TEST_MARKER")) std::fclose(std::fopen(marker, "w"));
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The kernels, and a foreign library that creates the file ``$IKKUNA_TEST_MARKER`` when it is loaded."""
    directory = tmp_path_factory.mktemp("libraries")
    foreign = directory / "foreign.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", foreign], input=FOREIGN.encode(), check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        (directory / "kernels.so").write_bytes(Compiler().build(joined_source(*SOURCES["kernels"]), directory))
    return directory


class World:
    """The directories that the build uses, and a compiler."""

    def __init__(self, root, libraries, monkeypatch):
        self.root, self.monkeypatch = root, monkeypatch
        self.kernels, self.foreign = (libraries / name for name in ("kernels.so", "foreign.so"))
        self.home, self.temp, self.marker = root / "home", root / "temp", root / "marker"
        for directory in (self.home, self.temp):
            directory.mkdir(mode=0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.home))
        monkeypatch.setenv("IKKUNA_TEST_MARKER", str(self.marker))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temp))
        self.compile_with(f"cp {self.kernels} $out")

    @property
    def cache(self):
        return self.home / "ikkuna"

    def compile_with(self, script):
        """Let a compiler run a shell script, in which ``$out`` is the file to make; it counts its runs."""
        self.compiler = self.root / "compiler"
        self.compiler.write_text(
            f'#!/bin/sh\necho run >> {self.root}/runs\nout=; while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
            f"{script}\n"
        )
        self.compiler.chmod(0o755)
        self.monkeypatch.setenv("CXX", str(self.compiler))

    @property
    def runs(self):
        runs = self.root / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    def library(self):
        native.library.cache_clear()
        return native.library()

    @property
    def path(self):
        """The cached library, after it was made."""
        if not self.cache.exists() or not list(self.cache.glob("*.library")):
            assert self.library() is not None
        [path] = self.cache.glob("*.library")
        return path

    def plant(self, content):
        """Overwrite the cached library."""
        self.path.write_bytes(content)

    def replace(self, make):
        """Replace the cached library by something else."""
        path = self.path
        path.unlink()
        make(path)

    def give_away(self, path):
        os.chown(path, STRANGER, STRANGER)

    def plant_foreign(self):
        """Plant the foreign library with its right checksum."""
        self.path  # noqa: B018
        name = self.path.name.removesuffix(".library")
        LibraryCache(self.cache).store(name, self.foreign.read_bytes())


@pytest.fixture
def world(tmp_path, libraries, monkeypatch):
    yield World(tmp_path, libraries, monkeypatch)
    native.library.cache_clear()


def mode_of_cache(mode):
    def attack(world):
        world.plant_foreign()
        world.cache.chmod(mode)

    return attack


def mode_of_parent(mode, owner=None):
    def attack(world):
        world.plant_foreign()
        world.home.chmod(mode)
        if owner is not None:
            os.chown(world.home, owner, owner)

    return attack


def directory_of_stranger(world):
    world.plant_foreign()
    world.give_away(world.cache)


def link_to_directory_of_stranger(world):
    world.plant_foreign()
    world.cache.rename(world.root / "theirs")
    world.give_away(world.root / "theirs")
    world.cache.symlink_to(world.root / "theirs")


def link_through_open_directory(world):
    world.plant_foreign()
    theirs = world.root / "theirs"
    theirs.mkdir()
    world.cache.rename(theirs / "ikkuna")
    theirs.chmod(0o777)
    world.cache.symlink_to(theirs / "ikkuna")


def relative_cache(world):
    world.plant_foreign()
    world.monkeypatch.chdir(world.root)
    world.monkeypatch.setenv("XDG_CACHE_HOME", "home")
    world.monkeypatch.setenv("HOME", str(world.root / "other"))


def in_place_of_the_directory(make):
    def attack(world):
        make(world.cache)

    return attack


def no_home(world):
    world.monkeypatch.delenv("XDG_CACHE_HOME")
    world.monkeypatch.setattr(Path, "home", lambda: Path("/dev/null/of/nobody"))


def foreign_of(mode=None, owner=False):
    def attack(world):
        world.plant_foreign()
        if mode is not None:
            world.path.chmod(mode)
        if owner:
            world.give_away(world.path)

    return attack


def content(change):
    def attack(world):
        world.plant(change(world, world.path.read_bytes()))

    return attack


def make_socket(path):
    listener = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        listener.bind(path.name)
    finally:
        os.chdir(here)
        listener.close()


def make_huge(path):
    path.touch(0o600)
    os.truncate(path, 1 << 40)


def of_another_name(world):
    path = world.path
    LibraryCache(world.cache).store("kernels-other", world.foreign.read_bytes())
    (world.cache / "kernels-other.library").rename(path)


def swapped_after_the_check(world):
    path, fstat = world.path, os.fstat

    def swap(descriptor):
        status = fstat(descriptor)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(status, os.stat(path)):
                shutil.copy(world.foreign, world.root / "swap")
                os.replace(world.root / "swap", path)
        return status

    world.monkeypatch.setattr(os, "fstat", swap)


def temp_of_stranger(mode, owner):
    def attack(world):
        if owner is not None:
            os.chown(world.temp, owner, owner)
        world.temp.chmod(mode)

    return attack


def temp_and_cache_are_open(world):
    world.temp.chmod(0o777)
    world.cache.mkdir()
    world.cache.chmod(0o777)


def failure_note(content):
    def attack(world):
        path = world.path
        path.unlink()
        path.with_suffix(".failure").write_bytes(content)

    return attack


def failure_note_is(make):
    def attack(world):
        path = world.path
        path.unlink()
        make(path.with_suffix(".failure"))

    return attack


def failure_note_of_stranger(world):
    failure_note(b"%d planted" % time.time())(world)
    world.give_away(next(world.cache.glob("*.failure")))


def compiler(script):
    def attack(world):
        world.compile_with(script)

    return attack


def hanging(script):
    def attack(world):
        world.compile_with(script)
        original = Compiler.__init__
        world.monkeypatch.setattr(Compiler, "__init__", lambda self: original(self, 0.3))

    return attack


def root_only(attack, result):
    return pytest.param(attack, result, marks=needs_root)


NATIVE, NUMPY = True, False
ATTACKS = {
    # directories
    "cache: others can write": (mode_of_cache(0o777), NATIVE),
    "cache: the group can write": (mode_of_cache(0o770), NATIVE),
    "cache: others can write, sticky": (mode_of_cache(0o1777), NATIVE),
    "cache: of a stranger": root_only(directory_of_stranger, NATIVE),
    "cache: a link to a stranger's": root_only(link_to_directory_of_stranger, NATIVE),
    "cache: a link into an open directory": (link_through_open_directory, NATIVE),
    "cache: a dangling link": (
        in_place_of_the_directory(lambda path: path.symlink_to("/dev/null/of/nobody")),
        NATIVE,
    ),
    "cache: a file": (in_place_of_the_directory(lambda path: path.write_text("")), NATIVE),
    "cache: a pipe": (in_place_of_the_directory(os.mkfifo), NATIVE),
    "cache: a link to itself": (in_place_of_the_directory(lambda path: path.symlink_to(path)), NATIVE),
    "cache: relative": (relative_cache, NATIVE),
    "cache: no home": (no_home, NATIVE),
    "parent: others can write": (mode_of_parent(0o777), NATIVE),
    "parent: the group can write": (mode_of_parent(0o775), NATIVE),
    "parent: of a stranger": root_only(mode_of_parent(0o755, STRANGER), NATIVE),
    "parent: sticky, of a stranger": root_only(mode_of_parent(0o1777, STRANGER), NATIVE),
    # files
    "library: others can write": (foreign_of(mode=0o666), NATIVE),
    "library: the group can write": (foreign_of(mode=0o660), NATIVE),
    "library: of a stranger": root_only(foreign_of(owner=True), NATIVE),
    "library: a link": (lambda world: world.replace(lambda path: path.symlink_to(world.foreign)), NATIVE),
    "library: a dangling link": (lambda world: world.replace(lambda path: path.symlink_to("/dev/null/none")), NATIVE),
    "library: a pipe": (lambda world: world.replace(os.mkfifo), NATIVE),
    "library: a socket": (lambda world: world.replace(make_socket), NATIVE),
    "library: a directory": (lambda world: world.replace(Path.mkdir), NATIVE),
    "library: a device": root_only(
        lambda world: world.replace(lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))), NATIVE
    ),
    "library: a terabyte of zeros": (lambda world: world.replace(make_huge), NATIVE),
    "library: empty": (content(lambda world, data: b""), NATIVE),
    "library: zeros": (content(lambda world, data: bytes(len(data))), NATIVE),
    "library: text": (content(lambda world, data: b"no library"), NATIVE),
    "library: half": (content(lambda world, data: data[: len(data) // 2]), NATIVE),
    "library: only the checksum": (content(lambda world, data: data[:32]), NATIVE),
    "library: a flipped bit": (
        content(lambda world, data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
        NATIVE,
    ),
    "library: more at the end": (content(lambda world, data: data + b"\0"), NATIVE),
    "library: without a checksum": (content(lambda world, data: world.kernels.read_bytes()), NATIVE),
    "library: another one": (content(lambda world, data: world.foreign.read_bytes()), NATIVE),
    "library: that of another name": (of_another_name, NATIVE),
    "library: swapped after the check": (swapped_after_the_check, NATIVE),
    # where the compiler works
    "temp: others can write": (temp_of_stranger(0o777, None), NATIVE),
    "temp: of a stranger": root_only(temp_of_stranger(0o755, STRANGER), NATIVE),
    "temp: sticky, of a stranger": root_only(temp_of_stranger(0o1777, STRANGER), NATIVE),
    "temp: sticky": (temp_of_stranger(0o1777, None), NATIVE),
    "temp and cache: others can write": (temp_and_cache_are_open, NUMPY),
    # notes of failures
    "note: not a number": (failure_note(b"planted"), NATIVE),
    "note: not UTF-8": (failure_note(b"\xff\xfe \xff"), NATIVE),
    "note: from the future": (failure_note(b"99999999999 planted"), NATIVE),
    "note: old": (failure_note(b"1000 planted"), NATIVE),
    "note: infinite": (failure_note(b"inf planted"), NATIVE),
    "note: huge": (failure_note(b"9" * 10_000), NATIVE),
    "note: a pipe": (failure_note_is(os.mkfifo), NATIVE),
    "note: a link": (failure_note_is(lambda path: path.symlink_to("/dev/zero")), NATIVE),
    "note: of a stranger": root_only(failure_note_of_stranger, NATIVE),
    # compilers
    "compiler: fails": (compiler("echo error; exit 1"), NUMPY),
    "compiler: fails in Latin-1": (compiler("printf 'F\\344hler \\377\\n' >&2; exit 1"), NUMPY),
    "compiler: fails silently": (compiler("exit 1"), NUMPY),
    "compiler: fails with escape codes": (compiler("printf '\\033[2J\\r\\033]0;x\\007'; exit 1"), NUMPY),
    "compiler: fails with a lot of output": (compiler("head -c 30000000 /dev/zero; exit 1"), NUMPY),
    "compiler: is killed": (compiler("kill -SEGV $$"), NUMPY),
    "compiler: makes nothing": (compiler("true"), NUMPY),
    "compiler: makes an empty file": (compiler(": > $out"), NUMPY),
    "compiler: makes text": (compiler("echo text > $out"), NUMPY),
    "compiler: makes half a library": (lambda world: world.compile_with(f"head -c 5000 {world.kernels} > $out"), NUMPY),
    "compiler: makes the header of a library": (
        lambda world: world.compile_with(f"head -c 40 {world.kernels} > $out"),
        NUMPY,
    ),
    "compiler: makes nearly a library": (lambda world: world.compile_with(f"head -c -1 {world.kernels} > $out"), NUMPY),
    "compiler: makes a pipe": (compiler("mkfifo $out"), NUMPY),
    "compiler: makes a link": (lambda world: world.compile_with(f"ln -s {world.foreign} $out"), NUMPY),
    "compiler: makes a directory": (compiler("mkdir $out"), NUMPY),
    "compiler: reads its input": (lambda world: world.compile_with(f"cat; cp {world.kernels} $out"), NATIVE),
    "compiler: leaves a process": (lambda world: world.compile_with(f"sleep 100 & cp {world.kernels} $out"), NATIVE),
    "compiler: hangs": (hanging("sleep 100"), NUMPY),
    "compiler: hangs with its children": (hanging("sleep 100 & sleep 100 & wait"), NUMPY),
    "compiler: ignores signals": (hanging("trap '' TERM INT HUP; sleep 100"), NUMPY),
    "compiler: unbalanced quotes": (lambda world: world.monkeypatch.setenv("CXX", "g++ 'x"), NUMPY),
    "compiler: does not exist": (lambda world: world.monkeypatch.setenv("CXX", "no-such-compiler"), NUMPY),
    "compiler: is a directory": (lambda world: world.monkeypatch.setenv("CXX", str(world.root)), NUMPY),
}


@pytest.mark.fault(308, 310)
@pytest.mark.parametrize(
    ("attack", "result"),
    [case if hasattr(case, "marks") else pytest.param(*case) for case in ATTACKS.values()],
    ids=list(ATTACKS),
)
def test_no_foreign_code_runs_and_nothing_is_raised(world, caplog, attack, result):
    attack(world)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ikkuna"):
        found = world.library()
    assert not world.marker.exists()
    assert (found is not None) == result
    if found is None:
        [line] = [record.getMessage() for record in caplog.records if "with numpy" in record.getMessage()]
        assert line.isprintable()
    assert measure(torch.tensor([3.0, 4.0]), needed_fields(["sumsq"])).l2_norm == 5.0


@pytest.mark.fault(308)
def test_a_foreign_library_that_is_loaded_leaves_its_mark(world):
    """The attacks would be noticed."""
    loading.load_from_memory(world.foreign.read_bytes())
    assert world.marker.exists()


LEFT = (
    "library: a directory",  # no file can replace it
    "library: swapped after the check",  # what was checked is used
)


@pytest.mark.fault(310)
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name.startswith("library:") and name not in LEFT])
@needs_root
def test_a_damaged_file_is_replaced(world, attack):
    case = ATTACKS[attack]
    attack = case.values[0] if hasattr(case, "marks") else case[0]
    attack(world)
    assert world.library() is not None
    world.monkeypatch.undo()
    world.monkeypatch.setenv("XDG_CACHE_HOME", str(world.home))
    world.monkeypatch.setenv("CXX", str(world.compiler))
    before = world.runs
    assert world.library() is not None
    assert world.runs == before
    status = world.path.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.fault(310)
def test_an_intact_library_without_the_kernels_is_compiled_again(world):
    path, runs = world.path, world.runs
    name = path.name.removesuffix(".library")
    empty = subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", world.root / "empty.so"], input=b"", check=True
    )
    assert empty.returncode == 0
    LibraryCache(world.cache).store(name, (world.root / "empty.so").read_bytes())
    assert world.library() is not None
    assert world.runs == runs + 1
    assert world.library() is not None
    assert world.runs == runs + 1


@pytest.mark.fault(310)
@pytest.mark.parametrize("script", ["exit 1", "sleep 100", "true", "echo text > $out"])
def test_a_failed_build_is_remembered_and_tried_again_later(world, monkeypatch, script):
    hanging(script)(world)
    assert world.library() is None
    runs = world.runs
    assert world.library() is None
    assert world.runs == runs
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    assert world.library() is None
    assert world.runs > runs


@pytest.mark.fault(310)
@pytest.mark.parametrize(
    "script", ["kill -9 $$", "echo No space left on device >&2; exit 1", "echo out of memory >&2; exit 1"]
)
def test_a_build_that_failed_for_a_passing_cause_is_tried_again_at_once(world, script):
    world.compile_with(script)
    assert world.library() is None
    world.compile_with(script)
    runs = world.runs
    assert world.library() is None
    assert world.runs > runs


@pytest.mark.fault(310)
def test_directories_of_builds_that_were_killed_are_removed_after_an_hour(world, monkeypatch):
    parent = world.root / "temporary"
    parent.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    old, new, other = (parent / name for name in ("ikkuna-build-old", "ikkuna-build-new", "ikkuna-other"))
    for directory in (old, new, other):
        directory.mkdir()
        (directory / "kernels.cpp").touch()
    for directory in (old, other):
        os.utime(directory, (0, 0))
    world.compile_with("exit 1")
    assert world.library() is None
    assert sorted(parent.iterdir()) == [new, other]


def test_another_compiler_is_tried_at_once(world):
    world.compile_with("exit 1")
    assert world.library() is None
    world.compile_with(f"cp {world.kernels} $out")
    assert world.library() is not None


@pytest.mark.fault(310)
@pytest.mark.parametrize("blank", ["", "of mine "])
def test_a_compiler_may_be_a_command_with_arguments(world, monkeypatch, blank):
    """As ``ccache g++``; a path with blanks is one word, if it exists."""
    wrapper = world.root / f"{blank}wrapper"
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    if blank:
        wrapper.write_text(f'#!/bin/sh\nexec {world.compiler} "$@"\n')
        monkeypatch.setenv("CXX", str(wrapper))
    else:
        monkeypatch.setenv("CXX", f"{wrapper} {world.compiler}")
    assert world.library() is not None
    assert world.runs == 1


def test_a_library_is_built_once_and_found_again(world):
    assert world.library() is not None
    assert world.library() is not None
    assert world.runs == 1
    assert stat.S_IMODE(world.cache.stat().st_mode) == 0o700
    assert list(world.temp.iterdir()) == []
    assert {path.suffix for path in world.cache.iterdir()} == {".library", ".lock"}


PROCESS = "from ikkuna.support.native import Compiler, build_library; build_library(b'int x;', str, Compiler())"


def test_one_of_many_processes_compiles(world):
    world.compile_with(f"sleep 2; cp {world.kernels} $out")
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS]) for _ in range(4)]
    for process in processes:
        assert process.wait(300) == 0
    assert world.runs == 1


def test_the_compiler_of_a_process_that_was_killed_is_waited_for(world):
    world.compile_with(f"touch {world.root}/begun; sleep 3; touch {world.root}/ended; cp {world.kernels} $out")
    killed = subprocess.Popen([sys.executable, "-c", PROCESS])
    while not (world.root / "begun").exists():
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    with LibraryCache(world.cache).locked(next(world.cache.glob("*.lock")).stem, 60):
        assert (world.root / "ended").exists()


@pytest.mark.parametrize("end", [0, 1], ids=["waits", "does not wait for ever"])
def test_a_process_that_compiles_is_waited_for(world, end):
    cache, seen = LibraryCache(world.cache), []

    def waits():
        with cache.locked("a", 0.3 if end else 60):
            seen.append(0)

    with cache.locked("a", 60):
        waiting = threading.Thread(target=waits)
        waiting.start()
        waiting.join(60 if end else 1.5)
        assert len(seen) == end
    waiting.join(60)
    assert seen == [0]


def test_a_sticky_directory_of_root_may_be_a_parent(world):
    world.home.chmod(0o1777)
    assert world.path.exists()
    assert world.library() is not None
    assert world.runs == 1


def test_the_library_is_stored_for_this_process_alone_if_the_disk_is_full(world, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ikkuna.support.native.write_private_file", full)
    assert world.library() is not None
    assert {path.suffix for path in world.cache.iterdir()} <= {".lock"}


def test_a_failed_write_leaves_no_file(world, monkeypatch):
    def broken(source, target):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", broken)
    assert world.library() is not None
    assert {path.suffix for path in world.cache.iterdir()} <= {".lock"}


@pytest.mark.parametrize("way", ["missing", "refused", "not executable"])
def test_without_files_in_memory_the_library_is_loaded_from_a_private_directory(world, monkeypatch, way):
    if way == "missing":
        monkeypatch.delattr(os, "memfd_create")
    elif way == "refused":

        def refuse(*arguments):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        load = loading.ctypes.CDLL

        def refuse_memory(name):
            if name.startswith("/proc"):
                raise OSError("failed to map segment from shared object")
            return load(name)

        monkeypatch.setattr(loading.ctypes, "CDLL", refuse_memory)
    assert world.library() is not None
    assert list(world.temp.iterdir()) == []


@pytest.mark.fault(354)
@pytest.mark.parametrize("has_memory_files", [True, False])
def test_a_temporary_directory_without_programs_stops_nothing(world, monkeypatch, caplog, has_memory_files):
    """The library is loaded from memory; where that is impossible too, numpy measures, and one line says so."""
    load = loading.ctypes.CDLL

    def refuse_files(name):
        if not (has_memory_files and name.startswith("/proc")):
            raise OSError("failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(loading.ctypes, "CDLL", refuse_files)
    with caplog.at_level(logging.WARNING):
        assert (world.library() is not None) == has_memory_files
        assert measure(torch.ones(10), needed_fields(["sumsq"])).sumsq == 10
    assert len(caplog.messages) == (not has_memory_files)


@pytest.mark.fault(353)
def test_another_torch_has_libraries_of_its_own_in_the_cache(monkeypatch):
    """The hooks use the headers and libraries of torch, and the library of one version is not loaded by another one."""
    try:
        names = {loading._name(hook_functions._compiler(), b"source")}
    except RuntimeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.add(loading._name(hook_functions._compiler(), b"source"))
    monkeypatch.setattr("sys.version", "3.99.0")
    names.add(loading._name(hook_functions._compiler(), b"source"))
    assert len(names) == 3


@pytest.mark.fault(310)
def test_a_loaded_library_survives_the_truncation_of_its_file(world):
    path = world.path
    found = world.library()
    os.truncate(path, 0)
    assert found.measure(torch.ones(10), needed_fields(["sumsq"]))[0] == 10


@needs_root
@pytest.mark.fault(308)
@pytest.mark.parametrize(
    ("owner", "mode", "is_accepted"),
    [
        (STRANGER, 0o700, True),
        (0, 0o755, False),
        (0, 0o777, False),
        (STRANGER + 1, 0o755, False),
        (STRANGER, 0o777, False),
    ],
)
def test_another_user_trusts_directories_of_its_own_alone(owner, mode, is_accepted):
    """As the user 12345, whom root trusts less than root trusts itself."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o755)
        cache = Path(root) / "ikkuna"
        cache.mkdir()
        os.chown(cache, owner, owner)
        cache.chmod(mode)
        os.seteuid(STRANGER)
        try:
            assert (LibraryCache(cache).directory is not None) == is_accepted
        finally:
            os.seteuid(0)


def test_without_a_compiler_numpy_measures_and_the_log_says_so_once(world, monkeypatch, caplog):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with caplog.at_level(logging.INFO, logger="ikkuna"):
        assert world.library() is None
        assert native.library() is None
    [line] = [record.getMessage() for record in caplog.records]
    assert "with numpy" in line
    assert "no C++ compiler was found" in line


@pytest.mark.parametrize(
    ("old", "new", "is_right"),
    [("this->s2 + dd", "this->s2 + d", False), ("", "", True), ("#include", "this is not C++ ", False)],
)
def test_the_real_compiler_builds_what_is_used_only_if_its_results_are_right(world, monkeypatch, old, new, is_right):
    monkeypatch.delenv("CXX")
    source = joined_source(*SOURCES["kernels"]).decode()
    assert old in source
    changed = source.replace(old, new) if old else source
    monkeypatch.setattr(kernels, "joined_source", lambda *files: changed.encode())
    assert (world.library() is not None) == is_right


def test_a_library_is_a_set_of_kernels(world):
    with pytest.raises(RuntimeError, match="has no function measure_float32"):
        Library(loading.load_from_memory(world.foreign.read_bytes()))
