"""The handle that `ikkuna.watch` returns: tables, arrays, figures, a page, and metrics of the user's own."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.errors import ClosedError, ConfigError, ConfigTypeError, PluginError
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.testing import RecordingBackend


def network():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(fc1=nn.Linear(4, 8), relu=nn.ReLU(), fc2=nn.Linear(8, 3)))


def train(model, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def watch(model, tmp_path, *subscribers, **options):
    options = {"log_dir": tmp_path, "rules": None, "recorder": False, "verbosity": 0} | options
    return ikkuna.watch(model, *subscribers, **options)


def test_history_returns_the_values_while_training_runs_and_after_close(tmp_path):
    model = network()
    with watch(model, tmp_path, every=2) as watched:
        losses = train(model)
        during = watched.history("loss")
        losses += train(model, 4)
    after = watched.history("loss")
    assert during.steps.tolist() == [0, 2, 4]
    assert after.steps.tolist() == [0, 2, 4, 6, 8]
    np.testing.assert_allclose(after.values, losses[::2], rtol=1e-6)
    norm = watched.history("weights_norm2", "fc1").values[-1]
    assert norm == pytest.approx(float(watched.read().series("weights_norm2", "fc1").values[-1]))


def test_unknown_names_are_answered_with_those_that_are_like_them(tmp_path):
    model = network()
    with watch(model, tmp_path) as watched:
        train(model, 1)
        with pytest.raises(ConfigError, match="did you mean 'weights_norm2'"):
            watched.history("weigths_norm2")
        with pytest.raises(ConfigError, match="available: 'fc1', 'fc2'"):
            watched.history("weights_norm2", "fc")
        with pytest.raises(ConfigError, match="did you mean 'weights_norm2'"):
            watched.plot("weight_norm2")
        with pytest.raises(ConfigError, match="did you mean 'fc2'"):
            watched.plot("weights_norm2", "fc3")
        with pytest.raises(ConfigError, match="at least one module"):
            watched.plot("weights_norm2", [])
    with pytest.raises(PluginError, match="did you mean 'default'"):
        watch(model, tmp_path, preset="defualt")


def test_before_the_first_value_there_is_a_clear_answer(tmp_path):
    with watch(network(), tmp_path) as watched:
        for ask in (
            lambda: watched.plot("loss"),
            lambda: watched.history("loss"),
            lambda: watched.report(tmp_path / "r"),
        ):
            with pytest.raises(ConfigError, match="no value is stored yet"):
                ask()
        assert "no value is stored yet" in str(watched.summary())
        assert "no value is stored yet" in watched._repr_html_()
        assert "no value stored yet" in repr(watched)
        with pytest.raises(ConfigError, match="no value is stored yet"):
            watched.summary("loss")


def test_a_run_without_files_names_the_backends_that_have_some(tmp_path):
    model = network()
    with watch(model, tmp_path, backend="mpl") as watched:
        train(model, 1)
        with pytest.raises(ConfigError, match="use the backend 'tb' or 'jsonl'"):
            watched.history("loss")
    assert watched.run_directory is not None


@pytest.mark.parametrize("backend", ["tb", "jsonl"])
def test_summary_has_the_network_and_the_extremes_of_the_modules(backend, tmp_path):
    model = network()
    with watch(model, tmp_path, every=1, backend=backend) as watched:
        losses = train(model, 3)
    text = str(watched.summary())
    assert re.search(rf"^loss +{losses[0]:.4g} +{losses[-1]:.4g}", text, re.MULTILINE)
    last = {name: watched.history("weights_norm2", name).values[-1] for name in ("fc1", "fc2")}
    least, greatest = sorted(last, key=last.get)
    row = rf"^weights_norm2 +2 +{last[least]:.4g} +{least} .* {last[greatest]:.4g} +{greatest}"
    assert re.search(row, text, re.MULTILINE)
    single = str(watched.summary("weights_norm2"))
    assert "fc1" in single
    assert "loss" not in single


def test_of_many_modules_the_summary_shows_those_that_differ_most(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))
    nn.init.constant_(model[57].weight, 100.0)
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:
        train(model, 2)
    text = str(watched.summary("weights_norm2"))
    assert "the 40 of 60 modules that differ most" in text
    assert len(re.findall(r"^57 ", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^\d+ ", text, re.MULTILINE)) == 40


def test_values_that_are_not_finite_are_counted(tmp_path):
    model = network()
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:
        with torch.no_grad():
            model.fc1.weight[0, 0] = torch.nan
        train(model, 2)
    row = next(line for line in str(watched.summary()).splitlines() if line.startswith("weights_norm2"))
    assert row.split()[-1] == "2"


def test_repr_says_what_is_watched_where_and_how_it_does(tmp_path):
    model = network()
    with watch(model, tmp_path, run_name="first", rules="default") as watched:
        train(model, 2)
        watched.pause()
        assert "paused" in repr(watched)
        watched.resume()
        assert "paused" not in repr(watched)
        text = repr(watched)
    assert text.startswith("<ikkuna.watch: Sequential with 3 modules, ")
    assert f"in '{tmp_path / 'first'}', 2 steps, 0 findings, watching takes " in text
    assert "closed" in repr(watched)


def test_a_notebook_shows_tables_and_heat_maps(tmp_path):
    model = network()
    model.register_module("<b>", nn.Linear(3, 3))
    with watch(model, tmp_path, every=1) as watched:
        train(model, 3)
        page = watched._repr_html_()
    assert page.count("<svg") == page.count("</svg>") > 1
    assert "data:image/png;base64," in page
    assert "<b>" not in page
    assert "&lt;b&gt;" in page


def test_the_report_is_one_page(tmp_path):
    model = network()
    with watch(model, tmp_path, every=1) as watched:
        train(model, 3)
        page = watched.report(tmp_path / "report.html")
    assert "weights_norm2" in page.read_text(encoding="utf-8")


def test_plot_draws_a_line_for_each_module_and_quantiles_for_many(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(17)))
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:
        train(model, 3)
    lines = watched.plot("weights_norm2", ["3", "12"]).axes[0]
    drawn = {
        text.get_text(): line.get_ydata().tolist()
        for text, line in zip(lines.get_legend().texts, lines.lines, strict=True)
    }
    assert drawn == {name: watched.history("weights_norm2", name).values.tolist() for name in ("3", "12")}
    many = watched.plot("weights_norm2").axes[0]
    values = np.stack([watched.history("weights_norm2", str(i)).values for i in range(17)])
    np.testing.assert_allclose(many.lines[0].get_ydata(), np.median(values, axis=0))
    assert many.get_legend().get_title().get_text() == "17 modules"
    assert [text.get_text() for text in many.get_legend().texts] == ["minimum to maximum", "25 % to 75 %", "median"]


def test_a_module_that_is_not_finite_breaks_the_quantiles(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(17)))
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:
        train(model, 2)
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
        train(model, 1)
    median = watched.plot("weights_norm2").axes[0].lines[0].get_ydata()
    assert np.isfinite(median).tolist() == [True, True, False]


def test_a_metric_is_a_decorated_function(tmp_path):
    model = network()
    seen = []
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:

        @watched.metric("activations", every=2, modules="relu")
        def active(tensor):
            seen.append((tensor > 0).double().mean().item())
            return seen[-1]

        @watched.metric("activations", name="peak", modules="fc*")
        def anything(tensor):
            return tensor.amax()

        train(model, 3)
    assert active(torch.tensor([1.0, -1.0])) == 0.5
    assert watched.history("activations_active", "relu").steps.tolist() == [0, 2]
    np.testing.assert_allclose(watched.history("activations_active", "relu").values, seen[:2], rtol=1e-6)
    assert watched.read().names("activations_peak") == ("fc1", "fc2")


def test_a_metric_is_the_mean_over_micro_batches(tmp_path):
    model = nn.Linear(1, 1)
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:
        watched.metric("activations", name="size")(lambda tensor: len(tensor))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in (2, 6):
            model(torch.ones(rows, 1)).sum().backward()
        optimizer.step()
    assert watched.history("activations_size", "linear").values.tolist() == [4.0]


def test_wrong_metrics_are_refused(tmp_path):
    with watch(network(), tmp_path) as watched:
        with pytest.raises(ConfigTypeError, match="needs a function"):
            watched.metric("activations", name="x")(3)
        with pytest.raises(ConfigError, match="kind with tensors"):
            watched.metric("batch_finished")(lambda tensor: 0)
        with pytest.raises(ConfigError, match="did you mean 'activations'"):
            watched.metric("activation")(lambda tensor: 0)
    with pytest.raises(ClosedError):
        watched.metric("activations")


def test_a_metric_that_returns_no_number_is_named_and_training_continues(tmp_path, caplog):
    model = network()
    with watch(model, tmp_path, NormSubscriber("weights")) as watched:
        watched.metric("activations", name="rows")(lambda tensor: tensor[0])
        train(model, 2)
        assert watched.health().errors > 0
    assert "must return one number, got the shape (8,)" in caplog.text


def test_the_modules_and_the_backend_can_be_chosen(tmp_path):
    model, backend = network(), RecordingBackend()
    with watch(model, tmp_path, NormSubscriber("weights"), modules="fc*", backend=backend) as watched:
        train(model, 1)
        assert watched.module_names == {"fc1", "fc2"}
    assert {series.name for series, _, _ in backend.values} == {"fc1", "fc2"}
    with pytest.raises(ConfigError, match="matches"):
        watch(model, tmp_path, modules="conv*")
    with pytest.raises(ConfigTypeError, match="backend"):
        watch(model, tmp_path, backend=3)
    assert not model._forward_hooks


def test_a_preset_and_subscribers_are_registered_together(tmp_path):
    with watch(network(), tmp_path, NormSubscriber("bias_updates"), preset="default") as watched:
        assert {"bias_updates_norm2", "weight_updates_weights_ratio"} <= set(watched.message_bus.kinds)


@pytest.mark.parametrize("model", [3, "resnet", None, [nn.Linear(1, 1)], nn.Linear])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ConfigTypeError, match="needs a torch.nn.Module"):
        ikkuna.watch(model)


def test_models_that_cannot_be_watched_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="scripted"):
        watch(torch.jit.script(nn.Linear(2, 2)), tmp_path)
    with torch.device("meta"), pytest.raises(ConfigError, match="to_empty"):
        watch(nn.Linear(2, 2), tmp_path)


def test_a_refused_call_keeps_the_earlier_handle(tmp_path):
    model = network()
    first = watch(model, tmp_path)
    with pytest.raises(PluginError):
        watch(model, tmp_path, preset="unknown")
    first.pause()  # raises if it is closed
    first.close()


def test_one_line_names_model_metrics_directory_and_command(tmp_path, caplog):
    caplog.set_level("INFO", "ikkuna")
    model = network()
    with watch(model, tmp_path, NormSubscriber("weights"), run_name="first", verbosity=1):
        train(model, 2)
    assert [record.getMessage() for record in caplog.records][:1] == [
        f"ikkuna: Sequential with 3 modules, 1 metric; the run is written to '{tmp_path / 'first'}'; "
        f"tensorboard --logdir {tmp_path}"
    ]


def test_a_metric_of_the_user_samples_as_the_others_and_refuses_unknown_options(tmp_path):
    model = network()
    with watch(model, tmp_path, every=2) as watched:
        with pytest.raises(ConfigError, match="unknown option 'evry'; did you mean 'every'"):
            watched.metric("weights", evry=3)

        @watched.metric("weights")
        def peak(tensor):
            return tensor.abs().max()

        @watched.metric("weights", every=1)
        def least(tensor):
            return tensor.abs().min()

        train(model, 5)
    assert watched.history("weights_peak", "fc1").steps.tolist() == [0, 2, 4]
    assert watched.history("weights_least", "fc1").steps.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="one series for each module; pass one of them: 'fc1', 'fc2'"):
        watched.history("weights_peak")
    with pytest.raises(ConfigError, match="belongs to the whole network, not to a module such as 'fc1'"):
        watched.history("loss", "fc1")
    with pytest.raises(ConfigError, match="unknown module of 'weights_peak' 'fc3'"):
        watched.history("weights_peak", "fc3")
