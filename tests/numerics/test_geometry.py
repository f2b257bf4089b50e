"""Ratios, angles and lost updates against closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.numerics.geometry import angle, cosine, count_moved, distance

PAIR = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float32, n, elements=st.floats(-1000, 1000, width=32))] * 2)
)
ALL = (distance, angle, cosine)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(PAIR)
@settings(deadline=None, max_examples=80)
def test_all_are_those_of_numpy(pair):
    a, b = (torch.from_numpy(p) for p in pair)
    x, y = (p.astype(np.float64) for p in pair)
    length = np.linalg.norm(x)
    gap = np.linalg.norm((pair[0] - pair[1]).astype(np.float64))
    assert distance(a, b).item() == pytest.approx(gap, rel=1e-5)
    if length > 0:
        assert 0 <= angle(a, b).nan_to_num().item() <= math.pi
    if length > 0 and np.linalg.norm(y) > 0:
        expected = x @ y / length / np.linalg.norm(y)
        assert cosine(a, b).item() == pytest.approx(expected, abs=1e-6)
    else:
        assert math.isnan(cosine(a, b).item())


@pytest.mark.parametrize("theta", [1e-7, 1e-5, 1e-3, 1e-2, 1.0, 3.0, math.pi - 1e-4])
def test_a_known_angle_is_read_however_small(theta):
    """The arc cosine of a float32 cosine reads 0 at 1e-3."""
    q = torch.linalg.qr(random(500, 2).double())[0]
    a, b = q[:, 0], math.cos(theta) * q[:, 0] + math.sin(theta) * q[:, 1]
    assert angle(3 * a, 0.2 * b).item() == pytest.approx(theta, rel=1e-6)
    if theta in (1e-3, 1e-2):
        assert angle(a.float(), b.float()).item() == pytest.approx(theta, rel=1e-3)
        naive = torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=0).clamp(max=1).acos()
        assert theta == 1e-2 or abs(naive.item() - theta) > 1e-5


def test_identical_negated_orthogonal():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([-2.0, 1.0])
    assert cosine(a, a).item() == 1.0
    assert cosine(a, -a).item() == -1.0
    assert cosine(a, b).item() == pytest.approx(0, abs=1e-12)
    assert cosine(7 * a, 1e-3 * a).item() == pytest.approx(1)


def test_a_rotation_of_both_changes_nothing():
    a, b = random(20, seed=2).double(), random(20, seed=3).double()
    q = torch.linalg.qr(random(20, 20).double())[0]
    for f in ALL:
        assert f(q @ a, q @ b).item() == pytest.approx(f(a, b).item())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(3), torch.ones(3)),
        (torch.empty(0), torch.empty(0)),
        (torch.tensor([math.nan, 1.0]), torch.ones(2)),
        (torch.tensor([math.inf, 1.0]), torch.ones(2)),
        (torch.ones(2), torch.ones(3)),
        (torch.empty(2, device="meta"), torch.empty(2, device="meta")),
    ],
)
def test_what_is_undefined_is_nan(a, b):
    assert math.isnan(angle(a, b).item())
    assert math.isnan(cosine(a, b).item())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.bfloat16(),
        lambda x: x.double(),
        lambda x: x.t(),
        lambda x: x.to_sparse(),
        lambda x: x.requires_grad_(),
        lambda x: x[0, 0].expand(4),
        lambda x: x[0, 0],
        lambda x: x * 1e30,
        lambda x: x * 1e-30,
        lambda x: (x * 10).int(),
    ],
)
def test_dtypes_and_layouts(make):
    a, b = make(random(6, 5)), make(random(6, 5, seed=1))
    dense = [(t.detach().to_dense() if t.is_sparse else t.detach()).double().numpy().ravel() for t in (a, b)]
    expected = dense[0] @ dense[1] / np.linalg.norm(dense[0]) / np.linalg.norm(dense[1])
    assert cosine(a, b).item() == pytest.approx(expected, abs=1e-6)
    assert distance(a, b).item() == pytest.approx(np.linalg.norm(dense[0] - dense[1]), rel=1e-5)


@pytest.mark.parametrize(("ratio", "lost"), [(1e-4, 0.98), (1e-3, 0.78), (3e-3, 0.47), (1e-2, 0.17)])
def test_bfloat16_swallows_small_updates(ratio, lost):
    w, u = random(200_000), ratio * random(200_000, seed=1)
    moved, asked = count_moved(w, u).tolist()
    assert 1 - moved / asked == pytest.approx(lost, abs=0.02)
    moved, asked = count_moved(w, u, torch.float32).tolist()
    assert moved / asked > 0.99


@given(PAIR)
@settings(deadline=None, max_examples=50)
def test_moved_weights_are_counted_one_by_one(pair):
    w, u = (torch.from_numpy(p) for p in pair)
    moved = asked = 0
    for a, b in zip(w.bfloat16(), u, strict=True):
        asked += int(b != 0)
        moved += int((a.double() + b.double()).bfloat16() != a and b != 0)
    assert count_moved(w, u).tolist() == [moved, asked]


def test_updates_without_numbers_are_not_counted():
    assert count_moved(torch.ones(3), torch.zeros(3)).tolist() == [0, 0]
    assert count_moved(torch.ones(3), torch.ones(2)).tolist() == [0, 0]
    assert count_moved(torch.empty(2, device="meta"), torch.ones(2)).tolist() == [0, 0]
    sparse = torch.tensor([0.0, 1.0]).to_sparse()
    assert count_moved(torch.ones(2), sparse).tolist() == [1, 1]


def test_the_angle_of_complex_numbers():
    a = torch.tensor([1 + 0j, 1j])
    assert angle(a, 1j * a).item() == pytest.approx(math.pi / 2)
    assert cosine(a, -a).item() == pytest.approx(-1)
    assert count_moved(torch.tensor([1 + 1j]), torch.tensor([1e-2 - 1e-3j])).tolist() == [1, 2]
