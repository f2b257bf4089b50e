"""The format of TensorBoard's event files.

Only the protocol buffers of tensorboardX are used.
The constant bytes of a scalar are computed once for each tag; four more bytes are its value.

TensorBoard ignores everything after the first corrupt byte of an event file.
This module searches for the next intact record and continues there.
"""

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensorboardX.proto.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionStartInfo
from tensorboardX.proto.plugin_text_pb2 import TextPluginData
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from ikkuna.errors import ConfigError
from ikkuna.store.append_file import ReplacedEnd
from ikkuna.store.names import Series, overview_tag, series_tag
from ikkuna.store.quantity import network_order
from ikkuna.store.run_directory import ConfigValue
from ikkuna.store.values import HistogramLike
from ikkuna.support.failures import log

__all__ = [
    "MOST_LINES",
    "EventFormat",
    "Recovery",
    "float32",
    "histogram_value",
    "hparams_values",
    "image_value",
    "layout_value",
    "masked_crc32c",
    "next_head",
    "record",
    "record_spans",
    "recover",
    "scalar_prefix",
    "start_record",
    "step_record",
    "text_value",
    "titled_scalar_value",
    "whole_records",
]


_CHUNK = 512
_SHORT = 64  # a loop over bytes is as fast for shorter data
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, in reversed order of bits


@cache
def _table() -> tuple[int, ...]:
    """Return the checksum of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return tuple(table.tolist())


@cache
def _contributions() -> NDArray[np.uint32]:
    """Return the contribution of each byte value to the checksum, by its place in a chunk: (place, byte)."""
    table = np.array(_table(), dtype=np.uint32)
    rows = np.empty((_CHUNK, 256), dtype=np.uint32)
    rows[-1] = table
    for place in range(_CHUNK - 2, -1, -1):
        rows[place] = table[rows[place + 1] & 0xFF] ^ (rows[place + 1] >> 8)
    return rows


@cache
def _advance() -> tuple[tuple[int, ...], ...]:
    """Return the table that advances a checksum by a whole chunk, one row for each of its bytes."""
    return tuple(tuple(row) for row in _contributions()[:4].tolist())


def _short_crc32c(data: bytes) -> int:
    table, state = _table(), 0xFFFFFFFF
    for byte in data:
        state = table[(state ^ byte) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF


def _long_crc32c(data: bytes) -> int:
    # A CRC is linear over GF(2): it is the XOR of the contributions of all bytes, which depend on their distance from the end.
    # Leading zeros do not change a state of zero, so the data can be padded.
    padding = -len(data) % _CHUNK
    padded = np.zeros(padding + len(data), dtype=np.uint8)
    padded[padding:] = np.frombuffer(data, dtype=np.uint8)
    padded[padding : padding + 4] ^= 0xFF
    places = padded.reshape(-1, _CHUNK) + np.arange(_CHUNK) * 256
    chunks = np.bitwise_xor.reduce(_contributions().ravel()[places], axis=1)
    first, second, third, fourth = _advance()
    state = 0
    for chunk in chunks.tolist():
        state = first[state & 255] ^ second[state >> 8 & 255] ^ third[state >> 16 & 255] ^ fourth[state >> 24] ^ chunk
    return state ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of `data`, rotated and shifted as in a TFRecord.

    The result equals ``tensorboardX.record_writer.masked_crc32c``, whose loop over bytes would dominate the cost of a step.

    Examples
    --------
    >>> hex(masked_crc32c(b"ikkuna"))
    '0xc29a0b7c'
    """
    crc = _short_crc32c(data) if len(data) < _SHORT else _long_crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_SESSION_START = 1  # SessionLog.START
_FLOAT = struct.Struct("<f")
_HEADER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_PNG_SIZE = struct.Struct(">II")


def record(payload: bytes) -> bytes:
    """Return `payload` as a TFRecord: its length and its bytes, each followed by their checksum."""
    return b"".join((_record_header(len(payload)), payload, _CHECKSUM.pack(masked_crc32c(payload))))


@lru_cache(1024)  # the records of many steps are equally long
def _record_header(size: int) -> bytes:
    length = _HEADER.pack(size)
    return length + _CHECKSUM.pack(masked_crc32c(length))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def float32(value: float) -> bytes:
    """Return the four bytes of the nearest single-precision number; too large numbers become infinite."""
    try:
        return _FLOAT.pack(value)
    except OverflowError:
        return _FLOAT.pack(float("inf") if value > 0 else float("-inf"))


def scalar_prefix(tag: str) -> bytes:
    """Return a scalar's ``Summary.value`` entry without the final :func:`float32`.

    Examples
    --------
    >>> Summary.FromString(scalar_prefix("loss") + float32(0.5)).value[0].simple_value
    0.5
    """
    name = tag.encode()
    value = b"\x0a" + _varint(len(name)) + name + b"\x15"  # field 1: tag; field 2, fixed 32 bits: simple_value
    return b"\x0a" + _varint(len(value) + 4) + value  # field 1 of Summary


def _entry(value: "Summary.Value") -> bytes:
    return bytes(Summary(value=[value]).SerializeToString())


def titled_scalar_value(tag: str, value: float, title: str) -> bytes:
    """Return a scalar with the title that TensorBoard shows for its tag; needed once for each tag."""
    [number] = _FLOAT.unpack(float32(value))
    return _entry(Summary.Value(tag=tag, simple_value=number, metadata=SummaryMetadata(display_name=title)))


def histogram_value(tag: str, histogram: HistogramLike) -> bytes:
    """Return a histogram as an entry of a summary."""
    proto = HistogramProto(
        min=float(histogram.min),
        max=float(histogram.max),
        num=float(histogram.num),
        sum=float(histogram.sum),
        sum_squares=float(histogram.sum_squares),
        bucket_limit=[float(edge) for edge in histogram.bucket_limits],
        bucket=[float(count) for count in histogram.bucket_counts],
    )
    return _entry(Summary.Value(tag=tag, histo=proto))


def text_value(tag: str, text: str) -> bytes:
    """Return a page of Markdown as an entry of a summary."""
    plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[text.encode(errors="replace")],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return _entry(Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor))


def image_value(tag: str, png: bytes) -> bytes:
    """Return a picture, encoded as PNG, as an entry of a summary."""
    width, height = _PNG_SIZE.unpack_from(png, 16)  # a PNG begins with a signature of 8 bytes and the header chunk
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
    return _entry(Summary.Value(tag=tag, image=image))


def hparams_values(config: Mapping[str, ConfigValue], metrics: Sequence[str]) -> list[bytes]:
    """Return the entries of TensorBoard's hparams plugin: the columns of its table, and the row of this run.

    Parameters
    ----------
    config : mapping
        The hyper-parameters; ``None`` and NaN are shown as text.
    metrics : sequence of str
        Tags whose last values are shown beside them.
    """
    start, infos = SessionStartInfo(), []
    for name, value in config.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float) and math.isfinite(value):
            start.hparams[name].number_value = float(value)
        else:
            start.hparams[name].string_value = str(value)
        kind = {"bool_value": "BOOL", "number_value": "FLOAT64"}.get(start.hparams[name].WhichOneof("kind"), "STRING")
        infos.append(HParamInfo(name=name, type=DataType.Value(f"DATA_TYPE_{kind}")))
    experiment = Experiment(
        hparam_infos=infos, metric_infos=[MetricInfo(name=MetricName(tag=metric)) for metric in metrics]
    )
    contents = {
        "experiment": HParamsPluginData(experiment=experiment, version=0),
        "session_start_info": HParamsPluginData(session_start_info=start, version=0),
    }
    return [_hparams_value(f"_hparams_/{name}", content) for name, content in contents.items()]


def _hparams_value(tag: str, content: HParamsPluginData) -> bytes:
    plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
    return _entry(Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin)))


@lru_cache(1024)  # the entries of many steps are equally long
def _summary_header(size: int) -> bytes:
    return b"\x2a" + _varint(size)  # field 5 of Event


def step_record(entries: bytes, step: int, wall_time: float) -> bytes:
    """Return the record of one event with the concatenated `entries` of its summary."""
    stamp = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step & 0xFFFFFFFFFFFFFFFF)
    return record(stamp + _summary_header(len(entries)) + entries)  # fields 1, 2 and 5: wall_time, step, summary


def start_record(step: int, wall_time: float) -> bytes:
    """Return the record of a run that continues at `step`.

    TensorBoard then hides later steps of earlier files in the same directory.
    """
    event = Event(wall_time=wall_time, step=step, session_log=SessionLog(status=_SESSION_START))
    return record(event.SerializeToString())


class EventFormat:
    """The format of an event file.

    Parameters
    ----------
    now : callable
        Returns the time of day in seconds.
    """

    replaces_bytes = False

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def name(self, stem: str) -> str:
        """Return a name by which TensorBoard finds the file."""
        return f"events.out.tfevents.{stem}"

    def header(self, replaced: ReplacedEnd | None = None) -> bytes:
        """Return the record of the format's version, and one that hides the steps of an earlier file that are `replaced`."""
        version = record(Event(wall_time=self._now(), file_version="brain.Event:2").SerializeToString())
        if replaced is None or replaced.step is None:
            return version
        return version + start_record(replaced.step, self._now())

    def loss(self, values: int, first: int, last: int) -> bytes:
        """Return a page of text that reports lost values."""
        text = f"Lost {values} values between steps {first} and {last}: the disk did not store them."
        return step_record(text_value("Text/ikkuna lost values", text), last, self._now())


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
    >>> from ikkuna.store.event_format import record
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


MOST_LINES = 50
"""Of more modules a chart shows the least, median and greatest value."""


def layout_value(groups: Iterable[tuple[Series, int]], network: Iterable[Series] = ()) -> bytes:
    """Return the layout as an entry of a summary.

    Parameters
    ----------
    groups : iterable of (Series, int)
        A series of each kind of modules, and the number of modules.
    network : iterable of Series
        The series of the network; each kind has a chart with a curve for each pass, the headlines first.
    """
    kinds = {series.kind: series for series in network}
    shown = sorted(kinds.values(), key=lambda series: network_order(series.kind, series.quantity))
    charts = [_chart(series.quantity.label(series.kind), _of_network(series)) for series in shown]
    layers = [_chart(*_of_group(series, count)) for series, count in groups]
    layout = Layout(category=[Category(title="Network", chart=charts), Category(title="Layers", chart=layers)])
    tensor = TensorProto(
        dtype="DT_STRING", string_val=[layout.SerializeToString()], tensor_shape=TensorShapeProto(dim=[])
    )
    plugin = SummaryMetadata.PluginData(plugin_name="custom_scalars")
    metadata = SummaryMetadata(plugin_data=plugin)
    value = Summary.Value(tag="custom_scalars__config__", metadata=metadata, tensor=tensor)
    return bytes(Summary(value=[value]).SerializeToString())


def _chart(title: str, tag: str) -> Chart:
    return Chart(title=title, multiline=MultilineChartContent(tag=[tag]))


def _of_network(series: Series) -> str:
    return f"^{re.escape(series_tag(Series(series.kind)))}(\\..*)?$"


def _of_group(series: Series, count: int) -> tuple[str, str]:
    title = series.quantity.label(series.kind)
    title = title if series.pass_name == "training" else f"{title} ({series.pass_name})"
    if count > MOST_LINES:
        tags = "|".join(re.escape(overview_tag(series, statistic)) for statistic in ("min", "median", "max"))
        return f"{title}: least, median and greatest of {count} modules", f"^({tags})$"
    head = series_tag(series).partition("/")[0]
    return title, f"^{re.escape(head)}/"
