"""Ranked rows and verdicts: exact references, planted causes, the commands of the tutorial, and bad input."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.cli import main
from ikkuna.diagnosis import RecorderOptions, read_dump
from ikkuna.errors import ConfigTypeError, DumpError
from ikkuna.export.row_ranking import find_rows, rank_rows
from ikkuna.export.verdict import verdict
from tests.diagnosis.test_batches import Loop, X, Y
from tests.documentation.test_blocks import SITE, blocks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import spikes  # the same trainings as in the benchmark


def dump_of(loop, *micro_batches, **options):
    loop.run(3).step(*micro_batches, **options)
    return loop.dump()


class Scaled(nn.Module):
    """A model that torch.func cannot vectorise, because its code depends on values."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, x):
        return self.inner(x) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("model", [lambda: nn.Linear(6, 1), Scaled])
@pytest.mark.parametrize("by_step", [False, True])
def test_losses_and_gradients_of_rows_are_those_of_batches_of_one(tmp_path, model, by_step):
    dump = dump_of(
        Loop(tmp_path, model=model(), state_every=1), (X[:8].clone(), Y[:8].clone()), (X[8:12].clone(), Y[8:12].clone())
    )
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), 0.05)

    loss = nn.MSELoss()

    def with_loss(model_calls, loss_calls):
        for (args, kwargs), (labels, _) in zip(model_calls, loss_calls, strict=True):
            loss(made(*args, **kwargs), *labels).backward()
        optimizer.step()

    ranking = rank_rows(dump, made, loss, optimizer, step=with_loss if by_step else None)
    assert len(ranking.rows) == 12
    state = dump.tensors("state.pt")["parameters"]
    weight, bias = (
        next(value.double() for name, value in state.items() if name.endswith(end)) for end in ("weight", "bias")
    )
    for row in ranking.rows:
        x, y = X[8 * row.part + row.number].double(), Y[8 * row.part + row.number].double()
        error = float(weight[0] @ x + bias[0] - y)
        assert row.loss == pytest.approx(error**2, rel=1e-4, abs=1e-9)
        assert row.gradient_norm == pytest.approx(2 * abs(error) * float((x @ x + 1) ** 0.5), rel=1e-4, abs=1e-6)
    assert sum(row.loss_share for row in ranking.rows) == pytest.approx(1)
    shares = [max(row.loss_share, row.gradient_share) for row in ranking.rows]
    assert shares == sorted(shares, reverse=True)
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), state.values(), strict=True))


@pytest.mark.parametrize("number", range(10))
def test_a_planted_row_is_first_and_its_batch_is_in_the_dump(number):
    result = spikes.row_case(number)
    assert result["batch"]
    if result["deviations"] > 10:
        assert result["place"] == 0
        assert result["out"]


@pytest.mark.parametrize(("number", "cause"), [(0, "row"), (1, "state"), (6, "state"), (8, "device"), (16, "state")])
def test_a_planted_cause_is_named(number, cause):
    result = spikes.cause_case(number)
    assert (result["cause"], result["verdict"], result["certain"]) == (cause, cause, True)


def test_rows_are_found_in_a_data_set_and_iterators_are_refused(tmp_path):
    rows = torch.tensor([200, 7, 7, 31])
    x = X[rows]
    x[3] += 1  # an augmentation
    dump = dump_of(Loop(tmp_path), (x, Y[rows]))
    assert find_rows(dump, torch.utils.data.TensorDataset(X, Y)) == {0: [200], 1: [7], 2: [7]}
    with pytest.raises(ConfigTypeError, match="a data set with a length and items is needed, got list_iterator"):
        find_rows(dump, iter([X]))


def test_rows_of_a_step_that_was_only_counted_are_not_searched_for(tmp_path, capsys, monkeypatch):
    model, loss = nn.Linear(6, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with ikkuna.watch(model, loss, log_dir=tmp_path, verbosity=0, preflight=False) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            loss(model(X[:16]), Y[:16]).backward()
            optimizer.step()
        dump = read_dump(monitor.dump("asked for"))
    with pytest.raises(DumpError, match=f"has no batch with rows of step {dump.step}"):
        find_rows(dump, X)
    monkeypatch.setattr(sys.modules[__name__], "dataset", lambda: X, raising=False)
    assert main(["replay", str(dump.path), "--find", f"{__name__}:dataset"]) == 2
    assert capsys.readouterr().err.endswith(f"has no batch with rows of step {dump.step}\n")


def views(loss, outputs, labels):
    loss(*outputs).backward()


def both_ways(loss, outputs, labels):
    (loss(*outputs) + loss(*outputs[::-1])).backward()


def auxiliary(loss, outputs, labels):
    (loss(outputs[0], labels) + 0.5 * loss(0.5 * outputs[0], labels)).backward()


def dump_of_calls(log_dir, inputs, compute):
    """Return the dump of a step that calls the model with each of the inputs."""
    loop = Loop(log_dir, state_every=1).run(3)
    loop.optimizer.zero_grad()
    loop.exporter.rows(list("abcdefgh"))
    compute(loop.loss, [loop.model(x) for x in inputs], Y[:8].clone())
    loop.optimizer.step()
    return loop.dump()


@pytest.mark.parametrize(("compute", "calls"), [(views, 2), (both_ways, 2), (auxiliary, 1)])
def test_a_step_with_several_calls_gets_all_of_them_with_one_row(tmp_path, compute, calls):
    x = X[:8].clone()
    x[5] *= 300
    dump = dump_of_calls(tmp_path, [x * (1 + 0.1 * i) for i in range(calls)], compute)
    model, loss = nn.Linear(6, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(model_calls, loss_calls):
        outputs = [model(*args) for args, _ in model_calls]
        assert (len(outputs), {len(output) for output in outputs}) == (calls, {1})
        compute(loss, outputs, loss_calls[-1][0][0])

    ranking = rank_rows(dump, model, loss, optimizer, step=step)
    assert sorted(row.name for row in ranking.rows) == list("abcdefgh")
    assert [row.name for row in ranking.outliers] == ["f"]
    state = dump.tensors("state.pt")["parameters"]
    product = state["weight"] @ x[5]
    expected = 0.5 * (product + state["bias"]) - Y[5] if compute is auxiliary else 0.1 * product
    assert ranking.rows[0].loss == pytest.approx(float(expected) ** 2, rel=1e-3)


def test_the_verdict_of_a_step_with_several_calls_names_the_row(tmp_path):
    def build():
        torch.manual_seed(0)
        model, loss = nn.Linear(6, 4), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), 0.001)

        def step(model_calls, loss_calls):
            optimizer.zero_grad()
            loss(*(model(*args) for args, _ in model_calls)).backward()
            optimizer.step()

        return model, loss, optimizer, step

    model, loss, _, step = build()
    generator = torch.Generator().manual_seed(0)
    recorder = RecorderOptions(state_every=1, burst=0)
    monitor = ikkuna.watch(model, loss=loss, log_dir=tmp_path, recorder=recorder, verbosity=0)
    for number in range(60):
        x = torch.randn(16, 6, generator=generator)
        x[5] *= 1000 if number == 50 else 1
        step([((x,), {}), ((1.1 * x,), {})], [])
    monitor.close()
    [dump] = [found for found in map(read_dump, monitor.dumps) if found.step == 50]
    *parts, again = build()
    found = verdict(dump, *parts, step=again)
    assert (found.cause, found.is_certain, [row.number for row in found.rows]) == ("row", True, [5])


def test_rows_that_cannot_run_are_one_error_that_names_step(tmp_path):
    model, loss = nn.Linear(6, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    dump = dump_of_calls(tmp_path / "calls", [X[:8].clone(), X[8:16].clone()], views)
    with pytest.raises(DumpError, match="the rows cannot run alone; pass step=: TypeError: cannot unpack"):
        rank_rows(dump, model, loss, optimizer)
    with pytest.raises(
        DumpError, match="step= cannot run with a batch of one row: ZeroDivisionError: division by zero"
    ):
        rank_rows(dump, model, loss, optimizer, step=lambda *calls: 1 / 0)
    other = dump_of_calls(tmp_path / "other", [X[:8].clone(), X[8:12].clone()], auxiliary)
    with pytest.raises(DumpError, match=r"a batch of one row: the calls of the model have \[8, 4\] rows"):
        rank_rows(other, model, loss, optimizer, step=lambda *calls: 1 / 0)


class PlainLoss(nn.Module):
    """A loss without an argument ``reduction``, so that no losses of rows are recorded."""

    def forward(self, output, labels):
        return (output - labels).square().mean()


@pytest.mark.parametrize("scale", [1000, torch.nan])
@pytest.mark.parametrize("loss", [nn.MSELoss(), PlainLoss()], ids=["stored", "computed"])
def test_without_a_state_rows_are_ranked_by_stored_losses_or_with_the_weights_of_the_script(tmp_path, loss, scale):
    x = X[:8].clone()
    x[6] *= scale
    dump = dump_of(Loop(tmp_path, loss=loss), (x, Y[:8].clone()), ids=[list("abcdefgh")])
    arrays = dump.arrays("batch_rows.npz")
    stored = dict(zip(arrays["ids"][-8:].tolist(), arrays["losses"][-8:].tolist(), strict=True))
    model = nn.Linear(6, 1)
    ranking = rank_rows(dump, model, loss)
    assert [row.name for row in ranking.outliers] == ["g"]
    assert ranking.rows[0].name == "g"
    is_stored = isinstance(loss, nn.MSELoss)
    of_rows = {row.name: row.loss for row in ranking.rows}
    assert (of_rows == pytest.approx(stored, nan_ok=True)) is is_stored
    assert ("the losses are those of the training" in str(ranking)) is is_stored
    assert ("the weights are those of the script" in str(ranking)) is not is_stored
    assert ("gradient " in str(ranking.rows[0])) is not is_stored
    with pytest.raises(DumpError, match="no state and batches to replay"):
        verdict(dump, model, nn.MSELoss())


def test_a_loss_that_is_nan_in_the_first_step_is_not_judged_without_evidence(tmp_path):
    loop = Loop(tmp_path, state_every=1)
    x = X[:8].clone()
    x[2, 0] = torch.nan
    loop.step((x, Y[:8].clone()))
    model, dump = nn.Linear(6, 1), loop.dump()
    found = verdict(dump, model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.05))
    assert (found.cause, found.is_certain) == ("row", False)
    assert [row.number for row in found.rows] == [2]
    assert "the dump has no state before the recorded one" in str(found)


def test_another_version_is_named_first_and_no_verdict_is_certain_then(tmp_path):
    loop = Loop(tmp_path, state_every=1).run(20)
    x = X[:8].clone()
    x[2] *= 500
    loop.step((x, Y[:8].clone()))
    path = loop.dump().path
    facts = json.loads((path / "dump.json").read_text())
    facts["versions"]["torch"] = "1.0"
    (path / "dump.json").write_text(json.dumps(facts))
    model = nn.Linear(6, 1)
    found = verdict(read_dump(path), model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.05))
    assert (found.cause, found.is_certain) == ("row", False)
    assert found.sentence.startswith("step 20: probably the batch made the loss jump: row 2")
    assert f"setting: torch is {torch.__version__} here, and was 1.0" in str(found)


def test_a_loss_that_does_not_jump_has_no_cause(tmp_path):
    loop = Loop(tmp_path, state_every=1).run(20)
    model = nn.Linear(6, 1)
    found = verdict(loop.dump(), model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.05))
    assert found.cause is None
    assert "so that it does not jump" in str(found)


def test_the_commands_of_the_tutorial_print_what_the_page_shows(tmp_path, monkeypatch, capsys):
    page = SITE / "why_did_it_spike.rst"
    (tmp_path / "train.py").write_text(blocks(page)[0][1])
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    exec(compile(blocks(page)[0][1], str(page), "exec"), names)
    assert [read_dump(path).step for path in names["monitor"].dumps] == [62]
    sessions = re.findall(r"^   \$ ikkuna (replay .*)\n((?:   .+\n)+)", page.read_text(), re.MULTILINE)
    assert len(sessions) == 3
    for command, shown in sessions:
        assert main(command.split()) == 0
        printed = capsys.readouterr().out.splitlines()
        missing = [line for line in shown.splitlines() if without_digits(line[3:]) not in map(without_digits, printed)]
        assert missing == []
    assert len((tmp_path / "skip.txt").read_text().split()) == 1


def without_digits(line):
    """Return a line without the digits after the third one of a number, which depend on the machine."""
    return re.sub(r"(\d\.?\d\.?\d)[\d.]*", r"\1", line)


ROWS = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
CLASSES = (ROWS @ torch.randn(12, 4, generator=torch.Generator().manual_seed(2))).argmax(1)
AT = 100


def classifier(kind="mlp", seed=0, optimizer="adam"):
    torch.manual_seed(seed)
    between = {"mlp": [nn.ReLU()], "ln": [nn.LayerNorm(32), nn.GELU()], "bn": [nn.BatchNorm1d(32), nn.ReLU()]}[kind]
    model = nn.Sequential(nn.Linear(12, 32), *between, nn.Dropout(0.0), nn.Linear(32, 4))
    if optimizer == "adam":
        return model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), 0.01)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def rate_times(factor, last=1000):
    def change(step, model, loss, optimizer, x, y):
        if step in (AT, last):
            optimizer.param_groups[0]["lr"] *= factor if step == AT else 1 / factor

    return change


def of_optimizer(step, model, loss, optimizer, x, y):
    for state in optimizer.state.values() if step == AT else ():
        for name, factor in (("exp_avg_sq", 1e-8), ("momentum_buffer", 300)):
            if name in state:
                state[name] *= factor


def of_rows(*numbers):
    def change(step, model, loss, optimizer, x, y):
        for row in numbers if step == AT else ():
            x[row] *= 30
            y[row] = (y[row] + 1) % 4

    return change


def dropout(step, model, loss, optimizer, x, y):
    model[-2].p = 0.95 if step >= AT else 0.0


def all_weights(step, model, loss, optimizer, x, y):
    for parameter in model.parameters() if step == AT else ():
        parameter.data *= -10


def verdicts(log_dir, change, *parts, steps=AT + 20):
    """Train with something that `change` plants, and return the verdicts of all dumps from its step on."""
    model, loss, optimizer = classifier(*parts)
    recorder = RecorderOptions(state_every=1, burst=0)
    monitor = ikkuna.watch(model, loss=loss, log_dir=log_dir, recorder=recorder, verbosity=0)
    chosen = torch.Generator().manual_seed(parts[1] if len(parts) > 1 else 0)
    for step in range(steps):
        rows = torch.randint(0, 400, (16,), generator=chosen)
        x, y = ROWS[rows], CLASSES[rows]
        change(step, model, loss, optimizer, x, y)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    monitor.close()
    return [verdict(dump, *classifier(*parts)) for dump in map(read_dump, monitor.dumps) if dump.step >= AT]


@pytest.mark.parametrize(
    ("change", "parts", "expected"),
    [
        (rate_times(30), ("mlp", 0), [("rate", False), ("rate", False)]),
        (rate_times(30), ("mlp", 1), [("rate", False)]),
        (rate_times(100), ("bn", 0), [("rate", True), ("rate", False)]),
        (of_optimizer, ("ln", 0, "adam"), [("rate", False)]),
        (of_optimizer, ("ln", 0, "sgd"), [("rate", False)]),
        (all_weights, ("mlp", 0), [("state", False)]),
        (of_rows(5), ("mlp", 0), [("row", True)]),
        (of_rows(3, 7), ("mlp", 1), [("row", True)]),
        (of_rows(*range(8)), ("mlp", 0), [("row", False)]),
    ],
)
def test_a_verdict_is_certain_only_if_the_others_are_excluded(tmp_path, change, parts, expected):
    assert [(found.cause, found.is_certain) for found in verdicts(tmp_path, change, *parts)] == expected


def test_an_open_verdict_names_the_other_possibility(tmp_path):
    [found, *_] = verdicts(tmp_path / "dropout", dropout)
    setting = "a setting that is not in the dump was changed in Python, such as a dropout rate, or the machine computed other numbers"
    assert found.sentence.startswith(f"step {AT}: probably {setting}")
    [found] = verdicts(tmp_path / "optimizer", of_optimizer, "ln", 0, "sgd")
    assert found.sentence.endswith("their learning rate is too high, or the state of the optimizer is damaged")


@pytest.mark.slow
def test_healthy_rows_are_never_named_with_certainty_while_a_training_diverges(tmp_path):
    found = [
        (each.cause, each.is_certain)
        for seed in range(3)
        for kind in ("mlp", "ln", "bn")
        for number, change in enumerate((rate_times(30), rate_times(100), rate_times(500), of_optimizer))
        for each in verdicts(tmp_path / f"{kind}{seed}{number}", change, kind, seed)
    ]
    assert len(found) > 30
    assert ("row", True) not in found
    assert sum(cause == "rate" for cause, _ in found) > 0.9 * len(found)
