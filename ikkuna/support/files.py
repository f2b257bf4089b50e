"""Files that appear complete or not at all, that no other user can have written, and that tell how much memory is left."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

NEW_FILE = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL  # neither an existing file nor a link that another user has created is opened
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_BINARY", 0)
)
"""The flags that open a new file for writing."""


def synchronise_directory(directory: Path) -> None:
    """Write the names in a directory to the disk, so that new files are durable, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Return a new path beside `path`.

    The file that is written there replaces `path` at the end of the ``with`` block.
    Its name is random, so another user cannot create a link of that name beforehand.
    If the block raises, the new file is deleted, and `path` stays as it was.

    Parameters
    ----------
    path : Path
        The file; a link of this name is replaced, not followed.

    Raises
    ------
    OSError
        If the file cannot be replaced, or if `path` is a directory, a device or a pipe, or a link to one.
    """
    if path.exists():  # a device would be gone for all programs, and a path such as "." has no name
        _require_regular(path.stat(), path)
    partial = path.with_name(f".{path.name[:100]}.{os.urandom(8).hex()}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file for writing, which replaces `path` at the end of the ``with`` block, see :func:`atomic_path`.

    Parameters
    ----------
    path : Path
        The file.
    mode : int
        Its permissions, of which the umask is subtracted.

    Raises
    ------
    OSError
        If the file cannot be created or replaced.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with atomic_file(Path(directory) / "numbers") as file:
    ...         written = file.write(b"1 2 3")
    ...     (Path(directory) / "numbers").read_bytes()
    b'1 2 3'
    """
    with atomic_path(path) as partial, open(os.open(partial, NEW_FILE, mode), "wb") as file:
        yield file


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; a link to one is followed.

    Raises
    ------
    OSError
        If it cannot be opened, or if it is a pipe, a device or a directory: reading those may never end.
    """
    _require_regular(path.stat(), path)  # before it is opened, because opening a device can have an effect
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises
    ------
    OSError
        If it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_directory(path: Path) -> Path:
    """Return the real path of a directory that only this user and root can change; it is created if it does not exist.

    Symbolic links are resolved first; the checked path has none.

    Raises
    ------
    PermissionError
        If the directory belongs to another user, if others can write to it, or if its parent is not a `safe_directory`.
    OSError
        If it cannot be created.
    """
    real = Path(os.path.realpath(path))
    for parent in (*reversed(real.parents), real):
        with contextlib.suppress(FileExistsError):
            if not os.path.lexists(parent):
                parent.mkdir(mode=0o700)
        status = _check_directory(parent)
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{real} belongs to another user")
    if status.st_mode & _OTHERS:
        raise PermissionError(f"other users can write to {real}")
    return real


def safe_directory(path: Path) -> Path:
    """Return the real path of a directory in which others cannot replace what this user creates.

    It and all its parents belong to this user or root.  Others cannot write to them, or they have the sticky bit, as ``/tmp`` has:
    there, others can create files, but not rename or delete those of this user.

    Raises
    ------
    PermissionError
        If that is not so.
    OSError
        If it does not exist.
    """
    real = Path(os.path.realpath(path))
    for parent in (*reversed(real.parents), real):
        _check_directory(parent)
    return real


def _check_directory(path: Path) -> os.stat_result:
    if not hasattr(os, "geteuid"):
        raise PermissionError("this system has no owners of files to check")
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a directory")
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & _OTHERS and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users can write to {path}")
    return status


def read_private_file(path: Path, limit: int) -> bytes:
    """Return the content of a regular file that belongs to this user, and that others cannot write.

    The checks are those of the file that is read, which another file of the same name cannot replace in between.

    Raises
    ------
    PermissionError
        If the file belongs to another user, others can write it, it is not a regular file, or it has more than `limit` bytes.
    OSError
        If it cannot be read.
    """
    # without O_NONBLOCK, opening a pipe would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise PermissionError(f"{path} can be written by another user")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise PermissionError(f"{path} has more than {limit} bytes")
    return content


def write_private_file(path: Path, content: bytes) -> None:
    """Replace a file of a private directory by one with this content; it appears complete or not at all.

    A pipe, a socket or a device in its place is removed first.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.unlink()
    with atomic_file(path, 0o600) as file:
        file.write(content)


_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Return how much memory this process can get before the system ends it: that of the machine, or less in a container.

    Parameters
    ----------
    root : Path
        The root of the file system.

    Returns
    -------
    int
        2⁶² where the system does not say it.
    """
    found = [1 << 62]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for directory, limit, usage, cache in _groups(root):
        with contextlib.suppress(OSError, ValueError, IndexError):  # without a limit the file says "max"
            bound = int((directory / limit).read_text())
            used = int((directory / usage).read_text())
            counters = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            found.append(max(bound - used + int(counters.get(cache, 0)), 0))
    return min(found)


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the control groups of this process and those around them, with the names of their files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):  # in a container the name may be that outside of it
            yield base.joinpath(*parts[:length]), *files
