"""Rows of the inputs under ``watch``: equal ones, their labels, their order, and the rows of evaluations."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ikkuna
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus, Stamp
from ikkuna.export.subscriber import InputRowsSubscriber
from ikkuna.numerics.bits import HASHED, row_bit_sums, row_information, row_words
from ikkuna.testing import RecordingBackend

RULES = ["labels_repeated", "repeated_batch", "contradicting_labels", "batch_twice", "same_order"]
EVALUATED = ["training_rows_evaluated", "evaluation_inputs"]
SIZE = 16


def data(rows=320, features=12, classes=4):
    y = torch.randint(classes, (rows,))
    return torch.randn(classes, features)[y] + torch.randn(rows, features), y


def shuffled(x, y):
    while True:
        for rows in torch.randperm(len(x)).split(SIZE):
            yield x[rows], y[rows]


def network(features=12, classes=4):
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, classes))


def found(batches, directory, rules=RULES, steps=130, evaluate=None, loss=None):
    """Return name and severity of what is found while a classifier is trained; `evaluate` is called after each epoch."""
    model = network()
    optimizer, loss = torch.optim.Adam(model.parameters(), 3e-3), loss or nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss, log_dir=directory, rules=rules, backend="null", verbosity=0) as handle:
        for step, (x, y) in enumerate(itertools.islice(batches, steps), 1):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            if evaluate is not None and step % 20 == 0:
                model.eval()
                with torch.no_grad():
                    evaluate(model, loss)
                model.train()
    return {(finding.rule, finding.severity) for finding in handle.findings}


def joined():
    x, y = data(80)
    return shuffled(x.repeat(2, 1), torch.cat([y, (y + 1) % 4]))


def unread():
    x, y = data()
    x[torch.rand(len(x)) < 0.3] = 0
    return shuffled(x, y)


def equal_seeds():
    return (batch for batch in shuffled(*data()) for _ in range(3))


def never_shuffled():
    x, y = data(16 * 13)
    return itertools.cycle(zip(x.split(SIZE), y.split(SIZE), strict=True))


def all_at_once():
    return itertools.repeat(data(64))


def rare_class_drawn_more_often():
    x, y = data()
    while True:
        rows = torch.multinomial(torch.where(y == 0, 4.0, 1.0), SIZE, replacement=True)
        yield x[rows], y[rows]


def categories():
    """A few columns of categories, in which equal rows with different labels are usual."""
    x = F.one_hot(torch.randint(4, (320, 3)), 4).flatten(1).float()
    return shuffled(x, torch.randint(4, (320,)))


def numbered():
    """Labels that number the rows of the batch, as in contrastive learning, of rows that come twice."""
    x, _ = data(40)
    return ((x[torch.randint(40, (SIZE,))], torch.arange(SIZE) % 4) for _ in itertools.count())


def labels_of_the_first_batch():
    batches = shuffled(*data())
    _, y = next(batches)
    return ((x, y) for x, _ in batches)


def labels_of_the_first_batch_for_new_rows():
    """The rows are augmented, so that it is not known which labels they should have."""
    _, y = data(SIZE)
    return ((torch.randn(SIZE, 12), y) for _ in itertools.count())


def all_rows_with_noise():
    x, y = data(64)
    return ((x + 0.01 * torch.randn_like(x), y) for _ in itertools.count())


def blocks_of_classes():
    """Episodes: each has rows of four classes, which are numbered in each of them anew."""
    x, _ = data(40)
    return ((x[torch.randint(40, (SIZE,))], torch.arange(4).repeat_interleave(4)) for _ in itertools.count())


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        (labels_of_the_first_batch, {("labels_repeated", "warning")}),
        (labels_of_the_first_batch_for_new_rows, set()),
        (all_rows_with_noise, set()),
        (blocks_of_classes, set()),
        (lambda: shuffled(*data()), set()),
        (joined, {("contradicting_labels", "warning")}),
        (unread, {("contradicting_labels", "warning")}),
        (equal_seeds, {("batch_twice", "warning")}),
        (never_shuffled, {("same_order", "info")}),
        (all_at_once, {("repeated_batch", "info")}),
        (rare_class_drawn_more_often, set()),
        (categories, set()),
        (numbered, set()),
    ],
)
def test_rows_are_judged_by_what_is_equal_to_the_last_bit(batches, expected, tmp_path):
    torch.manual_seed(0)
    assert found(batches(), tmp_path, steps=230 if batches is never_shuffled else 130) == expected


@pytest.mark.parametrize("has_points", [True, False])
def test_the_same_points_at_the_boundary_are_no_repeated_batch(has_points, tmp_path):
    torch.manual_seed(0)
    model, ends = network(1, 1), torch.tensor([[0.0], [1.0]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with ikkuna.watch(model, log_dir=tmp_path, rules=RULES, backend="null", verbosity=0) as handle:
        for _ in range(60):
            loss = model(torch.rand(SIZE, 1)).square().mean() if has_points else 0.0
            (loss + (model(ends) - ends).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [finding.rule for finding in handle.findings] == ([] if has_points else ["repeated_batch"])


def test_a_batch_may_be_used_for_several_steps_if_the_labels_are_no_classes(tmp_path):
    batches = ((x, F.one_hot(y, 4).float()) for x, y in equal_seeds())
    assert not found(batches, tmp_path, loss=nn.MSELoss())


def evaluations(x, y, size=40):
    def evaluate(model, loss):
        for rows, labels in zip(x.split(size), y.split(size), strict=True):
            loss(model(rows), labels)

    return evaluate


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x, held_out: held_out, set()),
        (lambda x, held_out: held_out + 0.3, set()),
        (lambda x, held_out: 50 * held_out, {("evaluation_inputs", "warning")}),
        (lambda x, held_out: held_out / 5, {("evaluation_inputs", "warning")}),
        (lambda x, held_out: held_out - 4, {("evaluation_inputs", "warning")}),
        (lambda x, held_out: torch.cat([held_out[:80], 50 * held_out[:1]]), set()),  # of one row nothing follows
        (lambda x, held_out: torch.cat([x[:20], held_out[:60]]), set()),  # the last batch counts
        (lambda x, held_out: torch.cat([held_out[:60], x[:20]]), {("training_rows_evaluated", "warning")}),
    ],
)
def test_evaluations_are_compared_with_the_training(change, expected, tmp_path):
    torch.manual_seed(0)
    x, y = data(400)
    evaluate = evaluations(changed := change(x[:320], x[320:]), y[: len(changed)])
    assert found(shuffled(x[:320], y[:320]), tmp_path, EVALUATED, evaluate=evaluate) == expected


@pytest.mark.parametrize(("trained", "expected"), [(60, set()), (150, {("training_rows_evaluated", "warning")})])
def test_nodes_of_a_graph_that_is_always_given_as_a_whole_are_not_those_trained(trained, expected, tmp_path):
    torch.manual_seed(0)
    x, y = data(150)
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with ikkuna.watch(model, loss, log_dir=tmp_path, rules=EVALUATED, backend="null", verbosity=0) as handle:
        for step in range(100):
            optimizer.zero_grad()
            loss(model.train()(x)[:trained], y[:trained]).backward()
            optimizer.step()
            if step % 20 == 19:
                with torch.no_grad():
                    loss(model.eval()(x)[60:], y[60:])
    assert {(finding.rule, finding.severity) for finding in handle.findings} == expected


def test_inputs_of_evaluations_that_are_often_repeated_are_not_read(tmp_path):
    model, x = network(), torch.randn(8, 12)
    optimizer, backend = torch.optim.SGD(model.parameters(), 0.1), RecordingBackend()
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(InputRowsSubscriber(backend=backend))
        for step in range(30):
            if step % 5 == 0 or step == 29:
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
            model(x).sum().backward()
            optimizer.step()
    assert "validation" not in {series.pass_name for series, _, _ in backend.values}


def test_the_first_steps_are_all_sampled_and_later_ones_as_before():
    subscription = InputRowsSubscriber(every=10, first=3, backend="null").subscription
    assert [step for step in range(31) if subscription.samples(Stamp(step, step, 0))] == [0, 1, 2, 10, 20, 30]


def test_sums_of_rows_differ_with_each_bit_and_with_the_order_of_elements():
    rows = torch.randn(6, 3 * HASHED)
    rows[1] = rows[0]
    rows[2] = rows[0].flip(0)
    rows[3] = rows[0]
    rows[3, 0] = rows[3, 0].nextafter(torch.tensor(9.0))
    sums = row_bit_sums(row_words(rows)).tolist()
    assert sums[0] == sums[1]
    assert len(set(sums)) == 5


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.complex64]
)
def test_rows_of_each_dtype_have_sums(dtype):
    rows = torch.arange(40).reshape(10, 2, 2).to(dtype)
    assert len(set(row_bit_sums(row_words(rows)).tolist())) == (
        1 + (dtype is torch.bool) if dtype is torch.bool else 10
    )


def test_rows_that_come_twice_are_not_known_by_chance():
    x = torch.randn(32, 20)
    assert row_information(row_words(x)) > 100
    for twice in (x[:16].repeat_interleave(2, 0), x[:16].repeat(2, 1)):
        assert row_information(row_words(twice)) > 100
    assert row_information(row_words(torch.zeros(32, 20))) == 0
