"""Replay of a dumped step: the same values and findings, in this and in a fresh process, and bad input."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.cli import main
from ikkuna.diagnosis import RecorderOptions, Rule, Score, get_rules, read_dump
from ikkuna.errors import ConfigError, ConfigTypeError, DumpError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber, VarianceSubscriber

X = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0)
STEPS = 75
SPIKE = 60


def build():
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    return {"model": model, "loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.Adam(model.parameters(), 1e-2)}


def train(log_dir, accumulate=1, clip=None, state_every=1, rules="loss_spike", **options):
    """Train with dropout, batch norm and a scheduler, with one step that is far too long; return the dumps."""
    model, loss, optimizer = build().values()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    exporter = Exporter(message_bus=MessageBus("replayed"), log_dir=log_dir, on_error="raise")
    exporter.add_modules(model)
    exporter.set_loss(loss)
    for kind in ("weights", "layer_gradients", "weight_updates"):
        exporter.message_bus.register_subscriber(NormSubscriber(kind, backend="null"))
    exporter.message_bus.register_subscriber(VarianceSubscriber("activations", backend="null"))
    exporter.apply_rules(rules, every=5, backend="null")
    exporter.record_steps(RecorderOptions(every=5, burst=0, state_every=state_every, **options))
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            rows = torch.randint(0, 256, (32,))
            labels = Y[rows]
            loss(model(X[rows]), labels).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] *= 300 if step == SPIKE - 1 else 1
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] /= 300 if step == SPIKE - 1 else 1
        scheduler.step()
    exporter.close()
    return [read_dump(path) for path in exporter.dumps]


def of_a_finding(dumps):
    [dump] = [dump for dump in dumps if dump.findings]
    return dump


@pytest.mark.parametrize(("state_every", "accumulate"), [(1, 1), (7, 2), (10, 1)])
def test_a_replay_measures_the_same_bits_and_finds_the_same(tmp_path, state_every, accumulate):
    dump = of_a_finding(train(tmp_path, accumulate, state_every=state_every))
    assert [finding.rule for finding in dump.findings] == ["loss_spike"]
    torch.manual_seed(99)
    result = ikkuna.replay(dump.path, **build())
    assert result.first_step == {1: 60, 7: 56, 10: 60}[state_every]
    assert result.compared > 50
    assert result.equal == result.compared
    assert result.loss[0] == result.loss[1]
    assert [(f.rule, f.module, f.value) for f in result.findings] == [
        (f.rule, f.module, f.value) for f in dump.findings
    ]
    assert result.is_reproduced


def test_a_spike_between_two_samples_is_replayed_with_the_same_random_numbers(tmp_path):
    model, loss, optimizer = build().values()
    metrics = (
        NormSubscriber("weight_gradients", subsample=10, backend="null"),
        VarianceSubscriber("activations", subsample=10, backend="null"),
    )
    options = RecorderOptions(burst=0, state_every=10, every=10)
    with ikkuna.watch(
        *(model, *metrics),
        loss=loss,
        rules=["loss_spike"],
        log_dir=tmp_path,
        verbosity=0,
        preflight=False,
        recorder=options,
    ) as watched:
        for step in range(SPIKE + 10):
            optimizer.zero_grad()
            rows = torch.randint(0, 256, (32,))
            loss(model(X[rows]), Y[rows] if step != SPIKE + 7 else (Y[rows] + 1) % 3).backward()
            optimizer.step()
    [dump] = [each for each in map(read_dump, watched.dumps) if each.step == SPIKE + 7]
    result = ikkuna.replay(dump, **build())
    assert result.first_step == SPIKE
    assert result.compared > 2
    assert result.equal == result.compared
    assert result.loss[0] == result.loss[1]
    assert result.is_reproduced


def test_a_replay_of_another_batch_is_not_the_same(tmp_path):
    dump = of_a_finding(train(tmp_path, state_every=10))

    def other_labels(model_calls, loss_calls):
        made["optimizer"].zero_grad()
        [args, _], [[labels], _] = model_calls[0], loss_calls[0]
        made["loss"](made["model"](*args), (labels + 1) % 3).backward()
        made["optimizer"].step()

    made = build()
    result = ikkuna.replay(dump, **made, step=other_labels)
    assert not result.is_reproduced
    assert result.equal < result.compared
    assert "in the dump" in str(result)
    assert "missing: warning: loss_spike" in str(result)


def test_a_step_with_clipping_is_replayed_by_a_function_of_the_user(tmp_path):
    dump = of_a_finding(train(tmp_path, clip=0.1))
    made = build()

    def step(model_calls, loss_calls):
        model, loss, optimizer = made.values()
        optimizer.zero_grad()
        for (args, named), (labels, _) in zip(model_calls, loss_calls, strict=True):
            loss(model(*args, **named), *labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    result = ikkuna.replay(dump, **made, step=step)
    assert result.equal == result.compared
    assert result.is_reproduced
    assert ikkuna.replay(dump, **build()).equal < result.compared


SCRIPT = "from tests.diagnosis.test_replay import build\n"


def test_the_command_reproduces_the_finding_in_a_fresh_process(tmp_path):
    dump = of_a_finding(train(tmp_path))
    script = tmp_path / "my_training.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ikkuna", "replay", dump.path, "--script", f"{script}:build"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"reproduced: {dump.findings[0]}" in done.stdout
    assert f"step {dump.step}, replayed from step {dump.step}" in done.stdout


def test_the_command_shows_a_dump_and_says_what_is_wrong(tmp_path, capsys):
    dump = of_a_finding(train(tmp_path))
    assert main(["replay", str(dump.path)]) == 0
    assert "state.pt" in capsys.readouterr().out
    (tmp_path / "other.py").write_text("def build():\n    from torch import nn\n    return nn.Linear(2, 2)\n")
    (tmp_path / "fails.py").write_text("def build():\n    return {}['lr']\n")
    for argument, message in {
        "nothing": "needs module:function or script.py:function",
        f"{tmp_path}/none.py:build": "there is no script",
        f"{tmp_path}/other.py:make": "has no function 'make'",
        f"{tmp_path}/other.py:build": "is of another model: among the parameters it lacks '0.bias'",
        f"{tmp_path}/fails.py:build": f"ikkuna: KeyError: 'lr' (line 2 of {tmp_path}/fails.py)\n",
        "no_such_module:build": "cannot be imported",
    }.items():
        assert main(["replay", str(dump.path), "--script", argument]) == 2
        assert message in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert main(["replay", str(dump.path.parents[1]), "--step", "3"]) == 2
    assert "has no dump of step 3; there are dumps of the steps" in capsys.readouterr().err
    (tmp_path / "ends.py").write_text("import sys\ndef build():\n    sys.exit(3)\n")
    backup = dump.path.with_name("step_backup")
    shutil.copytree(dump.path, backup)
    assert main(["replay", str(dump.path.parents[1]), "--step", str(dump.step)]) == 0
    capsys.readouterr()
    build = ["--script", f"{tmp_path}/other.py:build"]
    for arguments, message in {
        ("--rows",): "--rows needs --script",
        ("--verdict",): "--verdict needs --script",
        ("--operations", "o.json"): "--operations needs --script",
        (*build, "--skip", "s.txt"): "--skip needs --rows or --verdict",
        (*build, "--keep", "0"): "--keep needs --operations",
        ("--step", "3"): f"'{dump.path}' is the dump of step {dump.step}, not of step 3",
        ("--script", f"{tmp_path}/ends.py:build"): f"SystemExit: 3 (line 3 of {tmp_path}/ends.py)",
    }.items():
        assert main(["replay", str(dump.path), *arguments]) == 2
        assert capsys.readouterr().err == f"ikkuna: {message}\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear(6, 3)}, "is of another model: among the parameters it lacks"),
        ({"model": nn.Sequential(nn.Linear(6, 3))}, "is of another model: among the parameters it lacks"),
        ({"optimizer": ()}, "has the states of 1 optimizers, got 0"),
    ],
)
def test_a_dump_of_another_model_is_refused_and_nothing_is_changed(tmp_path, change, message):
    dump = of_a_finding(train(tmp_path))
    made = build() | change
    before = [p.clone() for p in made["model"].parameters()]
    with pytest.raises(DumpError, match=message):
        ikkuna.replay(dump, **made)
    assert all(map(torch.equal, before, made["model"].parameters()))


def test_a_wider_layer_and_another_dtype_are_refused(tmp_path):
    dump = of_a_finding(train(tmp_path))
    for made in (build(), build()):
        made["model"][4] = nn.Linear(32, 4)
        with pytest.raises(DumpError, match=r"4.weight is \(3, 32\) float32 there, and \(4, 32\) float32 here"):
            ikkuna.replay(dump, **made)
    with pytest.raises(ConfigTypeError, match=r"must be a torch.nn.Module"):
        ikkuna.replay(dump, model=build)


def test_an_optimizer_of_another_class_is_refused(tmp_path):
    dump = train(tmp_path)[0]
    parts = build()
    parts["optimizer"] = torch.optim.SGD(parts["model"].parameters(), 1e-2)
    with pytest.raises(DumpError, match="the optimizer of the dump is of the class Adam, got SGD"):
        ikkuna.replay(dump, **parts)


def frozen_dump(log_dir, **options):
    """Train a model whose first layer is frozen until the loop unfreezes it; return the dump of the last step."""
    model, loss, optimizer = frozen().values()
    monitor = ikkuna.watch(model, loss=loss, log_dir=log_dir, recorder=RecorderOptions(**options), verbosity=0)
    for step in range(20):
        model[0].requires_grad_(step > 5)
        optimizer.zero_grad()
        loss(model(X[step : step + 32]), Y[step : step + 32]).backward()
        optimizer.step()
    path = monitor.dump()
    monitor.close()
    return path


def frozen():
    parts = build()
    parts["model"][0].requires_grad_(False)
    return parts


def test_a_layer_that_the_loop_has_unfrozen_is_trained_in_the_replay(tmp_path):
    path = frozen_dump(tmp_path, state_every=3)
    parts = frozen()
    assert ikkuna.replay(path, **parts).is_reproduced
    assert all(parameter.requires_grad for parameter in parts["model"].parameters())


def test_a_dump_without_frozen_parameters_and_classes_is_still_read(tmp_path, monkeypatch):
    dump = train(tmp_path)[0]
    read = dump.tensors

    def older(name):
        found = read(name)
        if name == "state.pt":
            del found["frozen"]
            [optimizer] = found["optimizers"]
            del optimizer["class"]
        return found

    monkeypatch.setattr(dump, "tensors", older)
    assert ikkuna.replay(dump, **build()).is_reproduced


def test_a_dump_without_the_state_says_how_to_record_it(tmp_path):
    dump = of_a_finding(train(tmp_path, state_every=0))
    with pytest.raises(
        DumpError, match=r"no state and batches to replay: RecorderOptions\(state_every=10\) records them"
    ):
        ikkuna.replay(dump, **build())


def test_the_batches_of_the_last_steps_are_recorded_without_the_state(tmp_path):
    dump = of_a_finding(train(tmp_path, state_every=0))
    batches = dump.tensors("batches.pt")
    assert [batch["step"] for batch in batches] == [dump.step - 1, dump.step]
    [[args, named]] = batches[-1]["model_calls"]
    assert args[0].shape == (32, 6)
    assert named == {}


class UninstalledRule(Rule):
    """The step is 30 or later."""

    name, needs, meaning, patience = "uninstalled", {"loss": "LossSubscriber()"}, "Step {figure:g}.", 1

    def scores(self, history):
        yield Score(float(history.step >= 30), history.step)


def test_a_rule_that_is_not_installed_is_passed_again(tmp_path):
    dump = of_a_finding(train(tmp_path, rules=UninstalledRule()))
    with pytest.raises(DumpError, match="the rule 'uninstalled' is not installed; pass it in rules="):
        ikkuna.replay(dump, **build())
    assert ikkuna.replay(dump, **build(), rules=[UninstalledRule()]).is_reproduced


def test_the_thresholds_of_the_training_are_used(tmp_path):
    [rule] = get_rules("loss_spike")
    rule.deviations = 9.0
    dump = of_a_finding(train(tmp_path, rules=rule))
    assert dump.facts["rules"][0]["deviations"] == 9.0
    assert ikkuna.replay(dump, **build()).is_reproduced


def test_a_function_that_returns_unknown_names_is_refused(tmp_path):
    from ikkuna.cli.commands.replay import arguments_of_script

    (tmp_path / "named.py").write_text("def build():\n    return {'network': 1}\ndef nothing():\n    return {}\n")
    with pytest.raises(ConfigError, match="returns 'network'; known are model"):
        arguments_of_script(f"{tmp_path}/named.py:build")
    with pytest.raises(ConfigError, match="returns no model"):
        arguments_of_script(f"{tmp_path}/named.py:nothing")
