"""Figures of features, gates and statistics, drawn with matplotlib but without pyplot.

No function shows a figure or changes global state; each returns what it drew.
NaN and infinite elements are marked in the figure and counted.
"""

from ikkuna.plot.curves import draw_curves, features_1d
from ikkuna.plot.fan import FanSeries, draw_fan, fan_series, percentile_fan
from ikkuna.plot.figure import FigureList, NanCount, NotebookFigure
from ikkuna.plot.flow import Flow, draw_flow, flow_of, gradient_flow
from ikkuna.plot.histograms import draw_histogram, draw_ridge, features_hist, features_hist_v2, hist_clipped
from ikkuna.plot.images import draw_image, features_2d
from ikkuna.plot.matrices import layer_step_heatmap, similarity_matrix
from ikkuna.plot.points import draw_points, features_0d
from ikkuna.plot.rnn import rnn_heatmap, rnn_histogram

features_0D = features_0d  # noqa: N816  # the names of the see-rnn package
features_1D = features_1d  # noqa: N816
features_2D = features_2d  # noqa: N816

__all__ = [
    "FanSeries",
    "FigureList",
    "Flow",
    "NanCount",
    "NotebookFigure",
    "draw_curves",
    "draw_fan",
    "draw_flow",
    "draw_histogram",
    "draw_image",
    "draw_points",
    "draw_ridge",
    "fan_series",
    "features_0D",
    "features_0d",
    "features_1D",
    "features_1d",
    "features_2D",
    "features_2d",
    "features_hist",
    "features_hist_v2",
    "flow_of",
    "gradient_flow",
    "hist_clipped",
    "layer_step_heatmap",
    "percentile_fan",
    "rnn_heatmap",
    "rnn_histogram",
    "similarity_matrix",
]
