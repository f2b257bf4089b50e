"""Tensors are checked and measured in one native call exactly as the checks in Python and the kernels do."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.numerics.statistics import FIELDS, HISTOGRAMS, closure, native
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.native.library import flags_of
from ikkuna.numerics.statistics.native.tensor_reader import KnownTensors
from ikkuna.testing import RecordingBackend, special_tensors

ALL = closure(set(FIELDS) - HISTOGRAMS)
kernels = native.library()
reader = kernels.reader if kernels is not None else None
pytestmark = pytest.mark.skipif(reader is None, reason="the native library cannot be built here")


class Own(torch.Tensor):
    pass


def freed():
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def shrunk():
    x = torch.ones(4)
    x.untyped_storage().resize_(8)
    return x


def odd_tensors():
    x = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    return {
        **special_tensors(),
        "parameter": nn.Parameter(x),
        "channels last": x.to(memory_format=torch.channels_last),
        "permuted": x.permute(3, 1, 0, 2),
        "slice": x[1:],
        "offset in a storage": torch.arange(10.0)[3:7],
        "negative view": torch._neg_view(x),
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "meta": torch.ones(3, device="meta"),
        "a subclass": torch.ones(3).as_subclass(Own),
        "complex": torch.ones(3, dtype=torch.complex64),
        "freed": freed(),
        "shrunk": shrunk(),
        "with a graph": (x * nn.Parameter(torch.ones(()))),
        "in inference mode": torch.inference_mode()(lambda: torch.ones(3))(),
        "long": torch.ones((1 << 19) + 1),
    }


@pytest.mark.parametrize("what", odd_tensors())
def test_what_the_library_accepts_is_measured_with_the_same_bits(what):
    x = odd_tensors()[what]
    one, other = HostStatistics(), HostStatistics()
    references = gc.get_referrers(x)
    is_read = reader.add(x, flags_of(ALL), one.address(0))
    [left] = [reader.add_all([x], np.array([flags_of(ALL)], np.int32), np.array([one.address(1)])) for _ in "."]
    assert left == ([] if is_read else [0])
    assert len(gc.get_referrers(x)) == len(references)
    if not is_read:
        assert not kernels.accepts(x) or what in ("long", "permuted", "transposed")
        assert not one.values[:2, 0].any()
        return
    assert kernels.accepts(x)
    kernels.add(x, ALL, other.address(0))
    np.testing.assert_array_equal(one.values[0], other.values[0])
    np.testing.assert_array_equal(one.values[1], other.values[0])


def test_tensors_inside_transforms_are_left_out():
    seen = []
    torch.func.vmap(lambda x: seen.append(reader.add(x, 0, np.zeros(14).ctypes.data)) or x)(torch.ones(2, 3))
    assert seen == [False]


def _swap(x):
    x.data = torch.full((4,), 5.0)


def _shorten(x):
    x.data = x.data[:2]


def _spread(x):
    x.data = x.data[::2]


def _widen(x):
    x.data = x.data.double() * 2


def _negate(x):
    x.data = torch._neg_view(x.data.clone())


def _free(x):
    x.untyped_storage().resize_(0)


def _shrink(x):
    x.untyped_storage().resize_(8)


@pytest.mark.parametrize("change", [_swap, _shorten, _spread, _widen, _negate, _free, _shrink])
def test_a_known_tensor_is_checked_again_in_each_call(change):
    known, x = KnownTensors(), nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    flags, plain = np.array([flags_of(ALL)], np.int32), HostStatistics()
    for _ in range(2):
        statistics = HostStatistics()
        assert reader.add_all([x], flags, np.array([statistics.address(0)]), known) == []
        assert statistics.record(0, ALL).mean == 2.5
    change(x)
    statistics = HostStatistics()
    left = reader.add_all([x], flags, np.array([statistics.address(0)]), known)
    assert bool(left) != kernels.accepts(x)
    if not left:
        kernels.add(x, ALL, plain.address(0))
        np.testing.assert_array_equal(statistics.values[0], plain.values[0])
        assert statistics.record(0, ALL).mean != 2.5


def test_differences_are_those_of_the_library():
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(3, 4, 2, 2, generator=generator) for _ in range(3)]
    x[1], x[2] = x[1].to(memory_format=torch.channels_last), x[2].double()
    copies = [(t * 0.9).clone() for t in x]
    others = [x[0].reshape(4, 3, 2, 2), copies[1].contiguous(), copies[0], x[0].bfloat16()]
    tensors, pairs = [*x, x[0], x[1], x[2], x[0].bfloat16()], [*copies, *others]
    statistics, plain = HostStatistics(), HostStatistics()
    rows = statistics.addresses(list(range(len(tensors))))
    flags = np.full(len(tensors), flags_of(ALL), np.int32)
    for known in (None, KnownTensors()):
        statistics.clear()
        assert reader.add_differences(tensors, pairs, flags, rows, known) == [3, 4, 5, 6]
        for i, (a, b) in enumerate(zip(x, copies, strict=True)):
            plain.clear()
            kernels.add_difference(a, b, ALL, plain.address(0))
            np.testing.assert_array_equal(statistics.values[i], plain.values[0])
        assert not statistics.values[3:, 0].any()


@pytest.mark.parametrize("has_reader", [True, False])
def test_an_exporter_publishes_the_same_with_and_without_it(has_reader, monkeypatch):
    if not has_reader:
        monkeypatch.setattr(kernels, "reader", None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = RecordingBackend()
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in ("weights", "weight_gradients", "weight_updates", "biases", "bias_updates", "activations"):
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=recording))
        for step in range(3):
            if step == 1:
                model[3].weight.data = model[3].weight.data.clone() * 2
            weight = model[3].weight.detach().clone()
            optimizer.zero_grad()
            model(torch.ones(2, 1, 4, 4)).square().sum().backward()
            optimizer.step()
            values = {(s.kind, s.name): v for s, v, at in recording.values if at == step}
            assert values["weights_norm2", "3"] == pytest.approx(weight.norm().item(), rel=1e-6)
            update = (model[3].weight.detach() - weight).norm().item()
            assert values["weight_updates_norm2", "3"] == pytest.approx(update, rel=1e-6)
            assert len(values) == 19
