"""The format of TensorBoard's event files: one record for each step, with one event that contains all its values.

Only the protocol buffers of tensorboardX are used.
The constant bytes of a scalar are computed once for each tag; four more bytes are its value.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence

from tensorboardX.proto.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionStartInfo
from tensorboardX.proto.plugin_text_pb2 import TextPluginData
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from ikkuna.visualization.files.append_file import ReplacedEnd
from ikkuna.visualization.files.checksum import masked_crc32c
from ikkuna.visualization.histogram import HistogramLike
from ikkuna.visualization.run_config import ConfigValue

__all__ = [
    "EventFormat",
    "float32",
    "histogram_value",
    "hparams_values",
    "image_value",
    "record",
    "scalar_prefix",
    "start_record",
    "step_record",
    "text_value",
    "titled_scalar_value",
]

_SESSION_START = 1  # SessionLog.START
_FLOAT = struct.Struct("<f")
_HEADER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_PNG_SIZE = struct.Struct(">II")


def record(payload: bytes) -> bytes:
    """Return `payload` as a TFRecord: its length and its bytes, each followed by their checksum."""
    length = _HEADER.pack(len(payload))
    return b"".join(
        (length, _CHECKSUM.pack(masked_crc32c(length)), payload, _CHECKSUM.pack(masked_crc32c(payload))),
    )


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


def step_record(entries: bytes, step: int, wall_time: float) -> bytes:
    """Return the record of one event with the concatenated `entries` of its summary."""
    stamp = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step & 0xFFFFFFFFFFFFFFFF)
    return record(stamp + b"\x2a" + _varint(len(entries)) + entries)  # fields 1, 2 and 5: wall_time, step, summary


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
