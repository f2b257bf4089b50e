"""The metric counts correctly and passes the checks of the test kit."""

import torch
from ikkuna_near_zero.mostly_zero import MostlyZeroRule
from ikkuna_near_zero.near_zero import NearZeroSubscriber

from ikkuna.diagnosis import Judge
from ikkuna.testing import Value, check_subscriber, run


def test_the_contract_of_subscribers():
    check_subscriber(lambda **options: NearZeroSubscriber("activations", **options))


def test_elements_near_zero_are_counted():
    model = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 1e-4], [-1e-4, 1.0]]))
    batch = torch.ones(1, 2), torch.tensor([0])
    values = run(NearZeroSubscriber("weights"), model=model, batch=batch, steps=1)
    assert values == [Value("weights_near_zero", "linear", step=0, value=0.75)]


def test_eps_is_the_limit():
    assert all(value == 1.0 for *_, value in run(NearZeroSubscriber("weights", eps=100.0)))
    assert all(value == 0.0 for *_, value in run(NearZeroSubscriber("weights", eps=0.0)))


def findings(shares):
    judge = Judge([MostlyZeroRule()])
    for step, share in enumerate(shares):
        judge.add("weights_near_zero", "fc", step, share)
        judge.finish_step(step)
    return [(finding.rule, finding.module, finding.step) for finding in judge.findings]


def test_the_rule_names_a_weight_that_is_mostly_zero():
    assert findings([0.2, 0.95, 0.97, 0.99]) == [("mostly_zero", "fc", 1)]
    assert findings([0.95, 0.97, 0.5, 0.5]) == []
