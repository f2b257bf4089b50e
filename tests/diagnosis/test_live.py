"""Rules while a model trains: what they do, what they cost, and that they change nothing."""

import copy
import logging
from itertools import pairwise

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ikkuna
from ikkuna.backends import backend
from ikkuna.diagnosis import Rule, Score
from ikkuna.errors import ConfigError, ConfigTypeError, StopTraining
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, Stamp
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.metrics.subscriber.base import METHODS
from ikkuna.observation.rows.plan import Demand
from ikkuna.testing import RecordingBackend, small_model


class FromStepRule(Rule):
    """The step is 3 or later."""

    name, needs, meaning, patience, severity = "from_step", {"loss": "LossSubscriber()"}, "Step {figure:g}.", 1, "error"

    def scores(self, history):
        yield Score(float(history.step >= 3), history.step)


class RaisingRule(FromStepRule):
    name = "raising"

    def scores(self, history):
        raise RuntimeError("broken")


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (16,), generator=torch.Generator().manual_seed(2))


def train(model, loss, steps=6, parameters=None, clears=True):
    optimizer = torch.optim.Adam(parameters or model.parameters(), 1e-2)
    for _ in range(steps):
        if clears:
            optimizer.zero_grad()
        loss(model(X), Y).backward()
        optimizer.step()


def exporter_with(bus, model, rules, **options):
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    loss = nn.CrossEntropyLoss()
    exporter.set_loss(loss)
    exporter.apply_rules(rules, **{"backend": "null", "loss_every": 1, **options})
    return exporter, loss


def test_a_finding_is_logged_once_shown_as_a_text_and_passed_on(bus, caplog):
    backend, seen = RecordingBackend(), []
    model = small_model()
    exporter, loss = exporter_with(bus, model, FromStepRule(), backend=backend, on_finding=seen.append)
    with caplog.at_level(logging.WARNING, "ikkuna"):
        train(model, loss)
    exporter.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["error: from_step at step 3: Step 3."]
    texts = [(title, step) for title, _, step in backend.texts if "findings" in title]
    assert texts == [("findings/from_step", 3), ("findings", 3)]
    assert not backend.values  # findings are no values, and what only rules read is not shown
    assert [finding.step for finding in seen] == [3]
    assert [finding.rule for finding in exporter.findings] == ["from_step"]


def test_tensorboard_shows_a_table_of_all_findings_and_no_values_of_rules(tmp_path):
    model, loss = small_model(), nn.CrossEntropyLoss()
    rules = [FromStepRule(), "not_in_optimizer", "vanishing_gradient"]
    with ikkuna.watch(model, loss=loss, log_dir=tmp_path, rules=rules):
        train(model, loss, steps=11, parameters=list(model.first.parameters()))
    accumulator = EventAccumulator(str(tmp_path / "run0001"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    heads = {tag.partition("/")[0] for tag in accumulator.Tags()["scalars"]}
    assert not heads & {"Rules", "findings", "unowned_parameters"}
    assert "Network" in heads
    tables = accumulator.Tensors("Text/findings")
    assert [event.step for event in tables] == [4, 10]
    table = tables[-1].tensor_proto.string_val[0].decode()
    assert "| warning | not_in_optimizer | `last`, `last.bias` | 0 | No optimizer owns" in table
    assert "| error | from_step |  | 4 | Step 4." in table


def test_a_chosen_rule_whose_kind_nothing_publishes_is_logged(bus, caplog):
    class UnfedRule(Rule):
        """Reads what nothing publishes."""

        name, needs, meaning = "unfed", {"unknown_kind": "SomeSubscriber()"}, "It is {figure}."

        def scores(self, history):
            return ()

    exporter, _ = exporter_with(bus, small_model(), ["default", UnfedRule()])
    exporter.close()
    line = "the rule 'unfed' cannot judge, because this is not measured: unknown_kind from SomeSubscriber()"
    assert [record.getMessage() for record in caplog.records] == [line]


@pytest.mark.parametrize(("every", "loss_every", "steps"), [(10, None, 2), (5, None, 1), (10, 5, 5), (1, None, 1)])
def test_the_loss_is_sampled_every_second_step_if_modules_are_sampled_at_even_steps(bus, every, loss_every, steps):
    exporter, loss = exporter_with(bus, small_model(), "loss_spike", every=every, loss_every=loss_every)
    with exporter:
        train(exporter.model, loss, steps=11)
        curve = exporter._attachment.rules.judge.history.curve("loss")
    assert list(curve.steps) == list(range(0, 11, steps))


def test_a_callback_that_raises_does_not_reach_training(bus, caplog):
    def fail(finding):
        raise RuntimeError("no mail")

    model = small_model()
    exporter, loss = exporter_with(bus, model, FromStepRule(), on_finding=fail)
    train(model, loss)
    exporter.close()
    assert "on_finding failed" in caplog.text
    assert exporter.health().errors == 1


def test_training_stops_at_the_end_of_the_step_only_if_asked(bus):
    model = small_model()
    exporter, loss = exporter_with(bus, model, FromStepRule(), stop="warning")
    with pytest.raises(StopTraining, match="from_step at step 3"):
        train(model, loss)
    assert exporter.health().steps == 4
    train(model, loss, steps=2)  # a finding stops the training once
    exporter.close()
    assert exporter.health().steps == 6
    assert exporter.health().errors == 0


def test_a_finding_below_the_severity_that_stops_does_not_stop(bus):
    model = small_model()
    exporter, loss = exporter_with(bus, model, FromStepRule(severity="info"), stop="warning")
    train(model, loss)
    exporter.close()
    assert len(exporter.findings) == 1


def test_a_rule_that_raises_does_not_reach_training(bus):
    model = small_model()
    exporter, loss = exporter_with(bus, model, [RaisingRule(), FromStepRule()])
    train(model, loss, steps=12)
    exporter.close()
    assert exporter.health().steps == 12
    assert [finding.rule for finding in exporter.findings] == ["from_step"]
    assert "RuntimeError: broken" in exporter.findings.skipped["raising"]


def test_training_is_bit_identical_with_all_rules(bus):
    observed, plain = small_model(), small_model()
    exporter, loss = exporter_with(bus, observed, "all", every=1)
    torch.manual_seed(5)
    train(observed, loss, steps=8)
    state = torch.get_rng_state()
    exporter.close()
    torch.manual_seed(5)
    train(plain, nn.CrossEntropyLoss(), steps=8)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(observed.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stop": "fatal"}, ConfigError),
        ({"on_finding": "mail"}, ConfigTypeError),
        ({"every": 0}, ConfigError),
        ({"later": 5}, ConfigError),
        ({"later": 25}, ConfigError),
    ],
)
def test_wrong_options_leave_the_bus_unchanged(bus, options, error):
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(small_model())
        with pytest.raises(error):
            exporter.apply_rules(**options)
        assert bus.registered == ()


def test_rules_are_applied_once(bus):
    exporter, _ = exporter_with(bus, small_model(), FromStepRule())
    with pytest.raises(ConfigError, match="already"):
        exporter.apply_rules()
    exporter.close()


def detached(model):
    model.first.register_forward_hook(lambda module, args, out: out.detach())
    return torch.optim.SGD(model.parameters(), 0.1)


def without_rate(model):
    return torch.optim.SGD([{"params": model.last.parameters()}, {"params": model.first.parameters(), "lr": 0.0}], 0.1)


@pytest.mark.parametrize(("plant", "rule"), [(detached, "no_gradient"), (without_rate, "never_moves")])
def test_a_mistake_that_shows_at_the_first_step_is_named_there(bus, plant, rule):
    seen, model = [], small_model()
    optimizer = plant(model)
    exporter, loss = exporter_with(bus, model, "default", on_finding=lambda f: seen.append((f.rule, f.module, f.step)))
    for _ in range(2):  # the values of a step are judged at the next boundary at the latest
        optimizer.zero_grad()
        loss(model(X), Y).backward()
        optimizer.step()
    assert (rule, "first", 0) in seen
    exporter.close()


def test_a_warmup_from_zero_has_no_finding(bus):
    model = small_model()
    optimizer = torch.optim.SGD([{"params": model.last.parameters()}, {"params": model.first.parameters()}], 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 5, 1))
    exporter, loss = exporter_with(bus, model, ["never_moves", "no_gradient"])
    for _ in range(12):
        optimizer.zero_grad()
        loss(model(X), Y).backward()
        optimizer.step()
        schedule.step()
    exporter.close()
    assert exporter.findings.judged == ("never_moves", "no_gradient")
    assert not exporter.findings


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x)
        return self.a(h), self.b(h)


def test_heads_whose_losses_take_turns_have_no_finding(bus):
    model = TwoHeads()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    exporter.apply_rules(["no_gradient"], backend="null", every=5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X)[step % 2], Y).backward()
        optimizer.step()
    exporter.close()
    assert exporter.findings.judged == ("no_gradient",)
    assert not exporter.findings


def test_without_a_loss_the_rules_that_need_it_name_it(bus):
    model = small_model()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.apply_rules(backend="null", every=1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(30):
            optimizer.zero_grad()
            model(X).backward(torch.ones(len(X), 3))
            optimizer.step()
    findings = exporter.findings
    assert "loss_spike" in findings.skipped
    assert "weight_decay" in exporter.findings.judged


def test_the_labels_of_a_functional_loss_are_judged(bus):
    model = small_model()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.apply_rules(backend="null", every=1)
        seen = []
        bus.register_subscriber(CallbackSubscriber("output_cross_entropy", lambda message: seen.append(message.data)))
        train(model, nn.CrossEntropyLoss())
    assert len(seen) > 3
    assert not {"loss_spike", "no_learning", "one_label"} & set(exporter.findings.needed)


def test_without_labels_of_classes_there_is_nothing_to_judge_and_nothing_to_register(bus):
    model = small_model()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    exporter.set_loss(loss := nn.MSELoss())
    exporter.apply_rules(backend="null")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(X), torch.zeros(16, 3)).backward()
        optimizer.step()
    exporter.close()
    assert exporter.findings.skipped["no_learning"].startswith("the training has nothing that they judge")
    assert "no_learning" not in exporter.findings.needed


def test_watch_applies_the_rules_by_default_and_can_be_told_not_to(tmp_path):
    found = {}
    for rules in ("default", None):
        model, loss = small_model(), nn.CrossEntropyLoss()
        with ikkuna.watch(model, loss=loss, log_dir=tmp_path, rules=rules) as exporter:
            train(model, loss, steps=31, parameters=list(model.first.parameters()), clears=False)
        found[rules] = {finding.rule: finding.module for finding in exporter.findings}
    assert found["default"] == {"not_in_optimizer": "last", "not_zeroed": None, "repeated_batch": None}
    assert found[None] == {}


def test_two_optimizers_that_step_in_turn_leave_no_parameter_without_optimizer(bus):
    model = small_model()
    exporter, loss = exporter_with(bus, model, "not_in_optimizer", every=2)
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.first, model.last)]
    for step in range(12):
        model.zero_grad()
        loss(model(X), Y).backward()
        optimizers[step % 2].step()
    exporter.close()
    assert not exporter.findings


@pytest.mark.parametrize(("added_at", "severity", "ended"), [(13, "warning", 30), (None, "error", None)])
def test_a_layer_without_optimizer_is_an_error_only_while_it_has_none(bus, tmp_path, added_at, severity, ended):
    """The loss is known not to fall at step 18, and which optimizer owns what at each tenth step."""
    model, loss = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), nn.CrossEntropyLoss()
    optimizer, generator = torch.optim.SGD(model[0].parameters(), 0.1), torch.Generator().manual_seed(0)
    monitor = ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0)
    for step in range(60):
        if step == added_at:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        optimizer.zero_grad()
        x, y = torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)
        loss(model(x), y).backward()
        optimizer.step()
    monitor.close()
    [found] = [each for each in monitor.findings if each.rule == "not_in_optimizer"]
    assert (found.severity, found.ended) == (severity, ended)


def test_what_only_rules_need_is_measured_less_often_after_thirty_samples_and_not_shown(bus):
    backend, model = RecordingBackend(), small_model()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    bus.register_subscriber(NormSubscriber("weights", subsample=2, backend=backend))
    exporter.apply_rules(["weight_decay", "vanishing_gradient"], backend=backend, every=2, later=6)
    train(model, nn.CrossEntropyLoss(), steps=80)
    history = exporter._attachment.rules.judge.history
    exporter.close()
    assert {series.kind for series, _, _ in backend.values} == {"weights_norm2"}
    assert [s for series, _, s in backend.values if series.name == "last"] == list(range(0, 80, 2))
    read = history.curves("weight_gradients_norm2")["last"]
    assert list(read.steps) == [*range(0, 60, 2), 60, 66, 72, 78]


def test_an_observed_model_with_rules_can_be_copied(bus):
    model = small_model()
    exporter, _ = exporter_with(bus, model, "default")
    copy.deepcopy(model)
    exporter.close()


def test_without_a_backend_that_writes_files_the_rules_write_none(tmp_path):
    model, backend = small_model(), RecordingBackend()
    with ikkuna.watch(model, NormSubscriber("weights", backend=backend), log_dir=tmp_path / "runs"):
        train(model, nn.CrossEntropyLoss(), steps=1)
    assert {series.kind for series, _, _ in backend.values} == {"weights_norm2"}
    assert not (tmp_path / "runs").exists()


def test_a_parameter_in_no_optimizer_is_named_once_from_the_first_step_on(tmp_path, caplog):
    model = small_model()
    with ikkuna.watch(model, log_dir=tmp_path) as exporter:
        train(model, nn.CrossEntropyLoss(), steps=31, parameters=list(model.first.parameters()))
    named = [record.getMessage() for record in caplog.records if "optimizer" in record.getMessage()]
    named = [text for text in named if ": not_in_optimizer" in text and "dumps" not in text]
    assert len(named) == 1  # a warning, because the loss falls
    assert named[0].startswith("warning: not_in_optimizer in last (Linear) at step 0: No optimizer owns this parameter")
    assert exporter.findings[0].modules == ("last", "last.bias")


def test_without_the_rule_the_log_names_a_parameter_in_no_optimizer(tmp_path, caplog):
    model = small_model()
    with ikkuna.watch(model, log_dir=tmp_path, rules=["loss_spike"]):
        train(model, nn.CrossEntropyLoss(), steps=3, parameters=list(model.first.parameters()))
    assert [
        record.getMessage().partition(":")[0] for record in caplog.records if "optimizer" in record.getMessage()
    ] == ["no optimizer has these parameters, which get gradients"]


def test_a_step_that_no_rule_samples_reads_no_parameter(bus):
    """The result ``weight_state_step_mean`` is no state of an optimizer, although its name begins like one."""
    exporter, _ = exporter_with(bus, small_model(), "default", every=10)
    with exporter:
        sampled, other = (Demand(bus).of(Stamp(step, step, 1)) for step in (10, 11))
    assert sampled.parameters
    assert sampled.states
    assert not other.parameters
    assert not other.forward


def test_no_samples_of_the_rules_are_further_apart_than_asked_for(bus):
    """A rule that needs several samples in a row is late by a multiple of the distance between two of them."""
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    exporter, _ = exporter_with(bus, model, "default", every=10, later=40)
    with exporter:
        serving = [registered for registered in bus.registered if not registered.subscriber.backends]
        assert {"DeadUnitsSubscriber", "DimensionSubscriber"} <= {type(r.subscriber).__name__ for r in serving}
        for registered in serving:
            steps = [step for step in range(300, 800) if registered.samples(Stamp(step, step, 1))]
            assert {b - a for a, b in pairwise(steps)} == {40}, registered.label


def test_batches_and_single_messages_give_the_same_history(bus, monkeypatch):
    def history():
        torch.manual_seed(0)
        model = small_model()
        exporter, loss = exporter_with(MessageBus("history"), model, "default", every=2)
        with exporter:
            train(model, loss, steps=9)
            found = exporter._attachment.rules.judge.history.all_curves()
            return {
                key: (list(c.steps), [str(v) for v in c.values]) for *key_parts, c in found if (key := tuple(key_parts))
            }

    in_batches = history()

    def last_defined(cls, *methods):
        return "compute_step" if backend.last_defined(cls, *METHODS) == "compute_step" else "compute"

    monkeypatch.setattr("ikkuna.metrics.subscriber.registered.last_defined", last_defined)
    one_by_one = history()
    assert len(in_batches) > 20
    assert in_batches == one_by_one


def test_a_model_without_modules_of_a_known_class_is_judged_by_the_rules_that_need_none(bus, caplog):
    """No rectifier, no linear layer, no normalisation: the parameters belong to a module of the user."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(0.1 * torch.randn(4, 3))

        def forward(self, x):
            return (x @ self.matrix).tanh()

    exporter, loss = exporter_with(bus, model := Own(), "default", every=1)
    with exporter:
        train(model, loss, steps=8)
    assert {"not_in_optimizer", "loss_at_init", "never_moves"} <= set(exporter.findings.judged)
    assert {"dead_units", "rank_collapse", "running_statistics"} <= set(exporter.findings.skipped)
    assert [finding.rule for finding in exporter.findings] == ["repeated_batch"]  # which it is
    assert len(caplog.records) == 1


@pytest.mark.parametrize("has_closure", [False, True])
def test_an_optimizer_that_evaluates_the_model_may_move_it_far_in_a_step(bus, has_closure):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(parameters, 1.0) if has_closure else torch.optim.SGD(parameters, 50.0)
    exporter, loss = exporter_with(bus, model, "lr_too_high")

    def closure():
        optimizer.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        return value

    with exporter:
        before = model[0].weight.detach().clone()
        for _ in range(11):
            if not has_closure:
                closure()
            optimizer.step(*([closure] if has_closure else []))
        assert (model[0].weight - before).norm() > 0.3 * before.norm()
    assert [finding.rule for finding in exporter.findings] == ([] if has_closure else ["lr_too_high"])


def test_facts_of_two_optimizers_in_turn_are_those_of_the_sampled_steps(tmp_path):
    torch.manual_seed(0)
    model, critic, x = nn.Linear(3, 4), nn.Linear(4, 1), torch.randn(8, 3)
    of_model, of_critic = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    with ikkuna.watch(model, rules=["step_without_gradients"], log_dir=tmp_path, verbosity=0) as exporter:
        for _ in range(40):
            for optimizer in (of_critic, of_model):
                optimizer.zero_grad()
                outputs = model(x)
                critic(outputs.detach() if optimizer is of_critic else outputs).square().mean().backward()
                optimizer.step()
    facts = exporter._attachment.rules.judge.history.curve("gradients_at_step")
    assert list(facts.steps) == list(range(0, 80, 10))
    assert set(facts.values) == {0.0}
    assert [finding.rule for finding in exporter.findings] == ["step_without_gradients"]


class FailingRule(Rule):
    """It fails."""

    name, needs, thresholds, meaning, patience = "failing", {"loss": "LossSubscriber()"}, ("limit",), "{figure}", 1
    limit = 1.0

    def scores(self, history):
        raise ZeroDivisionError("no number")


class SureRule(FailingRule):
    """It always finds something."""

    name = "sure"

    def scores(self, history):
        yield Score(2.0, 2.0)


def test_the_health_counts_errors_of_rules_and_of_the_function_for_findings(tmp_path):
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    rules = [FailingRule(), SureRule()]
    options = {"rules": rules, "every": 1, "on_finding": lambda finding: 1 / 0, "backend": "null", "verbosity": 0}
    with ikkuna.watch(model, loss, log_dir=tmp_path, **options) as handle:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(150):
            optimizer.zero_grad()
            loss(model(torch.ones(1, 3)), torch.ones(1, 2)).backward()
            optimizer.step()
    assert handle.health().disabled == ("failing",)
    assert handle.health().errors == 11
