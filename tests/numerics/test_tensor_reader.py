"""Tensors are checked and measured in one native call exactly as the checks in Python and the kernels do."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.numerics.statistics import FIELDS, HISTOGRAMS, native, needed_fields
from ikkuna.numerics.statistics.float_code import WORTH_SAMPLING, add_codes
from ikkuna.numerics.statistics.host import HostStatistics, ListCounts
from ikkuna.numerics.statistics.native.kernels import VARIANTS, ListMemory, flags_of
from ikkuna.numerics.statistics.table import COLUMN
from ikkuna.support.torch_internals import parallel_for
from ikkuna.testing import RecordingBackend, special_tensors

ALL = needed_fields(set(FIELDS) - HISTOGRAMS)
FLAGS = flags_of(ALL)
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
    left = reader.add_all([x], np.array([flags_of(ALL)], np.int32), np.array([one.address(1)]), ListMemory(1))
    assert left.tolist() == ([] if is_read else [0])
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


def _halve(x):
    x.data = x.data[:1]


def _transpose(x):
    x.data = x.data.mT.contiguous()


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
    memory, x = ListMemory(1), nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    flags, plain = np.array([flags_of(ALL)], np.int32), HostStatistics()
    for _ in range(2):
        statistics = HostStatistics()
        assert not len(reader.add_all([x], flags, np.array([statistics.address(0)]), memory))
        assert statistics.record(0, ALL).mean == 2.5
    change(x)
    statistics = HostStatistics()
    left = reader.add_all([x], flags, np.array([statistics.address(0)]), memory)
    assert bool(len(left)) != kernels.accepts(x)
    if not len(left):
        kernels.add(x, ALL, plain.address(0))
        np.testing.assert_array_equal(statistics.values[0], plain.values[0])
        assert statistics.record(0, ALL).mean != 2.5


@pytest.fixture
def threads():
    """Return the function that sets torch's number of threads, which is restored."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def rows_of_a_step(sizes, dtype):
    """Return the rows of tensors of a list, of their differences, and of single tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator, dtype=dtype, requires_grad=True) for size in sizes]
    memory, statistics, room = copied(tensors)
    assert memory.is_copied.all()
    assert all(bytes(part)[: x.nbytes] == bytes(x.detach().numpy()) for x, part in zip(tensors, room, strict=True))
    with torch.no_grad():
        for x in tensors:
            x.mul_(1.5)
    count = len(tensors)
    rows = statistics.addresses(np.arange(count, 2 * count))
    assert not len(reader.add_differences(tensors, np.full(count, FLAGS, np.int32), rows, memory))
    for i, x in enumerate(tensors):
        assert reader.add(x.detach(), flags_of(ALL), statistics.address(2 * count + i))
        kernels.add(x, ALL, statistics.address(3 * count + i))
    return statistics.values[: 4 * count].copy(), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_changes_no_result(threads, dtype):
    assert parallel_for() is not None
    sizes = [3, (1 << 20) + 7, 1, 40_000, 1 << 19, (1 << 19) + 1, *[17] * 50]
    found = []
    for number in (1, 2, 3):
        threads(number)
        values, tensors = rows_of_a_step(sizes, dtype)
        found.append(values)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    count = len(sizes)
    np.testing.assert_array_equal(found[0][2 * count : 3 * count], found[0][3 * count :])
    column = COLUMN["sumsq"]
    for i, x in enumerate(tensors):
        after = x.detach().double()
        np.testing.assert_allclose(found[0][2 * count + i, column], float((after**2).sum()), rtol=1e-5)
        np.testing.assert_allclose(found[0][count + i, column], float(((after / 3) ** 2).sum()), rtol=1e-5)


def copied(tensors, flags=FLAGS):
    """Return the memory of a list of tensors that were measured and copied, and what keeps the copies alive."""
    memory, room = ListMemory(len(tensors), [x.nbytes for x in tensors]), [np.zeros(x.nbytes) for x in tensors]
    memory.copy_to(np.array([part.ctypes.data for part in room]))
    statistics = HostStatistics()
    rows = statistics.addresses(np.arange(len(tensors)))
    left = reader.add_all(tensors, np.full(len(tensors), flags, np.int32), rows, memory)
    assert not len(left)
    return memory, statistics, room


def parameters():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2, 2, generator=generator)
    return [nn.Parameter(t) for t in (x, x.to(memory_format=torch.channels_last), x.double(), x[:0])]


def test_copies_are_made_while_tensors_are_measured_and_differences_are_those_of_the_library():
    tensors = [*parameters()[:3], nn.Parameter(torch.randn(77).bfloat16())]
    before = [x.detach().clone() for x in tensors]
    memory, statistics, _room = copied(tensors)
    assert memory.is_copied.all()
    for i, x in enumerate(before):
        plain = HostStatistics()
        kernels.add(x, ALL, plain.address(0))
        np.testing.assert_array_equal(statistics.values[i], plain.values[0])
    with torch.no_grad():
        for x in tensors:
            x.mul_(0.9)
    statistics = HostStatistics()
    flags, rows = np.full(4, flags_of(ALL), np.int32), statistics.addresses(np.arange(4))
    assert not len(reader.add_differences(tensors, flags, rows, memory))
    for i, (x, y) in enumerate(zip(tensors, before, strict=True)):
        plain = HostStatistics()
        kernels.add_difference(x.detach(), y, ALL, plain.address(0))
        np.testing.assert_array_equal(statistics.values[i], plain.values[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tensor_that_has_another_dtype_than_its_memory_was_reserved_for_is_not_copied(dtype):
    """As after ``model.to(torch.float64)`` between two steps of the same optimizer."""
    x, room = nn.Parameter(torch.ones(100)), np.zeros(300, np.float32)
    memory, statistics = ListMemory(1, [x.nbytes]), HostStatistics()
    memory.copy_to(np.array([room.ctypes.data]))
    x.data = x.data.to(dtype)
    assert not len(reader.add_all([x], np.array([flags_of(ALL)], np.int32), statistics.addresses(np.arange(1)), memory))
    assert not memory.is_copied.any()
    assert not room.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("flags", [-1, 0, 1])
@pytest.mark.parametrize("offset", [0, 1])
def test_large_copies_are_equal_to_the_tensors(variant, flags, offset):
    """They are written past the caches, if their place is aligned."""
    if not kernels.use(variant):
        pytest.skip("this processor lacks it")
    x, few = nn.Parameter(torch.randn(1_200_000 + 37)), nn.Parameter(torch.randn(5))
    room = torch.zeros(x.numel() + 64)
    begin = -room.data_ptr() % 64 // 4 + offset
    memory, statistics = ListMemory(2, [x.nbytes, 0]), HostStatistics()
    memory.copy_to(np.array([room.data_ptr() + 4 * begin, 0]))
    reader.add_all([x, few], np.full(2, flags, np.int32), statistics.addresses(np.arange(2)), memory)
    next(filter(kernels.use, VARIANTS))
    assert torch.equal(room[begin : begin + x.numel()], x.detach())
    assert not room[:begin].any()
    assert not room[begin + x.numel() :].any()


@pytest.mark.parametrize("change", [_halve, _widen, _free, _transpose])
def test_a_tensor_that_is_not_what_was_copied_has_no_difference(change):
    x = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    memory, statistics, _room = copied([x])
    change(x)
    statistics = HostStatistics()
    left = reader.add_differences([x], np.zeros(1, np.int32), statistics.addresses(np.arange(1)), memory)
    assert left.tolist() == [0]
    assert not statistics.values[0, 0]


def test_what_does_not_change_is_measured_and_not_copied():
    x = torch.ones(3)
    for tensor in (x, nn.Parameter(x, requires_grad=False)):
        memory, statistics, _ = copied([tensor])
        assert not memory.is_copied.any()
        assert statistics.values[0, 0] == 3


def test_a_tensor_is_copied_although_it_is_not_measured():
    x = nn.Parameter(torch.arange(3.0))
    memory, statistics, [room] = copied([x], flags=-1)
    assert memory.is_copied.all()
    assert not statistics.values[0, 0]
    assert room.view(np.float32)[:3].tolist() == [0, 1, 2]


def test_none_is_passed_over():
    statistics = HostStatistics()
    memory, flags = ListMemory(2), np.zeros(2, np.int32)
    left = reader.add_all([None, torch.ones(2)], flags, statistics.addresses(np.arange(2)), memory)
    assert not len(left)
    assert statistics.values[:2, 0].tolist() == [0, 2]


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


def sizes_and_seeds():
    """Return tensors of which samples are counted, and others, with generators in the same state."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, generator=draw) for n in (WORTH_SAMPLING + 1, 5, WORTH_SAMPLING, 300_000)]
    tensors += [tensors[0].double(), tensors[3].bfloat16()]
    return tensors, torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)


@pytest.mark.parametrize("names", [("codes",), ("sampled_codes",), ("codes", "sampled_codes")])
def test_the_codes_of_a_tensor_are_counted_in_the_call_that_measures_it(names):
    tensors, mine, others = sizes_and_seeds()
    fields, statistics, known = needed_fields([*names, "min"]), HostStatistics(), {}
    for x in (*tensors, tensors[0]):
        assert statistics.try_add(0, x, fields, mine)
        add_codes(known, x, frozenset(names), others)
    assert statistics.codes[0].keys() == known.keys()
    assert all(torch.equal(statistics.codes[0][name], known[name]) for name in names)
    assert not statistics.try_add(0, torch.ones(3, dtype=torch.int32), fields, mine)
    assert torch.equal(mine.get_state(), others.get_state())


@pytest.mark.parametrize("are_updates", [False, True])
@pytest.mark.parametrize("name", ["codes", "sampled_codes"])
def test_the_codes_of_a_list_are_counted_in_the_call_that_measures_it(name, are_updates):
    """Those of a tensor that is missing, of another kind, or without a histogram are not."""
    tensors, mine, others = sizes_and_seeds()
    xs = [x.requires_grad_() for x in tensors] + [torch.eye(3).to_sparse(), None, torch.ones(3)]
    fields, statistics, count = needed_fields([name, "min"]), HostStatistics(), len(xs)
    rows, flags = np.arange(count), np.full(count, flags_of(fields), np.int32)
    sizes = [0 if x is None or x.is_sparse else x.numel() for x in xs]
    listed = ListCounts([name] * (count - 1) + [None], sizes, rows)
    memory = ListMemory(count, [0 if x is None or x.is_sparse else x.nbytes for x in xs])
    room = [np.zeros(x.nbytes, np.uint8) for x in tensors]
    addresses = statistics.addresses(rows)
    if are_updates:
        memory.copy_to(np.array([array.ctypes.data for array in room] + [0] * 3))
        reader.add_all(xs, np.full(count, -1, np.int32), addresses, memory)
        befores = [x.detach().clone() for x in tensors]
        for x in tensors:
            x.data *= 1.5
        table = listed.begin([copied or None for copied in memory.is_copied.tolist()], mine)
        left = reader.add_differences(xs, flags, addresses, memory, table)
        assert not len(left)
        wide = [torch.promote_types(x.dtype, torch.float32) for x in tensors]
        numbers = [x.detach().to(w) - before.to(w) for x, before, w in zip(tensors, befores, wide, strict=True)]
    else:
        table = listed.begin(xs, mine)
        left = reader.add_all(xs, flags, addresses, memory, table)
        assert left.tolist() == [len(tensors)]
        numbers = [x.detach() for x in tensors]
    listed.end(statistics.codes, left.tolist())
    assert statistics.codes.keys() == set(range(len(tensors)))
    for i, x in enumerate(numbers):
        known, plain = {}, HostStatistics()
        add_codes(known, x, frozenset([name]), others)
        assert torch.equal(statistics.codes[i][name], known[name])
        plain.add(0, x, fields)
        np.testing.assert_array_equal(statistics.values[i], plain.values[0])
    assert torch.equal(mine.get_state(), others.get_state())
