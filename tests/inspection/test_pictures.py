"""Figures, checked by their artists."""

import gc
import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import ikkuna.plot as plot
from ikkuna import monitor
from ikkuna.backends.pictures.chart import Chart
from ikkuna.backends.pictures.drawing import draw_chart
from ikkuna.errors import ConfigError
from ikkuna.figures.style import grid_shape
from ikkuna.store.names import Series

RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(16, 100, 6))


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    before = plt.get_fignums()
    yield
    assert plt.get_fignums() == before


def visible(picture):
    return [ax for ax in picture.axes if ax.get_visible() and ax.get_label() != "<colorbar>"]


def test_points():
    """E93."""
    data = RNG.normal(size=(16, 6))
    ax = plot.features_0d(data)
    points = np.concatenate([collection.get_offsets() for collection in ax.collections])
    assert len(points) == 96
    assert (points[:, 0].min(), points[:, 0].max()) == (1, 16)
    assert ax.get_ylim() == (-np.abs(data).max(), np.abs(data).max())
    assert [line.get_ydata()[0] for line in ax.lines] == [0]
    assert plot.features_0D(data, show_y_zero=False, ylims=(-9, 9), color="red").get_ylim() == (-9, 9)
    with pytest.raises(ValueError, match="2-D"):
        plot.features_0d(DATA)


def test_curves():
    """E94: a panel shows its own channel."""
    picture = plot.features_1d(DATA, n_rows=2)
    axes = visible(picture)
    assert [ax.get_subplotspec().get_geometry()[:2] for ax in axes] == [(2, 3)] * 6
    for k, ax in enumerate(axes):
        assert len(ax.lines) == 16
        assert ax.get_xlim() == (0, 100)
        for s, line in enumerate(ax.lines):
            np.testing.assert_array_equal(line.get_ydata(), DATA[s, :, k])
    assert axes[3].texts[0].get_text() == "3"
    assert tuple(axes[0].lines[4].get_color()) == tuple(axes[5].lines[4].get_color())
    samples = plot.features_1d(DATA, by="sample")
    np.testing.assert_array_equal(visible(samples)[7].lines[2].get_ydata(), DATA[7, :, 2])
    assert {line.get_color() for line in visible(plot.features_1D(DATA, color="red"))[0].lines} == {"red"}


def test_limits_are_shared_or_not():
    """E95."""
    data = RNG.normal(size=(1, 100, 64)) * np.arange(1, 65)
    own = visible(plot.features_1D(data, share_xy=False))
    same = visible(plot.features_1D(data, share_xy=True, y_zero=True))
    assert len(own) == 64
    assert own[0].get_subplotspec().get_geometry()[:2] == (8, 8)
    assert len({ax.get_ylim() for ax in own}) > 32
    assert len({ax.get_ylim() for ax in same}) == 1
    assert [len(ax.lines) for ax in (own[0], same[0])] == [1, 2]


def test_one_panel_of_many_curves():
    picture = plot.features_1d(np.zeros((50, 512)))
    assert len(visible(picture)) == 1
    assert len(visible(picture)[0].lines) == 512
    ax = Figure().subplots()
    assert plot.features_1d(DATA[0], ax=ax) is ax.figure
    with pytest.raises(ConfigError, match="give fig"):
        plot.features_1d(DATA, ax=ax)
    figure = Figure()
    assert plot.features_1d(DATA, fig=figure) is figure


def test_grids():
    """E97."""
    assert grid_shape(7)[0] * grid_shape(7)[1] >= 7
    assert grid_shape(16) == (4, 4)
    assert grid_shape(5, "vertical") == (5, 1)
    picture = plot.features_1d(RNG.normal(size=(2, 10, 6)), n_rows=4)
    assert len(picture.axes) == 8
    assert len(visible(picture)) == 6
    assert len(visible(plot.features_1d(RNG.normal(size=(2, 10, 7))))) == 7
    with pytest.raises(ConfigError, match="n_rows"):
        plot.features_1d(DATA, n_rows=0)


def test_images():
    """E98."""
    picture = plot.features_2d(DATA, n_rows=4, norm=(-0.01, 0.01))
    axes = visible(picture)
    assert [ax.images[0].get_array().shape for ax in axes] == [(6, 100)] * 16
    assert {ax.images[0].get_clim() for ax in axes} == {(-0.01, 0.01)}
    np.testing.assert_array_equal(axes[3].images[0].get_array(), DATA[3].T)
    turned = visible(plot.features_2D(DATA, timesteps_xaxis=False))
    assert turned[0].images[0].get_array().shape == (100, 6)
    top = np.abs(DATA).max()
    assert turned[5].images[0].get_clim() == (-top, top)
    assert visible(plot.features_2d(DATA, norm=None))[2].images[0].get_clim() == (DATA[2].min(), DATA[2].max())


def test_axes_of_other_data():
    (ax,) = visible(plot.features_2d(DATA[:, :, 0], dims="NT"))
    np.testing.assert_array_equal(ax.images[0].get_array(), DATA[:, :, 0])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("timestep", "sample")
    first = visible(plot.features_2d(DATA.transpose(0, 2, 1), channel_axis=1))[0]
    np.testing.assert_array_equal(first.images[0].get_array(), DATA[0].T)
    assert visible(plot.features_2d(DATA, max_timesteps=30))[0].images[0].get_array().shape == (6, 30)


def test_half_of_the_channels_reversed():
    """E99."""
    data = np.arange(24.0).reshape(2, 3, 4)
    image = visible(plot.features_2d(data, reflect_half=True))[0].images[0].get_array()
    assert image.tolist() == [[0, 4, 8], [1, 5, 9], [10, 6, 2], [11, 7, 3]]


def test_histograms():
    """E101."""
    axes = visible(plot.features_hist(DATA))
    assert len(axes) == 16
    assert [ax.patches[0].get_data().values.sum() for ax in axes] == [600] * 16
    table = plot.features_hist_v2([[[DATA[0]]]], colnames=["one"])
    assert visible(table)[0].get_title() == "one"
    cells = visible(plot.features_hist([[[DATA[0], DATA[1]], [DATA[2]]]] * 3, layout="table", side_annot="EP"))
    assert [len(ax.patches) for ax in cells] == [2, 1] * 3
    plain = visible(plot.features_hist([[[1.0, 2.0], DATA[0, 0]]], layout="table"))
    assert [ax.patches[0].get_data().values.sum() for ax in plain] == [2, 6]
    low, high = visible(plot.features_hist([[1.0, 2.0]], center_zero=True))[0].get_xlim()
    assert low == -high
    with pytest.raises(ConfigError, match="same number of cells"):
        plot.features_hist([[[1]], [[1], [2]]], layout="table")


def test_clipped_peaks():
    """E102."""
    data = [0.0] * 1000 + [1.0] * 10 + [2.0] * 5
    found = [plot.hist_clipped(data, peaks, bins=3) for peaks in (0, 1, 2)]
    assert [ax.get_ylim()[1] for ax, _ in found] == pytest.approx([1050, 10.5, 5.25])
    assert [[text.get_text() for text in ax.texts] for ax, _ in found] == [
        [],
        ["(0.00, 1000)"],
        ["(0.00, 1000)\n(0.67, 10)"],
    ]
    assert not plot.hist_clipped(data, 1, bins=3, annot_kw=None)[0].texts
    with pytest.raises(ValueError, match="number of bins"):
        plot.hist_clipped(data, 3, bins=3)


def panel(picture, title):
    return next(ax for ax in picture.axes if ax.get_title() == title)


def separators(ax):
    return [line.get_xdata()[0] for line in ax.lines]


def test_heatmap_of_an_lstm():
    """E103."""
    (picture,) = plot.rnn_heatmap(nn.LSTM(20, 32))
    assert panel(picture, "KERNEL").images[0].get_array().shape == (20, 128)
    assert panel(picture, "RECURRENT").images[0].get_array().shape == (32, 128)
    assert [separators(panel(picture, t)) for t in ("KERNEL", "RECURRENT", "BIAS")] == [[31.5, 63.5, 95.5]] * 3
    assert panel(picture, "KERNEL").get_xlabel() == "(INPUT, FORGET, CELL, OUTPUT)"
    assert [tick.get_text() for tick in panel(picture, "BIAS").get_yticklabels()] == ["b_ih", "b_hh"]


def test_heatmap_of_other_kinds():
    """E103."""
    (gru,) = plot.rnn_heatmap(nn.GRU(4, 8))
    assert separators(panel(gru, "KERNEL")) == [7.5, 15.5]
    assert panel(gru, "KERNEL").get_xlabel() == "(RESET, UPDATE, NEW)"
    (rnn,) = plot.rnn_heatmap(nn.RNN(4, 8))
    assert separators(panel(rnn, "KERNEL")) == []
    pictures = plot.rnn_heatmap(nn.LSTM(4, 8, 2, bidirectional=True, proj_size=3))
    assert [p.get_suptitle() for p in pictures] == [f"LAYER {k} {d}" for k in (0, 1) for d in ("FORWARD", "BACKWARD")]
    assert panel(pictures[0], "PROJECTION").images[0].get_array().shape == (8, 3)
    assert not separators(panel(pictures[0], "PROJECTION"))
    (bare,) = plot.rnn_heatmap(nn.LSTMCell(4, 3, bias=False), show_bias=False, gate_sep_width=0)
    assert not separators(panel(bare, "KERNEL"))
    assert len(plot.rnn_heatmap(nn.GRU(4, 3, 3), rnn_layers=[1])) == 1
    with pytest.raises(ConfigError, match="rnn_layers contains 5"):
        plot.rnn_heatmap(nn.GRU(4, 3), rnn_layers=5)


def test_automatic_limits():
    """E104."""
    rnn = nn.LSTM(2, 3, bidirectional=True)
    for name, parameter in rnn.named_parameters():
        nn.init.constant_(parameter, 0.75 if "_ih_" in name else -0.5)
        if "bias" in name:
            nn.init.constant_(parameter, 9)
    clims = [ax.images[0].get_clim() for p in plot.rnn_heatmap(rnn) for ax in p.axes if ax.images]
    assert set(clims) == {(-0.75, 0.75)}
    rnn.weight_hh_l0_reverse.data[0, 0] = 1.5
    clims = [ax.images[0].get_clim() for p in plot.rnn_heatmap(rnn) for ax in p.axes if ax.images]
    assert set(clims) == {(-1.5, 1.5)}
    each = [panel(p, "RECURRENT").images[0].get_clim() for p in plot.rnn_heatmap(rnn, per_layer=True)]
    assert each == [(-0.75, 0.75), (-1.5, 1.5)]
    pair = np.array([-0.8, 0.8])
    assert panel(plot.rnn_heatmap(rnn, norm=pair)[0], "KERNEL").images[0].get_clim() == (-0.8, 0.8)
    with pytest.raises(ValueError, match="norm"):
        plot.rnn_heatmap(rnn, norm=(0, 1, 2))


def test_nan_in_a_heatmap(caplog):
    """E106."""
    rnn = nn.LSTM(20, 32)
    rnn.weight_ih_l0.data[:5, 0] = math.nan
    rnn.weight_hh_l0.data[32:64] = math.nan
    rnn.bias_ih_l0.data[0] = math.inf
    (picture,) = plot.rnn_heatmap(rnn)
    report = picture.nan_report
    assert set(report) == {"kernel/input", "recurrent/forget", "bias"}
    assert str(report["kernel/input"]) == "0.8% NaN"
    assert str(report["recurrent/forget"]) == "100.0% NaN"
    assert (report["bias"].infs, report["bias"].nans) == (1, 0)
    assert "kernel/input" in caplog.text
    image = panel(picture, "KERNEL").images[0]
    assert all(math.isfinite(limit) for limit in image.get_clim())
    assert image.get_array().mask.sum() == 5
    (zero,) = plot.rnn_heatmap(rnn, nan="zero")
    assert not np.ma.is_masked(panel(zero, "KERNEL").images[0].get_array())
    assert rnn.weight_ih_l0[0, 0].isnan()


def test_magnitudes_and_scaling():
    rnn = nn.GRU(3, 4)
    data = rnn.weight_ih_l0.detach().clone()
    (picture,) = plot.rnn_heatmap(rnn, absolute_value=True, normalize=True, cmap=None)
    image = panel(picture, "KERNEL").images[0]
    assert (image.get_array().min(), image.get_array().max()) == (0, 1)
    assert image.get_clim() == (0, 1)
    assert torch.equal(rnn.weight_ih_l0, data)


def test_heatmap_of_given_data():
    kernel, recurrent = RNG.normal(size=(2, 12)), RNG.normal(size=(3, 12))
    (picture,) = plot.rnn_heatmap(None, data=[kernel, recurrent, np.zeros(12)])
    np.testing.assert_array_equal(panel(picture, "KERNEL").images[0].get_array(), kernel)
    assert len(plot.rnn_histogram(None, data=[kernel, recurrent] * 2)) == 2
    with pytest.raises(ConfigError, match="recurrent matrix"):
        plot.rnn_heatmap(None, data=[kernel, kernel, None])


def test_histogram_of_an_lstm():
    """E107."""
    rnn = nn.LSTM(4, 8)
    rnn.weight_hh_l0.data[:8, 0] *= 5
    (picture,) = plot.rnn_histogram(rnn, equate_axes=1)
    assert len(picture.axes) == 9
    gated, bias = picture.axes[:8], picture.axes[8]
    assert len({(ax.get_xlim(), ax.get_ylim()) for ax in gated}) == 1
    assert bias.get_xlim() != gated[0].get_xlim()
    (own,) = plot.rnn_histogram(rnn, equate_axes=False)
    assert len({ax.get_xlim() for ax in own.axes[:8]}) > 1
    (none,) = plot.rnn_histogram(rnn, bias=False)
    assert len(none.axes) == 8
    assert none.get_suptitle() == "FORWARD LAYER"
    rnn.weight_ih_l0.data[:8, 0] = math.nan
    (marked,) = plot.rnn_histogram(rnn)
    assert "25.0% NaN" in [text.get_text() for text in marked.axes[0].texts]
    rnn.weight_ih_l0.data[:] = math.nan
    (empty,) = plot.rnn_histogram(rnn)
    assert all(math.isfinite(limit) for ax in empty.axes for limit in (*ax.get_xlim(), *ax.get_ylim()))


@pytest.mark.parametrize("bias", [True, False])
def test_histograms_of_two_directions(bias):
    """E108."""
    rnn = nn.GRU(4, 8, bidirectional=True)
    rnn.weight_hh_l0_reverse.data *= 3
    pictures = plot.rnn_histogram(rnn, equate_axes=2, bias=bias)
    limits = {ax.get_xlim() for picture in pictures for ax in picture.axes[:6]}
    assert len(limits) == 1
    low, high = limits.pop()
    assert low == -high
    assert [picture.get_suptitle() for picture in pictures] == ["FORWARD LAYER", "BACKWARD LAYER"]
    with pytest.raises(ConfigError, match="equate_axes"):
        plot.rnn_histogram(rnn, equate_axes=3)


def log_of(layers, entries):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    model(torch.ones(2, 3)).sum().backward()
    log = []
    for _ in range(entries):
        entry = {}
        for name in map(str, range(layers)):
            for function in ("weight", "bias", "weight_gradient", "bias_gradient"):
                entry |= getattr(monitor, f"{function}_statistics")(model, name)
        log.append(entry)
    return log


def test_a_fan():
    """E17."""
    picture = plot.percentile_fan(log_of(5, 10))
    axes = visible(picture)
    assert len(axes) == 20
    for ax in axes:
        assert [band.get_alpha() for band in ax.collections] == [0.2] * 4
        assert [len(line.get_ydata()) for line in ax.lines] == [10]
    assert [ax.get_title() for ax in axes[:4]] == ["Weights", "Biases", "Weight Gradients", "Bias Gradients"]
    assert [ax.get_ylabel() for ax in axes[::4]] == list("01234")
    assert len(visible(plot.percentile_fan(log_of(3, 4), layers=["1"], params=["Biases"]))) == 1
    with pytest.raises(KeyError, match="no layer '9'"):
        plot.percentile_fan(log_of(2, 2), layers=["9"])


def test_a_fan_names_its_bands():
    [ax] = visible(plot.percentile_fan(log_of(1, 3), params=["Weights"]))
    expected = ["minimum to maximum", "0.13 % to 99.9 %", "2.28 % to 97.7 %", "15.9 % to 84.1 %", "median"]
    legend = ax.get_legend()
    assert [text.get_text() for text in legend.texts] == expected
    assert np.diff([band.get_alpha() for band in legend.get_patches()]).min() > 0
    log = [{"net/fc/weight/data/percentile/0": 0.0, "net/fc/weight/data/percentile/1": 1.0}] * 3
    [ax] = visible(plot.percentile_fan(log, percentiles=(25, 75)))
    assert ax.get_legend().texts[0].get_text() == "25 % to 75 %"
    log = [entry | {"net/fc/weight/data/min": -1.0, "net/fc/weight/data/max": 2.0} for entry in log]
    [ax] = visible(plot.percentile_fan(log))  # which are not those of `ikkuna.monitor`
    assert [text.get_text() for text in ax.get_legend().texts] == ["band 1", "band 2"]


def flow_figure():
    return plot.gradient_flow({f"layer{i}": torch.tensor([10.0**i]) for i in range(8)}).figure


def chart_of(modules):
    chart = Chart(Series("weights_norm2", "encoder"))
    for step in range(5):
        chart.add(step, {f"encoder.layers.{i}.attention.out_proj": float(i + step) for i in range(modules)})
    return chart


FIGURES_WITH_LEGENDS = {
    "percentile_fan": lambda: plot.percentile_fan(log_of(2, 10)),
    "gradient_flow": flow_figure,
    "features_0d": lambda: plot.features_0d(DATA[:, 0]).figure,
    "lines of 16 modules": lambda: draw_chart(chart_of(16).view()),
    "quantiles of 40 modules": lambda: draw_chart(chart_of(40).view()),
}


@pytest.mark.parametrize("make", FIGURES_WITH_LEGENDS.values(), ids=FIGURES_WITH_LEGENDS)
def test_a_legend_covers_no_panel_and_is_inside_the_figure(make):
    figure = make()
    figure.draw_without_rendering()  # lays it out
    legends = [ax.get_legend() for ax in figure.axes if ax.get_legend() is not None]
    assert legends
    for legend in legends:
        box = legend.get_window_extent()
        assert not [ax for ax in visible(figure) if box.overlaps(ax.get_window_extent())]
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


def test_a_fan_with_a_hole():
    """E18."""
    log = log_of(1, 10)
    del log[1]["Sequential/0/weight/data/percentile/3"]
    (fan,) = [fan for fan in plot.fan_series(log) if fan.column == "Weights"]
    assert len(fan.median) == 10
    assert np.flatnonzero(np.isnan(fan.median)).tolist() == [1]
    with pytest.raises(ConfigError, match="has no keys"):
        plot.fan_series([{"loss": 1.0}])
    ax = Figure().subplots()
    assert plot.percentile_fan([fan], ax=ax) is ax.figure


def test_layers_over_steps():
    ax = plot.layer_step_heatmap(
        {f"layer{i}": np.arange(20) + i for i in range(300)}, steps=range(0, 200, 10), log=True
    )
    assert ax.images[0].get_array().shape == (300, 20)
    assert len(ax.get_yticks()) <= 40
    assert np.ma.is_masked(ax.images[0].get_array())  # the one that is 0
    with pytest.raises(ConfigError, match="name for each"):
        plot.layer_step_heatmap(np.zeros((2, 3)), layers=["a"])
    with pytest.raises(TypeError, match="one shape"):
        plot.layer_step_heatmap({"a": [1.0], "b": [1.0, 2.0]})


def test_gradient_flow():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1))
    with pytest.raises(ConfigError, match="no gradients; call"):
        plot.gradient_flow(model)
    model[1](model[0](torch.ones(2, 3))).sum().backward()
    ax = plot.gradient_flow(model)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0.weight", "1.weight", "2.weight"]
    assert [text.get_text() for text in ax.texts] == ["NaN"]
    expected = [float(model[i].weight.grad.abs().mean()) for i in (0, 1)]
    assert [bar.get_width() for bar in ax.patches[:2]] == pytest.approx(expected)
    zero = plot.gradient_flow({"a": [0.0], "b": [1.0]})
    assert [text.get_text() for text in zero.texts] == ["0"]


def test_similarity():
    ax = plot.similarity_matrix(np.eye(3), list("abc"))
    assert ax.images[0].get_clim() == (0, 1)
    assert len(ax.texts) == 9
    assert not plot.similarity_matrix(np.eye(30)).texts
    assert plot.similarity_matrix(np.full((2, 2), np.nan)).images
    with pytest.raises(ConfigError, match="name for each row"):
        plot.similarity_matrix(np.eye(3), ["a"])


def test_a_ridge():
    counts, edges = np.histogram(DATA, 10)
    ax = plot.draw_ridge(Figure().subplots(), [("fc1", counts, edges), ("fc2", counts * 3, edges)])
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["fc2", "fc1"]


def first(data):
    return [sample[0] for sample in data] if isinstance(data, list) else data[:, 0]


ALL = {
    "features_0d": lambda d, **o: plot.features_0d(first(d), **o),
    "features_1d": lambda d, **o: plot.features_1d(d, **o),
    "features_2d": lambda d, **o: plot.features_2d(d, **o),
    "features_hist": lambda d, **o: plot.features_hist(d, **o),
    "similarity_matrix": lambda d, **o: plot.similarity_matrix(d[0], **o),
    "layer_step_heatmap": lambda d, **o: plot.layer_step_heatmap(d[0], **o),
}


@pytest.mark.parametrize("name", ALL)
def test_all_nan(name, tmp_path):
    """All-NaN data draws an empty picture that says so."""
    ALL[name](np.full((2, 8, 6), np.nan), savepath=tmp_path / "nan.png")
    assert (tmp_path / "nan.png").stat().st_size > 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("form", ["bfloat16", "requires grad", "list"])
def test_any_data_is_drawn_and_unchanged(name, form):
    tensor = torch.from_numpy(DATA[:2, :8].copy())
    data = {"bfloat16": tensor.bfloat16(), "requires grad": tensor.clone().requires_grad_(), "list": tensor.tolist()}[
        form
    ]
    before = torch.as_tensor(data).detach().clone()
    ALL[name](data)
    assert torch.equal(torch.as_tensor(data).detach(), before)


@pytest.mark.parametrize("name", ALL)
def test_invalid_values(name):
    with pytest.raises(TypeError, match="did you mean 'title'"):
        ALL[name](DATA, titel="x")
    with pytest.raises(TypeError, match="multiple values"):
        ALL[name](DATA, title="x", title_mode="y")
    with pytest.raises(ConfigError, match="unknown key 'plt'"):
        ALL[name](DATA, configs={"plt": {}})


@pytest.mark.parametrize("name", ["features_1d", "features_2d"])
def test_wrong_shapes(name):
    with pytest.raises(ConfigError, match="expects"):
        ALL[name](np.zeros((2, 2, 2, 2)))
    with pytest.raises(ConfigError, match="no data to draw"):
        ALL[name](np.zeros((2, 0, 2)))
    with pytest.raises(TypeError, match="expected numbers"):
        ALL[name](["a", "b"])


def test_titles_ticks_and_borders():
    picture = plot.features_1d(DATA, title_mode="grads", xy_ticks=[0, 1], show_borders=False)
    assert picture.get_suptitle().startswith("Gradients: a panel for each channel")
    ax = visible(picture)[0]
    assert not ax.xaxis.get_tick_params()["bottom"]
    assert ax.yaxis.get_tick_params()["left"]
    assert not ax.spines["top"].get_visible()
    assert plot.features_1d(DATA, title=False).get_suptitle() == ""
    assert plot.features_1d(DATA, title="mine").get_suptitle() == "mine"
    wide = plot.features_1d(DATA, w=2, h=0.5).get_size_inches()
    assert (wide == plot.features_1d(DATA).get_size_inches() * [2, 0.5]).all()
    thick = plot.features_2d(DATA, tight=True, borderwidth=3, bordercolor="red")
    assert visible(thick)[0].spines["left"].get_linewidth() == 3
    configs = {"plot": {"linewidth": 4}}
    assert visible(plot.features_1d(DATA, configs=configs))[0].lines[0].get_linewidth() == 4
    assert configs == {"plot": {"linewidth": 4}}


def test_files_and_notebooks(tmp_path):
    plot.rnn_heatmap(nn.GRU(2, 2, bidirectional=True), savepath=tmp_path / "gru.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gru_0.png", "gru_1.png"]
    assert plot.features_1d(DATA[:1])._repr_png_().startswith(b"\x89PNG")
    assert plot.rnn_heatmap(nn.GRU(2, 2))._repr_html_().count("<img") == 1


def test_a_thousand_figures_are_freed():
    def count():
        gc.collect()
        return sum(issubclass(type(each), Figure) for each in gc.get_objects())

    before = count()
    for _ in range(1000):
        plot.NotebookFigure()
    for _ in range(20):
        plot.features_2d(DATA[:1])
    assert count() <= before


@pytest.mark.parametrize(("data", "layout"), [(torch.tensor(1.0), None), (np.ones(3), "table")])
def test_histograms_need_an_axis_of_panels(data, layout):
    with pytest.raises(ConfigError, match="or more axes"):
        plot.features_hist(data, layout=layout)


def test_a_fan_needs_a_position_for_each_entry():
    with pytest.raises(ConfigError, match="each of the 3 entries"):
        plot.percentile_fan(log_of(1, 3), x=[1])
