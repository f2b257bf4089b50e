"""Files that appear complete or not at all."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["atomic_file", "atomic_path"]

_FLAGS = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL  # neither an existing file nor a link that another user has created is opened
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_BINARY", 0)
)


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
        If the file cannot be replaced.
    """
    if path.is_dir():  # a path such as "." has no name
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
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
    with atomic_path(path) as partial, open(os.open(partial, _FLAGS, mode), "wb") as file:
        yield file
