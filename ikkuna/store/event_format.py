"""The format of TensorBoard's event files.

Only the protocol buffers of tensorboardX are used.
The constant bytes of a scalar are computed once for each tag; four more bytes are its value.
"""

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from tensorboardX.proto.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionStartInfo
from tensorboardX.proto.plugin_text_pb2 import TextPluginData
from tensorboardX.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from ikkuna.store.append_file import ReplacedEnd
from ikkuna.store.event_records import record, step_record, varint
from ikkuna.store.names import Series, overview_tag, series_tag
from ikkuna.store.quantity import network_order
from ikkuna.store.run_directory import ConfigValue
from ikkuna.store.values import HistogramLike

_SESSION_START = 1  # SessionLog.START
_FLOAT = struct.Struct("<f")
_PNG_SIZE = struct.Struct(">II")


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
    value = b"\x0a" + varint(len(name)) + name + b"\x15"  # field 1: tag; field 2, fixed 32 bits: simple_value
    return b"\x0a" + varint(len(value) + 4) + value  # field 1 of Summary


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
    charts = [
        _chart(series.quantity.label(series.kind), f"^{re.escape(series_tag(Series(series.kind)))}(\\..*)?$")
        for series in shown
    ]
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


def _of_group(series: Series, count: int) -> tuple[str, str]:
    title = series.quantity.label(series.kind)
    title = title if series.pass_name == "training" else f"{title} ({series.pass_name})"
    if count > MOST_LINES:
        tags = "|".join(re.escape(overview_tag(series, statistic)) for statistic in ("min", "median", "max"))
        return f"{title}: least, median and greatest of {count} modules", f"^({tags})$"
    head = series_tag(series).partition("/")[0]
    return title, f"^{re.escape(head)}/"
