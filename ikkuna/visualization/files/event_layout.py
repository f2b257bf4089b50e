"""The layout of TensorBoard's page of custom scalars: one chart for each kind, with all modules."""

import re
from collections.abc import Iterable

from tensorboardX.proto.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

from ikkuna.visualization.names import overview_tag, series_tag
from ikkuna.visualization.series import Series

__all__ = ["MOST_LINES", "layout_value"]

MOST_LINES = 50
"""Of more modules a chart shows the least, median and greatest value."""

_NETWORK = {
    "loss": r"^Network/loss(\..*)?$",
    "accuracy": r"^Network/[a-z]+_accuracy",
    "learning rate": r"^(Network/learning_rate$|learning_rate/)",
    "norm of all gradients, before and after clipping": r"^Network/(gradient_norm_unclipped|gradients_global_norm)$",
}


def layout_value(groups: Iterable[tuple[Series, int]]) -> bytes:
    """Return the layout as an entry of a summary.

    Parameters
    ----------
    groups : iterable of (Series, int)
        A series of each kind of modules, and the number of modules.
    """
    network = [_chart(title, tag) for title, tag in _NETWORK.items()]
    layers = [_chart(*_of_group(series, count)) for series, count in groups]
    layout = Layout(category=[Category(title="Network", chart=network), Category(title="Layers", chart=layers)])
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
    title = series.kind if series.pass_name == "training" else f"{series.kind} ({series.pass_name})"
    if count > MOST_LINES:
        tags = "|".join(re.escape(overview_tag(series, statistic)) for statistic in ("min", "median", "max"))
        return f"{title}: least, median and greatest of {count} modules", f"^({tags})$"
    head = series_tag(series).partition("/")[0]
    return title, f"^{re.escape(head)}/"
