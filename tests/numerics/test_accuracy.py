"""Accuracy counts against a plain loop over rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ikkuna.numerics.prediction import count_correct


def reference(logits, labels, k, ignore=-100):
    correct = valid = broken = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if label == ignore:
            continue
        valid += 1
        if any(math.isnan(x) or x == math.inf for x in row):
            broken += 1
            continue
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        correct += label in order[:k]
    return [correct, valid, broken]


ROW = st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0, math.nan, math.inf]), min_size=3, max_size=3)


@given(st.lists(st.tuples(ROW, st.sampled_from([-100, -1, 0, 1, 2, 7])), min_size=1, max_size=12), st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_counts_are_those_of_a_loop(rows, k):
    logits, labels = torch.tensor([r for r, _ in rows]), torch.tensor([label for _, label in rows])
    assert count_correct(logits, labels, k).tolist() == reference(logits, labels, k)


def test_uneven_batches_add_up_to_one_batch():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(1000, 10, generator=generator), torch.randint(10, (1000,), generator=generator)
    whole = count_correct(logits, labels, 3)
    parts = sum(count_correct(a, b, 3) for a, b in zip(logits.split(256), labels.split(256), strict=True))
    assert torch.equal(whole, parts)
    top = logits.topk(3, dim=1).indices
    assert whole[0] == (top == labels[:, None]).any(1).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_narrow_logits(dtype):
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    labels = logits.double().argmax(1)
    assert count_correct(logits, labels).tolist() == [50, 50, 0]


def test_layouts_of_sequences_and_images_agree():
    generator = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(4, 6, 9, generator=generator), torch.randint(9, (4, 6), generator=generator)
    want = count_correct(logits.reshape(-1, 9), labels.reshape(-1)).tolist()
    assert count_correct(logits, labels).tolist() == want
    assert count_correct(logits.movedim(-1, 1), labels).tolist() == want
    image = logits.reshape(4, 2, 3, 9).movedim(-1, 1)
    assert count_correct(image, labels.reshape(4, 2, 3)).tolist() == want
    assert count_correct(logits[0, 0], labels[0, 0])[1] == 1


def test_an_ambiguous_layout_is_that_of_the_loss():
    generator = torch.Generator().manual_seed(3)
    logits, labels = torch.randn(4, 5, 5, generator=generator), torch.randint(5, (4, 5), generator=generator)
    assert count_correct(logits, labels).tolist() == count_correct(logits.mT, labels, class_axis=-1).tolist()
    assert count_correct(logits, labels, class_axis=2).tolist() == count_correct(logits.mT, labels).tolist()


def test_probabilities_stand_for_their_largest_class():
    logits, labels = torch.randn(20, 4, generator=torch.Generator().manual_seed(4)), torch.arange(20) % 4
    soft = torch.nn.functional.one_hot(labels, 4) * 0.9 + 0.025
    assert torch.equal(count_correct(logits, soft), count_correct(logits, labels))


def test_a_network_of_nan_is_never_right():
    """torch's argmax picks the NaN column, so that such a network scores the frequency of class 0."""
    logits, labels = torch.full((10, 3), math.nan), torch.zeros(10, dtype=torch.int64)
    assert (logits.argmax(1) == labels).all()
    assert count_correct(logits, labels).tolist() == [0, 10, 10]


@pytest.mark.parametrize("ignored", [-100, -1, 0, 2])
def test_labels_that_the_loss_or_the_caller_ignores_are_left_out(ignored):
    """Subscribers receive -100 for what the loss ignores, also if they name the ignored label themselves."""
    labels = torch.tensor([1, 1, 2, 0, 1])
    logits, given = nn.functional.one_hot(labels, 3).float(), torch.where(labels == ignored, -100, labels)
    valid = int((labels != ignored).sum())
    assert count_correct(logits, given, ignore_index=ignored).tolist() == [valid, valid, 0]
    assert count_correct(logits, labels, ignore_index=ignored).tolist() == [valid, valid, 0]


def test_more_than_all_classes_and_ties():
    assert count_correct(torch.zeros(3, 2), torch.tensor([0, 1, 1]), k=9).tolist() == [3, 3, 0]
    assert count_correct(torch.zeros(3, 2), torch.tensor([0, 1, 1])).tolist() == [1, 3, 0]


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.empty(0, 3), torch.empty(0, dtype=torch.int64)),
        (torch.empty(2, 0), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3), torch.zeros(5, dtype=torch.int64)),
        (torch.tensor(1.0), torch.tensor(1)),
        (torch.empty(2, 3, device="meta"), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3), torch.zeros(2)),
    ],
)
def test_what_does_not_fit_counts_nothing(logits, labels):
    assert count_correct(logits, labels).tolist() == [0, 0, 0]
