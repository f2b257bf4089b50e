"""Files that appear complete or not at all, and links of other users that are not followed."""

import os
import stat

import pytest
import torch

from ikkuna.backends import mpl
from ikkuna.errors import ConfigError, SnapshotError
from ikkuna.inspect.netdict.net_dict import load, save
from ikkuna.report.page import page_target
from ikkuna.support.files import atomic_file


def test_a_file_replaces_another_one_at_the_end(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        with atomic_file(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("mode", "umask", "result"), [(0o666, 0o022, 0o644), (0o600, 0o022, 0o600), (0o666, 0o077, 0o600)]
)
def test_the_permissions_are_those_of_a_new_file(tmp_path, mode, umask, result):
    old = os.umask(umask)
    try:
        with atomic_file(tmp_path / "file", mode):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == result


def test_a_name_of_the_greatest_length_is_possible(tmp_path):
    path = tmp_path / ("x" * 255)
    with atomic_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"


WRITERS = {
    "torch": ("net.pt", lambda path: save({"a": torch.ones(3)}, path)),
    "safetensors": ("net.safetensors", lambda path: save({"a": torch.ones(3)}, path)),
    "picture": ("chart.png", lambda path: mpl._replace(path, b"picture")),
}


@pytest.mark.fault(324)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["{}", "{}.partial", ".{}", "{}.tmp", ".{}.partial"])
def test_no_planted_link_is_followed(tmp_path, writer, name):
    """Neither a link of the file's own name, nor one of a name that an unfinished file could have."""
    file, write = WRITERS[writer]
    precious = tmp_path / "precious"
    precious.write_bytes(b"data of the user")
    directory = tmp_path / "shared"
    directory.mkdir()
    (directory / name.format(file)).symlink_to(precious)
    write(directory / file)
    assert precious.read_bytes() == b"data of the user"
    assert (directory / file).is_file()
    assert not (directory / file).is_symlink()


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_no_pipe_or_device_is_replaced(tmp_path, name):
    """A root user who writes a page to ``/dev/null`` keeps the device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), atomic_file(tmp_path / name):
        pass
    with pytest.raises(ConfigError, match="a device or a pipe"):
        page_target(tmp_path / name)
    assert (tmp_path / name).is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_failed_snapshot_leaves_no_file(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"net{suffix}"
    save({"a": torch.ones(3)}, path)

    def broken(source, target):
        raise ValueError("cannot be replaced")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(SnapshotError, match="cannot be replaced"):
        save({"a": torch.zeros(3)}, path)
    assert load(path)["a"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == [path.name]
