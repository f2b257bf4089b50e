"""Recovers the intact records of a damaged event file.

TensorBoard ignores everything after the first corrupt byte of an event file.
This module searches for the next intact record and continues there.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ikkuna.errors import ConfigError
from ikkuna.logger import log
from ikkuna.visualization.files.checksum import masked_crc32c

__all__ = ["Recovery", "next_head", "record_spans", "recover", "whole_records"]

_HEAD, _TAIL = 12, 4  # bytes before a record's payload and after it


class Recovery(NamedTuple):
    """The result of :func:`recover`: the new file, its number of records, and the number of lost bytes."""

    path: Path
    records: int
    lost: int


def whole_records(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each record of an event file whose two checksums are correct.

    Examples
    --------
    >>> from ikkuna.visualization.files.event_file import record
    >>> first, second, third = map(record, (b"one", b"two", b"three"))
    >>> damaged = second.replace(b"w", b"W")
    >>> list(whole_records(first + damaged + third)) == [first, third]
    True
    """
    return (data[begin:end] for begin, end in record_spans(data))


def record_spans(data: bytes, is_end: bool = True) -> Iterator[tuple[int, int]]:
    """Yield the positions of the first byte of each intact record and of the byte after it.

    A length is used only if its own checksum is correct and the record lies within the data.
    In a hostile file many of these records overlap: when 16 times the size of the file has been read in records with a wrong
    checksum, only shorter records are checked.

    Parameters
    ----------
    data : bytes
        Records of an event file, perhaps with other bytes between them.
    is_end : bool
        Whether the file ends here; if not, a record that is longer than the data ends the iteration.
    """
    begin, budget = 0, 16 * len(data)
    while (begin := next_head(data, begin)) >= 0:
        end = begin + _HEAD + int.from_bytes(data[begin : begin + 8], "little") + _TAIL
        if end > len(data) and not is_end:
            return
        if end <= len(data) and end - begin <= budget:
            payload = data[begin + _HEAD : end - _TAIL]
            if masked_crc32c(payload) == int.from_bytes(data[end - _TAIL : end], "little"):
                yield begin, end
                begin = end
                continue
            budget -= end - begin
        begin += 1


def next_head(data: bytes, begin: int) -> int:
    """Return the position of the next length with a correct checksum, from `begin` on; -1 if there is none.

    Records written by ikkuna are shorter than 4 GiB, so the upper half of a length is zero.
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
    """Write the intact records of an event file to a new file, which TensorBoard can read completely.

    The damaged file is not changed.  Move it away, because TensorBoard would show both.

    Parameters
    ----------
    path : str or path-like
        The damaged file.
    to : str or path-like, optional
        The new file; by default the same name with the suffix ``.recovered``, which TensorBoard finds too.

    Raises
    ------
    ConfigError
        If the new file exists, or the damaged file has no intact record.
    """
    source = Path(path)
    target = Path(to) if to is not None else source.with_name(f"{source.name}.recovered")
    data = source.read_bytes()
    found = list(whole_records(data))
    if not found:
        raise ConfigError(f"'{source}' is not an event file: it has no intact record")
    whole = b"".join(found)
    try:
        with target.open("xb") as file:
            file.write(whole)
    except FileExistsError as error:
        raise ConfigError(f"'{target}' exists; pass another name as to=") from error
    lost = len(data) - len(whole)
    log.info("'%s': %d records are intact, %d bytes are lost; see '%s'", source, len(found), lost, target)
    return Recovery(target, len(found), lost)
