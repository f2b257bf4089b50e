import errno
import os
import stat
import time

import pytest

from ikkuna.errors import LogDirError
from ikkuna.store.append_file import AppendFile, ReplaceableFile, process_name, reason, unique_stem


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
