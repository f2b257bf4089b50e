import errno
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ikkuna.errors import LogDirError
from ikkuna.store.append_file import AppendFile, ReplaceableFile, make_directories, process_name, reason, unique_stem


@pytest.mark.fault(72, 78)
def test_two_files_of_one_second_have_two_names(tmp_path):
    files = [AppendFile(tmp_path, "x.{}".format) for _ in range(3)]
    for number, file in enumerate(files):
        file.append(b"%d" % number)
        file.close()
    assert [file.path.read_bytes() for file in files] == [b"0", b"1", b"2"]


def test_the_file_is_for_all_to_read_and_closed_on_exec(tmp_path):
    old = os.umask(0o022)
    try:
        file = AppendFile(tmp_path, "x.{}".format)
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o644
    assert not os.get_inheritable(file._descriptor)
    file.close()


def test_a_symbolic_link_is_not_followed(tmp_path, monkeypatch):
    target = tmp_path / "target"
    stems = iter("ab")
    monkeypatch.setattr("ikkuna.store.append_file.unique_stem", lambda second, counter: next(stems))
    (tmp_path / "a").symlink_to(target)
    file = AppendFile(tmp_path, str)
    file.close()
    assert file.path.name == "b"
    assert not target.exists()


@pytest.mark.fault(82)
def test_a_later_file_follows_the_earlier_ones_whatever_the_clock_says(tmp_path, monkeypatch):
    """Readers sort files by their names, so a run that is continued after the clock was set back must not come first."""
    names = []
    for seconds in (2_000_000_000, 1_999_990_000, 1_999_990_000, 1_000, 2_000_000_007, 2_000_000_000):
        monkeypatch.setattr("time.time", lambda seconds=seconds: seconds)
        file = AppendFile(tmp_path, "values.{}.jsonl".format)
        file.close()
        names.append(file.path.name)
    assert names == sorted(names)
    assert len(set(names)) == 6


@pytest.mark.fault(68)
@pytest.mark.parametrize("short", range(6))
def test_a_short_write_leaves_no_trace(tmp_path, monkeypatch, short):
    """`short` bytes of the second block reach the disk, and are removed again."""
    file = AppendFile(tmp_path, str)
    file.append(b"first")
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:short]))
        with pytest.raises(OSError, match="were written"):
            file.append(b"second")
    assert file.path.read_bytes() == b"first"
    file.append(b"third")
    file.close()
    assert file.path.read_bytes() == b"firstthird"


def test_a_torn_block_is_cut_off_before_anything_follows_it(tmp_path, monkeypatch):
    """The error occurs in the middle of a block, and again while the block is removed."""
    file = AppendFile(tmp_path, str)
    file.append(b"first")
    write = os.write

    def torn(descriptor, data):
        write(descriptor, data[:3])
        raise OSError(errno.EIO, "Input/output error")

    def broken(descriptor, size):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", torn)
        patched.setattr(os, "ftruncate", broken)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                file.append(b"second")
    file.append(b"third")
    file.close()
    assert file.path.read_bytes() == b"firstthird"


@pytest.mark.fault(322)
def test_a_torn_block_in_a_file_that_others_have_truncated_leaves_no_zeros(tmp_path, monkeypatch):
    file = AppendFile(tmp_path, str)
    file.append(b"first")
    write = os.write

    def torn(descriptor, data):
        write(descriptor, data[:3])
        raise OSError(errno.EIO, "Input/output error")

    os.truncate(file.path, 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", torn)
        with pytest.raises(OSError, match="Input/output"):
            file.append(b"second")
    file.append(b"third")
    file.close()
    assert b"\0" not in file.path.read_bytes()
    assert file.path.read_bytes().endswith(b"third")


@pytest.mark.fault(321)
@pytest.mark.parametrize("reuse", [True, False])
def test_a_descriptor_that_other_code_has_closed_is_opened_again(tmp_path, reuse):
    file = AppendFile(tmp_path / "log", str)
    file.append(b"first")
    number = file._descriptor
    os.close(number)
    if reuse:
        user = os.open(tmp_path / "user", os.O_RDWR | os.O_CREAT)
        assert user == number
        os.write(user, b"data of the user")
    assert not file.deleted()
    file.append(b"second")
    file.sync()
    assert file.path.read_bytes() == b"firstsecond"
    if reuse:
        os.close(file._descriptor)
        file._descriptor = number
        file.close()
        assert os.fstat(user).st_size == len(b"data of the user")
        os.close(user)
    else:
        file.close()


@pytest.mark.fault(321)
def test_a_closed_descriptor_of_a_deleted_file_is_that_of_a_deleted_file(tmp_path):
    file = AppendFile(tmp_path, str)
    os.close(file._descriptor)
    file.path.rename(tmp_path / "away")
    file.path.write_bytes(b"another")
    assert file.deleted()
    file.path.unlink()
    assert file.deleted()
    file.close()


def test_a_file_that_follows_another_one_is_read_after_it_and_appears_when_it_is_whole(tmp_path, monkeypatch):
    name = "x.tfevents.{}".format
    first = AppendFile(tmp_path, name)
    monkeypatch.setattr("time.time", lambda: 0.0)  # the clock was set back
    last = first
    for _ in range(12):
        following = AppendFile(tmp_path, name, following=last)
        assert "tfevents" not in following.path.name
        following.append(b"block")
        following.publish()
        assert following.path.name > last.path.name
        last.close()
        last = following
    last.close()
    assert len(list(tmp_path.iterdir())) == 13


def test_a_file_in_the_way_of_the_directory_is_named(tmp_path):
    (tmp_path / "log").write_text("")
    with pytest.raises(LogDirError, match=r"cannot write to log directory '.*log': it exists and is not a directory"):
        AppendFile(tmp_path / "log", str)


@pytest.mark.fault(67)
def test_a_directory_below_a_file_is_refused_with_the_reason(tmp_path):
    (tmp_path / "log").write_text("")
    with pytest.raises(LogDirError, match="Not a directory"):
        AppendFile(tmp_path / "log" / "run", str)


@pytest.mark.fault(67)
def test_a_name_that_is_too_long_is_refused_with_the_reason(tmp_path):
    with pytest.raises(LogDirError, match="File name too long"):
        AppendFile(tmp_path / ("x" * 300), str)


@pytest.mark.fault(67)
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_rights_is_refused_with_the_reason(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(LogDirError, match="Permission denied"):
        AppendFile(tmp_path / "run", str)


@pytest.mark.parametrize("following", [None, (49, 3), (50, 3), (51, 3)])
@pytest.mark.parametrize(
    ("clock", "present", "stem"),
    [
        (0.9, [], (0, 0)),
        (50.9, [], (50, 0)),
        (50.0, ["x.0000000049.{own}.000"], (50, 0)),
        (50.0, ["x.0000000050.{own}.000", "x.0000000050.{own}.001"], (50, 2)),
        (50.0, ["x.0000000060.{own}.000"], (60, 1)),
        (50.0, ["x.0000000049.other.1.000"], (50, 0)),
        (50.0, ["x.0000000050.other.1.000"], (51, 0)),
        (50.0, ["x.0000000060.other.1.000", "x.0000000061.{own}.000"], (61, 1)),
        (
            50.0,
            ["y.0000000060.other.1.000", "x.000000060.other.1.000", "x.00000000060.o.1.000", "x.a000000060.o"],
            (50, 0),
        ),
    ],
)
def test_the_name_of_a_file_is_the_first_one_after_all_others(tmp_path, monkeypatch, clock, present, stem, following):
    monkeypatch.setattr("time.time", lambda: clock)
    for name in present:
        (tmp_path / name.format(own=process_name())).touch()
    before = following and SimpleNamespace(_second=following[0], _counter=following[1])
    if following is not None and following[0] >= int(clock):
        second = max(stem[0], following[0])
        stem = second, max(following[1] + 1, stem[1] if stem[0] == second else 0)
    file = AppendFile(tmp_path, "x.{}".format, following=before)
    file.append(b"block")
    if following is not None:
        assert file.path.name == f".unfinished.{unique_stem(*stem)}"
        file.publish()
    file.close()
    assert (file.path, file.path.read_bytes()) == (tmp_path / f"x.{unique_stem(*stem)}", b"block")


def test_a_hidden_file_passes_over_names_that_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 50.0)
    first = AppendFile(tmp_path, "x.{}".format)
    (tmp_path / f"x.{unique_stem(50, 1)}").touch()
    (tmp_path / f".unfinished.{unique_stem(50, 2)}").touch()
    file = AppendFile(tmp_path, "x.{}".format, following=first)
    assert file.path.name == f".unfinished.{unique_stem(50, 3)}"
    for each in (file, first):
        each.close()


@pytest.mark.parametrize("depth", range(4))
def test_a_directory_is_created_with_its_parents_and_may_exist(tmp_path, depth):
    directory = tmp_path.joinpath(*"abc"[:depth])
    for _ in range(2):
        make_directories(directory)
        assert directory.is_dir()
    (directory / "file").touch()
    with pytest.raises(FileExistsError):
        make_directories(directory / "file")


class Calls:
    """Records the names of the files that are synchronised, and how often one is truncated."""

    def __init__(self, monkeypatch):
        self.synced, self.cut = [], 0
        fsync, ftruncate = os.fsync, os.ftruncate

        def sync(descriptor):
            self.synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            fsync(descriptor)

        def truncate(descriptor, size):
            self.cut += 1
            ftruncate(descriptor, size)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "ftruncate", truncate)

    def since(self):
        """Return what was synchronised since the last call."""
        found, self.synced = self.synced, []
        return found


def test_names_and_contents_are_synchronised_in_this_order(tmp_path, monkeypatch):
    """A directory after each new name in it, and a file before it gets its name."""
    calls, directory = Calls(monkeypatch), tmp_path / "run"
    file = ReplaceableFile(directory, Format())
    assert calls.since() == ["run"]
    file.append(b"a")
    assert calls.since() == []
    file.sync()
    assert calls.since() == [file.path.name]
    file.replace_end([b"a"], 0, "has failed")
    assert calls.since() == ["run", f".unfinished.{file.path.name[2:]}", "run"]
    file.close()


def test_only_what_was_torn_is_truncated_and_only_once(tmp_path, monkeypatch):
    calls, write = Calls(monkeypatch), os.write
    file = AppendFile(tmp_path, str)
    for _ in range(2):
        file.append(b"whole")
    assert calls.cut == 0
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        with pytest.raises(OSError, match="only 3 of 6 bytes were written"):
            file.append(b"second")
    for _ in range(2):
        file.append(b"third")
    file.close()
    assert calls.cut == 1
    assert file.path.read_bytes() == b"wholewholethirdthird"


def test_a_torn_block_that_could_not_be_removed_is_removed_at_the_end(tmp_path, monkeypatch):
    file, write = AppendFile(tmp_path, str), os.write
    file.append(b"first")

    def broken(descriptor, size):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        patched.setattr(os, "ftruncate", broken)
        with pytest.raises(OSError, match="Input/output"):
            file.append(b"second")
    assert file.path.read_bytes() == b"firstsec"
    file.close()
    assert file.path.read_bytes() == b"first"


@pytest.mark.fault(321)
@pytest.mark.parametrize(
    ("use", "content"),
    [
        (lambda file: file.append(b"c"), b"abc"),
        (lambda file: file.sync(), b"ab"),
        (lambda file: file.retract(), b"a"),
        (lambda file: file.deleted(), b"ab"),
    ],
)
def test_each_use_of_a_descriptor_that_other_code_has_closed_opens_the_file_again(tmp_path, use, content):
    file = AppendFile(tmp_path / "log", str)
    file.append(b"ab")
    file.finish(1)
    os.close(file._descriptor)
    use(file)
    assert file.path.read_bytes() == content
    assert file.path.samefile(f"/proc/self/fd/{file._descriptor}")
    file.close()


def open_descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_every_end_of_a_file_closes_its_descriptor(tmp_path, monkeypatch):
    before = open_descriptors()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = ReplaceableFile(tmp_path / "run", Format())
    for number in range(3):
        file.append(b"a")
        file.replace_end([b"a"], 0, "has failed")
        assert len(open_descriptors() - before) == 1, number
    file.move_to_temporary_directory()
    assert len(open_descriptors() - before) == 1
    file.close()
    assert open_descriptors() == before
    other = AppendFile(tmp_path / "run", str)
    os.close(other._descriptor)
    other.path.rename(tmp_path / "away")
    other.path.write_bytes(b"another")
    assert other.deleted()
    assert open_descriptors() == before
    other = AppendFile(tmp_path / "run", str)
    other.delete()
    assert open_descriptors() == before


def test_a_file_that_was_not_created_goes_on_in_a_temporary_directory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = ReplaceableFile(lambda: tmp_path / "missing", Format())
    assert file.move_to_temporary_directory()
    assert (file.append(b"a"), file.path.read_bytes()) == (True, b"Ha")
    assert [each.name for each in tmp_path.iterdir()] == [file.path.parent.name]
    assert file.path.parent.name.startswith("ikkuna-run-")
    assert f"'x.*' is abandoned; continuing in '{file.path}'" in caplog.text
    file.close()


@pytest.mark.parametrize("other", ["{later}.host.1.000", "{now}.zzz.99999999.000", "{earlier}.host.1.000"])
def test_a_file_is_read_after_those_of_other_processes(tmp_path, other):
    """A run is resumed within the same second, or by a machine whose clock is behind."""
    now = int(time.time())
    name = other.format(now=f"{now:010d}", later=f"{now + 1000:010d}", earlier=f"{now - 1000:010d}")
    (tmp_path / f"plain.{name}").touch()
    (tmp_path / "plain.9999999999x.host.1.000").touch()  # no name of ours
    file = AppendFile(tmp_path, "plain.{}".format)
    file.close()
    assert sorted([file.path.name, f"plain.{name}"])[-1] == file.path.name
    assert file.path.name < "plain.9999999999"


@pytest.mark.parametrize(
    ("host", "name"), [("node-1_a", "node-1_a"), ("a.b c/d", "a-b-c-d"), ("", "localhost"), ("x" * 65, "x" * 64)]
)
def test_a_stem_names_second_host_process_and_counter(host, name, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert process_name() == f"{name}.{os.getpid()}"
    assert unique_stem(1234, 7) == f"0000001234.{name}.{os.getpid()}.007"


def test_the_reason_of_an_error_is_that_of_the_system():
    assert reason(FileExistsError(errno.EEXIST, "File exists")) == "it exists and is not a directory"
    assert reason(OSError(errno.ENOSPC, "No space")) == "No space"
    assert reason(OSError("odd")) == "odd"


class Format:
    """Names what is replaced in its header."""

    replaces_bytes = True

    def name(self, stem):
        return f"x.{stem}"

    def header(self, replaced=None):
        return b"H" if replaced is None else f"R{replaced.size},{replaced.step};".encode()


def test_blocks_after_the_last_finish_continue_in_a_new_file(tmp_path, caplog):
    file = ReplaceableFile(tmp_path, Format())
    first = file.path
    assert (file.append(b"abc"), file.append(b"de")) == (True, True)
    file.finish(2)
    assert file.append(b"fg")
    assert file.replace_end([b"de", b"fg"], 7, "has failed")
    assert first.read_bytes() == b"Habc"
    assert file.append(b"h")
    assert file.path.read_bytes() == b"R4,7;defgh"
    assert sorted(os.listdir(tmp_path)) == [first.name, file.path.name]
    assert f"'{first}' has failed; the values since the last success are in '{file.path}'" in caplog.text
    file.finish(1)
    file.sync()
    file.path.unlink()
    assert not file.append(b"i")
    assert file.replace_end([b"h"], None, "is gone")
    assert file.path.read_bytes() == b"R9,None;h"
    file.close()


def test_a_new_file_that_fails_leaves_the_earlier_one_as_it_was(tmp_path, monkeypatch):
    file = ReplaceableFile(tmp_path, Format())
    first = file.path
    file.append(b"abc")

    def fail(descriptor):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="broken"):
            file.replace_end([b"abc"], 0, "has failed")
    assert (os.listdir(tmp_path), file.path) == ([first.name], first)
    assert file.append(b"d")
    assert first.read_bytes() == b"Habcd"
    file.close()


def test_a_file_is_created_by_its_first_block(tmp_path):
    made = []

    def directory():
        made.append(tmp_path / "run")
        return made[-1]

    file = ReplaceableFile(directory, Format())
    file.sync()
    file.finish(0)
    file.close()
    assert (file.path, file.label, made) == (None, "x.*", [])
    assert file.append(b"a")
    assert file.append(b"b")
    assert made == [tmp_path / "run"]
    assert (file.label, file.path.parent, file.path.read_bytes()) == (str(file.path), made[0], b"Hab")
    file.close()


def test_a_file_that_is_abandoned_goes_on_in_a_temporary_directory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    file = ReplaceableFile(tmp_path / "run", Format())
    first = file.path
    file.append(b"a")
    assert not file.move_to_temporary_directory()
    assert file.path == first
    assert file.append(b"b")
    (tmp_path / "none").mkdir()
    assert file.move_to_temporary_directory()
    assert file.path.parent.name.startswith("ikkuna-run-")
    assert f"'{first}' is abandoned; continuing in '{file.path}'" in caplog.text
    assert file.append(b"c")
    assert (first.read_bytes(), file.path.read_bytes()) == (b"Hab", b"Hc")
    file.close()


def test_a_hidden_file_does_not_take_the_name_of_another_one(tmp_path):
    old = AppendFile(tmp_path, "x.{}".format)
    hidden = AppendFile(tmp_path, "x.{}".format, following=old)
    hidden.append(b"new")
    taken = tmp_path / f"x.{hidden.path.name.removeprefix('.unfinished.')}"
    taken.write_bytes(b"other")
    with pytest.raises(FileExistsError):
        hidden.publish()
    assert taken.read_bytes() == b"other"
    taken.unlink()
    hidden.publish()
    assert (hidden.path, taken.read_bytes()) == (taken, b"new")
    assert not hidden.deleted()
    hidden.delete()
    assert os.listdir(tmp_path) == [old.path.name]
    old.close()
