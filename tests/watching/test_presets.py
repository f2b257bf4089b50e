"""The presets: what they contain, and when they measure it."""

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.metrics.subscriber.bases import GROUP, Preset
from ikkuna.store.values import ModuleEntry
from ikkuna.support.plugins import load_plugin
from tests.watching.test_handle import network, train

PRESETS = ("economy", "default", "full")


def metrics(name, *classes, sees_loss=True):
    preset = load_plugin(GROUP, name, Preset)()
    preset.network = tuple(ModuleEntry(f"{i}.{each}", each) for i, each in enumerate(classes))
    return preset.subscribers(sees_loss)


def published(name, *classes):
    return {kind for metric in metrics(name, *classes) for kind in metric.publishes or metric.kinds}


def test_the_default_preset_shows_a_network_that_goes_wrong():
    assert published("default", "ReLU") >= {
        *("loss", "train_accuracy", "learning_rate", "gradients_global_norm", "gradient_norm_unclipped"),
        *("weight_updates_weights_ratio", "layer_gradients_norm2", "activations_variance", "activations_dead"),
        *("nonfinite_producer", "step_seconds"),
    }


def test_the_full_preset_contains_the_default_one():
    assert published("full", "ReLU") > published("default", "ReLU")


def test_dead_units_are_measured_in_rectified_layers_only():
    dead = next(
        metric for metric in metrics("default", "Linear", "ReLU", "Tanh") if "activations_dead" in metric.publishes
    )
    assert [name for name in ("0.Linear", "1.ReLU", "2.Tanh") if dead.subscription.matches(name)] == ["1.ReLU"]
    assert "activations_dead" not in published("default", "Linear", "Tanh")


@pytest.mark.parametrize("name", PRESETS)
def test_no_metric_of_a_preset_samples_more_than_every_tenth_step(name):
    assert all(metric.subscription.subsample >= 10 for metric in metrics(name, "ReLU"))


@pytest.mark.parametrize("name", PRESETS)
def test_without_labels_a_preset_has_no_metric_that_needs_them(name):
    wanted = {kind for metric in metrics(name, "ReLU", sees_loss=False) for kind in metric.kinds}
    assert "input_labels" not in wanted


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_accuracy_of_a_preset_are_values_of_sampled_steps(name, tmp_path):
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ikkuna.watch(model, loss=loss, preset=name, log_dir=tmp_path, verbosity=0, recorder=False) as watched:
        for _ in range(11):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
            optimizer.step()
    assert watched.history("loss").steps.tolist() == [0, 10]
    assert watched.history("train_accuracy").steps.tolist() == ([0] if name == "economy" else [0, 10])
    assert watched.health().errors == watched.health().dropped == 0


def test_a_preset_decides_how_often_rules_sample(tmp_path):
    model = network()
    with ikkuna.watch(model, preset="economy", log_dir=tmp_path, verbosity=0) as watched:
        plans = [r.subscriber.subscription.subsample for r in watched.message_bus.registered]
        train(model, 2)
    assert set(plans) >= {10, 100}
    assert min(step for step in plans) > 1 or plans.count(1) == 1  # the flight recorder takes every step
