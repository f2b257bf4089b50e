"""Figures of features, gates and statistics, drawn with matplotlib but without pyplot.

No function shows a figure or changes global state; each returns what it drew.
NaN and infinite elements are marked in the figure and counted.
"""

from ikkuna.figures.curves import (
    FanSeries,
    draw_curves,
    draw_fan,
    draw_points,
    fan_series,
    features_0d,
    features_1d,
    percentile_fan,
)
from ikkuna.figures.histograms import draw_histogram, draw_ridge, features_hist, features_hist_v2, hist_clipped
from ikkuna.figures.style import FigureList, NanCount, NotebookFigure
from ikkuna.inspect.plot.images import draw_image, features_2d, layer_step_heatmap, similarity_matrix
from ikkuna.inspect.plot.net import Flow, draw_flow, flow_of, gradient_flow
from ikkuna.inspect.plot.rnn import rnn_heatmap, rnn_histogram

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


features_0D = features_0d  # noqa: N816  # the names of the see-rnn package
features_1D = features_1d  # noqa: N816
features_2D = features_2d  # noqa: N816
