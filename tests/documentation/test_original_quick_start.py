"""The quick start of the first ikkuna runs unchanged, on real data, and its values are right."""

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.plugins.children import ROOT, run_python

SCRIPT = ROOT / "tests" / "documentation" / "original_quick_start.py"
STEPS = 35


@pytest.fixture(scope="module")
def script():
    namespace = {"__name__": "original_quick_start"}
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Tag → {step: value}, read by TensorBoard after the training process has ended."""
    work = tmp_path_factory.mktemp("quick_start")
    run_python(str(SCRIPT), str(STEPS), cwd=work)
    assert [path.name for path in work.iterdir()] == ["run"]
    [run] = (work / "run").iterdir()
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: {v.step: v.value for v in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def layers(model):
    """Yield the names and layers in the order of the forward pass."""
    for part in ("features", "classifier"):
        for name, layer in getattr(model, part).named_children():
            yield f"{part}.{name}", layer


def test_every_layer_has_a_curve_with_every_tenth_step(script, curves):
    expected = {f"layer_gradients_norm2/{name}" for name, _ in layers(script["make_model"]())}
    assert {tag for tag in curves if not tag.startswith("Overview/")} == expected
    assert all(list(curves[tag]) == [0, 10, 20, 30] for tag in expected)


def test_every_value_is_the_norm_of_the_true_gradient(script, curves):
    """The reference is the same training without hooks, with ``autograd.grad`` of the loss with respect to each output."""
    torch.manual_seed(0)
    model = script["make_model"]()
    loss_function, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (inputs, labels) in enumerate(script["batches"](STEPS)):
        x, outputs = inputs.flatten(1), {}
        for name, layer in layers(model):
            x = outputs[name] = layer(x)
        loss = loss_function(x, labels)
        gradients = torch.autograd.grad(loss, list(outputs.values()), retain_graph=True)
        for name, gradient in zip(outputs, gradients, strict=True):
            if step % 10 == 0:
                norm = np.linalg.norm(gradient.double().numpy())
                assert norm > 0
                assert curves[f"layer_gradients_norm2/{name}"][step] == pytest.approx(norm, rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
