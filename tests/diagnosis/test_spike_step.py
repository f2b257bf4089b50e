"""A step whose loss is a spike is found at every position between two samples, and is measured itself."""

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis.check import check
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber

START = 90


class Scale(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("with_module", [False, True])
@pytest.mark.parametrize(("every", "index"), [(every, index) for every in (1, 2, 7, 10) for index in range(every)])
def test_a_spike_of_one_step_is_found_and_its_step_is_measured(every, index, with_module, tmp_path):
    torch.manual_seed(index)
    model, loss = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3), Scale()), nn.CrossEntropyLoss()
    optimizer, losses, measured = torch.optim.SGD(model.parameters(), 0.01), [], {}
    at = START - START % every + every + index

    def note(message):
        measured.setdefault(message.global_step, {})[message.kind, message.module] = message.data.norm().item()

    kinds = ("weight_gradients", "weight_updates")
    of_forward = NormSubscriber(
        "activations", subsample=every
    )  # nothing is known of the spike before the forward has ended
    metrics = [of_forward, *(CallbackSubscriber(kind, note, subsample=every) for kind in kinds)]
    with ikkuna.watch(
        model, *metrics, *([loss] if with_module else []), rules=["loss_spike"], log_dir=tmp_path, verbosity=0
    ) as watched:
        for step in range(at + 3):
            x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
            optimizer.zero_grad()
            model[3].factor = 300.0 if step == at else 1.0
            value = loss(model(x), y)
            value.backward()
            losses.append(value.item())
            gradient, before = model[0].weight.grad.norm().item(), model[0].weight.detach().clone()
            optimizer.step()
            if step == at:
                update = (model[0].weight.detach() - before).norm().item()
                expected = {("weight_gradients", "0"): gradient, ("weight_updates", "0"): update}
            assert watched._session.context.tracker.counters.next.global_step == step + 1 if step == at else True
    [finding] = watched.findings
    assert (finding.rule, finding.step, finding.value) == ("loss_spike", at, losses[at])
    assert (at, losses[at]) in finding.evidence
    assert [(found.step, found.value) for found in check(tmp_path / "run0001", "loss_spike")] == [(at, losses[at])]
    curve = watched._attachment.rules.judge.history.curve("loss")
    assert [step for step in curve.steps if step != at] == [
        step for step in range(at + 3) if step % 2 == 0 and step != at
    ]
    assert {key: measured[at][key] for key in expected} == pytest.approx(expected, rel=1e-5)
    others = set(measured) - {at} - set(range(0, at + 3, every))
    assert all(step > at for step in others)  # of the steps after a finding, which are recorded in full
