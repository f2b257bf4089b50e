"""What is left of an event file in which bytes are wrong.

TensorBoard reads a file up to the first record whose checksum is wrong, and shows nothing of what follows.
Here the next record that is whole is looked for, byte by byte, and reading goes on there.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ikkuna.errors import ConfigError
from ikkuna.visualization.files.checksum import masked_crc32c

__all__ = ["Recovery", "recover", "whole_records"]

log = logging.getLogger("ikkuna")

_HEAD, _TAIL = 12, 4  # bytes before a record's payload and after it


class Recovery(NamedTuple):
    """What became of a file: the new one, the records it holds, and the bytes of the old one that were none."""

    path: Path
    records: int
    lost: int


def whole_records(data: bytes) -> Iterator[bytes]:
    """Yield each record of an event file whose two checksums are right, as it stands there.

    A length is believed only where its own checksum is right and it lies within the file, so a hostile one costs no memory.

    Examples
    --------
    >>> from ikkuna.visualization.files.event_file import record
    >>> first, second, third = map(record, (b"one", b"two", b"three"))
    >>> damaged = second.replace(b"w", b"W")
    >>> list(whole_records(first + damaged + third)) == [first, third]
    True
    """
    begin = 0
    while (begin := _next_head(data, begin)) >= 0:
        end = begin + _HEAD + int.from_bytes(data[begin : begin + 8], "little") + _TAIL
        payload = data[begin + _HEAD : end - _TAIL]
        if end <= len(data) and masked_crc32c(payload) == int.from_bytes(data[end - _TAIL : end], "little"):
            yield data[begin:end]
            begin = end
        else:
            begin += 1


def _next_head(data: bytes, begin: int) -> int:
    """Return where a length with the right checksum stands, from `begin` on; -1 if nowhere.

    No record of a file of ours is as long as 4 GiB, so the upper half of its length is zeros.
    """
    while (zeros := data.find(b"\0\0\0\0", begin + 4)) >= 0:
        begin = zeros - 4
        head = data[begin : begin + _HEAD]
        is_length = len(head) == _HEAD and any(head[:4])
        if is_length and masked_crc32c(head[:8]) == int.from_bytes(head[8:], "little"):
            return begin
        begin += 1
    return -1


def recover(path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None) -> Recovery:
    """Write the whole records of an event file to a new one, which TensorBoard reads to its end.

    The damaged file stays as it is; move it away, or TensorBoard shows both.

    Parameters
    ----------
    path : the file
    to : the new one; by default the same name with ``.recovered`` behind it, which TensorBoard finds as well

    Raises
    ------
    ConfigError
        If there is a file of the new name, or no whole record in the old one.
    """
    source = Path(path)
    target = Path(to) if to is not None else source.with_name(f"{source.name}.recovered")
    data = source.read_bytes()
    found = list(whole_records(data))
    if not found:
        raise ConfigError(f"'{source}' is no event file: there is no whole record in it")
    whole = b"".join(found)
    try:
        with target.open("xb") as file:
            file.write(whole)
    except FileExistsError as error:
        raise ConfigError(f"'{target}' exists; say another name with to=") from error
    lost = len(data) - len(whole)
    log.info("'%s': %d records are whole, %d bytes are lost; see '%s'", source, len(found), lost, target)
    return Recovery(target, len(found), lost)
