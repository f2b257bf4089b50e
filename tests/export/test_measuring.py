"""Which tensors a recorder measures, in which way, and with what it calls the subscribers that measure for themselves."""

import math
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from ikkuna.export.subscriber import Subscriber
from ikkuna.metrics.messages.message import MessageBundle
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.float_code import WORTH_SAMPLING
from ikkuna.numerics.statistics.host import measure
from ikkuna.numerics.statistics.table import COLUMN
from ikkuna.observation.rows import recorder as recorder_module
from ikkuna.observation.rows.plan import NOTHING, Plan, Site
from ikkuna.observation.rows.recorder import Recorder
from tests.export.test_rows import ACTIVATIONS, LOSS, STAMP, WEIGHTS, Case, Collecting, Summing

OTHER, BIASES = Site("weights", "other"), Site("biases", "fc")
X = torch.tensor([3.0, -5.0, 1.0])


class Seeing(Subscriber):
    """Keeps what its ``measure`` sees, and returns a sum."""

    def __init__(self, *kinds: str, calls=None, name="", act=lambda message: None, **options):
        super().__init__(kinds, join=len(kinds) > 1, **options)
        self.calls, self.name, self.act = [] if calls is None else calls, name, act
        self.values: list[float] = []

    def measure(self, message):
        is_bundle = isinstance(message, MessageBundle)
        tensors = [part.data for part in message.messages.values()] if is_bundle else [message.data]
        switches = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), any(x.requires_grad for x in tensors)
        self.calls.append((self.name, [x.tolist() for x in tensors], *switches))
        self.act(message)
        return sum(x.double().sum() for x in tensors)

    def compute(self, message):
        self.values.append(float(np.ravel(message.data)[0]))


PLAIN = (False, False, False)


def means(case, parts=()):
    """Close the step, and return kind, module and path with number and mean of each row."""
    rows = case.recorder.close(parts)
    rows.complete()
    return {
        (site.kind, site.module, path): tuple(rows.values[row, [COLUMN["n"], COLUMN["mean"]]])
        for row, (site, path) in enumerate(rows.index.keys[: len(rows.values)])
        if rows.values[row, COLUMN["n"]]
    }


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def native(request):
    return request.param


@pytest.fixture(params=[Collecting.fields, ("m4", "min", "zeros")], ids=["histograms", "moments"])
def case(request, native, monkeypatch):
    monkeypatch.setattr(Collecting, "fields", request.param)
    case = Case()
    case.recorder = Recorder(case.bus.error_guard, native)
    case.open()
    yield case
    case.bus.close()


@pytest.fixture
def elsewhere(monkeypatch):
    """Let tensors say that they are on a device."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)


# -- while a step is open


@pytest.mark.parametrize(("site", "is_wanted"), [(WEIGHTS, True), (OTHER, True), (LOSS, True), (BIASES, False)])
def test_a_site_is_wanted_while_a_step_that_measures_its_kind_is_open(case, site, is_wanted):
    assert case.recorder.wants(site) is is_wanted
    case.recorder.receive(site, torch.tensor(2.0), "p")
    case.recorder.receive_difference(site, torch.tensor([2.0]), torch.tensor([1.0]), "d")
    case.recorder.receive_all([(site, torch.tensor([2.0]), "a", None)])
    found = means(case)
    assert {path for *_, path in found} == ({"p", "d", "a"} if is_wanted else set())
    assert case.recorder.wants(site) is False
    for _ in range(2):
        case.recorder.receive(site, torch.tensor(2.0), "p")
        case.recorder.receive_difference(site, torch.tensor([2.0]), torch.tensor([1.0]), "d")
        case.recorder.receive_all([(site, torch.tensor([2.0]), "a", None)])
        case.recorder.receive_together({"loss": torch.tensor(1.0)})
        case.recorder.measure_each([((site, "p"), X)])
        case.recorder.drop_part(0)
        assert (case.recorder.host_lists(), case.recorder.close()) == (None, None)
        case.recorder.open(STAMP, NOTHING)
    assert not case.recorder.unreadable


def test_parts_are_dropped_alone_and_a_negative_one_counts_for_nothing(case):
    for part, value in ((-1, 1.0), (0, 2.0), (1, 4.0), (2, 8.0)):
        case.see(value, part, WEIGHTS)
        case.recorder.receive_difference(ACTIVATIONS, torch.tensor([value]), torch.tensor([1.0]), "", max(part, 0))
    case.recorder.drop_part(1)
    case.recorder.drop_part(7)
    assert means(case, (1, 2)) == {
        ("weights", "fc", ""): (2, 5.0),
        ("activations", "fc", ""): (3, pytest.approx(8 / 3)),
    }


@pytest.mark.parametrize("carried", [(), (2,)])
def test_a_carried_part_keeps_the_plan_whether_anything_was_measured_or_not(case, carried):
    plan = case.recorder.plan
    case.see(4.0, 2, WEIGHTS)
    rows = case.recorder.close((), carried)
    assert (case.recorder.plan is plan, case.recorder.rows is not None) == (bool(carried), bool(carried))
    assert case.recorder.wants(WEIGHTS) is bool(carried)
    assert rows.measured_rows() == []
    assert means(case, (2,)) == {("weights", "fc", ""): (1, 4.0)} if carried else case.recorder.rows is None
    case.recorder.open(STAMP, empty := Plan(()))
    assert case.recorder.close((), carried) is None
    assert (case.recorder.plan is empty) is bool(carried)


# -- tensors of every sort


class Wrapped(Tensor):
    """A subclass without operators."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError("no operators")


def quantized():
    return torch.quantize_per_tensor(X, 0.5, 3, torch.qint8)


TENSORS = {
    "plain": (lambda: X, True),
    "with a graph": (lambda: X.clone().requires_grad_() * 1, True),
    "a parameter": (lambda: nn.Parameter(X), True),
    "transposed": (lambda: torch.stack([X, X]).T[:, 0], True),
    "whole numbers": (lambda: X.long(), True),
    "sparse": (lambda: X.to_sparse(), True),
    "a parameter of codes": (lambda: nn.Parameter(X.long(), requires_grad=False), False),
    "meta": (lambda: X.to("meta"), False),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_every_sort_of_tensor_is_measured_or_counted_as_left_out(name, measures, native):
    make, has_numbers = TENSORS[name]
    seeing = Seeing("weights")
    case = Case(*[seeing] * measures)
    case.recorder = Recorder(case.bus.error_guard, native)
    case.open()
    case.recorder.receive(WEIGHTS, make(), "p")
    assert case.recorder.unreadable == (set() if has_numbers else {(WEIGHTS, "p")})
    assert seeing.calls == [("", [X.tolist()], *PLAIN)] * (measures and has_numbers)
    assert means(case) == ({("weights", "fc", "p"): (3, pytest.approx(-1 / 3))} if has_numbers else {})
    case.bus.close()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("measures", [False, True])
def test_the_numbers_that_codes_stand_for_are_measured(measures):
    seeing = Seeing("weights")
    case = Case(*[seeing] * measures)
    case.recorder.receive(WEIGHTS, quantized(), "")
    assert seeing.calls == [("", [X.tolist()], *PLAIN)] * measures
    assert means(case) == {("weights", "fc", ""): (3, pytest.approx(-1 / 3))}
    case.bus.close()


def test_a_subclass_that_cannot_be_read_is_left_out_and_a_plain_tensor_is_an_error(monkeypatch):
    case = Case(on_error="log")
    failing = SimpleNamespace(add=lambda *arguments: 1 / 0)
    monkeypatch.setattr("ikkuna.observation.rows.rows.Part.statistics", lambda part, tensor: failing)
    monkeypatch.setattr("ikkuna.observation.rows.recorder._numbers", lambda tensor: tensor)
    case.recorder.receive(WEIGHTS, X.as_subclass(Wrapped), "w", weight=1)
    assert (case.recorder.unreadable, case.bus.error_guard.errors) == ({(WEIGHTS, "w")}, 0)
    case.recorder.receive(WEIGHTS, X, "x", weight=1)
    assert (len(case.recorder.unreadable), case.bus.error_guard.errors) == (1, 1)
    case.bus.close()


@pytest.mark.parametrize("sort", [Tensor, Wrapped])
def test_an_interrupt_of_the_user_passes_the_measurement(monkeypatch, sort):
    case, error = Case(on_error="log"), RuntimeError("it was interrupted")
    error.__cause__ = KeyboardInterrupt()

    def fail(*arguments):
        raise error

    monkeypatch.setattr("ikkuna.observation.rows.rows.Part.statistics", lambda *a: SimpleNamespace(add=fail))
    monkeypatch.setattr("ikkuna.observation.rows.recorder._numbers", lambda tensor: tensor)
    with pytest.raises(KeyboardInterrupt):
        case.recorder.receive(WEIGHTS, X.as_subclass(sort), "", weight=1)
    case.bus.close()


def test_the_data_of_a_packed_sequence_keeps_its_sizes(monkeypatch):
    sizes, data = [], pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    seeing = Seeing("activations", act=lambda message: sizes.append(message.data.batch_sizes.tolist()))
    case, tensor = Case(seeing), data.data
    tensor.batch_sizes = data.batch_sizes
    case.recorder.receive(ACTIVATIONS, tensor, "")
    monkeypatch.setattr("ikkuna.observation.rows.recorder.has_float64", lambda device: False)
    case.recorder.receive(ACTIVATIONS, tensor, "other")
    assert sizes == [[2, 2, 1]] * 2
    case.bus.close()


# -- subscribers that measure for themselves


@pytest.mark.parametrize("autocast", [False, True])
def test_subscribers_measure_without_gradients_and_autocast_and_those_of_the_training_stay(autocast):
    seeing, together = Seeing("weights"), Seeing("loss", "network_output")
    case = Case(seeing, together)
    graph = X.clone().requires_grad_() * 1
    with torch.autocast("cpu", enabled=autocast):
        case.recorder.receive(WEIGHTS, graph, "")
        case.recorder.measure_each([((WEIGHTS, "each"), graph)])
        case.recorder.receive_together({"loss": torch.tensor(2.0), "network_output": X})
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, autocast)
    assert [call[2:] for call in seeing.calls + together.calls] == [PLAIN] * 3
    case.bus.close()


@pytest.mark.parametrize("way", ["receive", "measure_each"])
def test_a_subscriber_that_writes_to_a_tensor_is_disabled_and_named(way, caplog):
    changing = Seeing("weights", act=lambda message: message.data.add_(1.0))
    case = Case(changing, other := Seeing("weights"), on_error="log")

    def measure(tensor, path):
        if way == "receive":
            case.recorder.receive(WEIGHTS, tensor, path)
        else:
            case.recorder.measure_each([((WEIGHTS, path), tensor)])

    with torch.inference_mode():
        inference = torch.ones(2)
    measure(inference, "inference")  # nothing counts the changes of such a tensor
    assert not case.bus.error_guard.disabled
    for path in ("first", "second"):
        measure(X.clone(), path)
    assert (len(changing.calls), len(other.calls)) == (2, 3)
    assert "it changed 'weights' of fc in place" in caplog.text
    assert len(case.bus.error_guard.disabled) == 1
    case.bus.close()


def test_a_subscriber_that_writes_to_what_it_measures_together_is_disabled(caplog):
    changing = Seeing("loss", "network_output", act=lambda m: m["loss"].data.add_(1.0))
    case = Case(changing, on_error="log")
    for _ in range(2):
        case.recorder.receive_together({"loss": torch.tensor(2.0), "network_output": X})
    assert len(changing.calls) == 1
    assert "it changed 'loss' of the network in place" in caplog.text
    case.bus.close()


def test_each_subscriber_measures_all_tensors_before_the_next_one_and_those_of_other_kinds_are_not_measured():
    calls = []
    first, second = (Seeing("weights", calls=calls, name=name) for name in ("first", "second"))
    case = Case(first, second)
    tensors = [((WEIGHTS, "p"), X), ((BIASES, "p"), X), ((OTHER, ""), 2 * X), ((ACTIVATIONS, ""), X)]
    case.recorder.measure_each(tensors, part=2)
    seen = [X.tolist(), (2 * X).tolist()]
    assert [(call[0], call[1][0]) for call in calls] == [(name, x) for name in ("first", "second") for x in seen]
    case.recorder.receive(WEIGHTS, X, "p")
    case.close((2,))
    assert first.values == second.values == [-2.0, -2.0]
    assert case.recorder.index.row(WEIGHTS, "p") == 0
    case.bus.close()


def test_a_measurement_of_several_tensors_that_fails_or_has_no_result_costs_its_own_rows():
    numbers = count()

    class Failing(Seeing):
        def measure(self, message):
            super().measure(message)
            return [None, torch.ones(()), 1.0][next(numbers)]

    case = Case(failing := Failing("weights"), on_error="log")
    case.recorder.measure_each([((Site("weights", name), ""), X) for name in "abc"])
    rows = case.recorder.rows
    case.recorder.close()
    assert [rows.index.keys[row][0].module for row in rows.measured] == ["b"]
    assert (len(failing.calls), case.bus.error_guard.errors) == (3, 1)
    case.bus.close()


@pytest.mark.parametrize(("has_float64", "copies"), [(True, 0), (False, 1)])
def test_subscribers_that_need_float64_share_a_copy_on_the_host(monkeypatch, has_float64, copies):
    made = []

    def on_host(tensor):
        made.append(tensor.tolist())
        return tensor.clone().fill_(7.0)

    monkeypatch.setattr("ikkuna.observation.rows.recorder.has_float64", lambda device: has_float64)
    monkeypatch.setattr("ikkuna.observation.rows.recorder._on_host", on_host)
    seeing = [Seeing(kind) for kind in ("weights", "weights", "weights")]
    seeing[1].needs_float64 = False
    together = [Seeing("loss", "network_output") for _ in range(2)]
    together[1].needs_float64 = False
    case = Case(*seeing, *together)
    case.recorder.receive(WEIGHTS, X, "")
    assert made == [X.tolist()] * copies
    case.recorder.receive_together({"loss": X[:1], "network_output": X})
    seven = [7.0] * 3
    assert [each.calls[0][1] for each in seeing] == [[seven if copies and i != 1 else X.tolist()] for i in range(3)]
    assert together[0].calls[0][1] == ([[7.0], seven] if copies else [[3.0], X.tolist()])
    assert together[1].calls[0][1] == [[3.0], X.tolist()]
    case.bus.close()


@pytest.mark.parametrize(
    ("given", "part", "is_seen"),
    [
        ({"loss": X, "network_output": 2 * X, "input_labels": X}, 0, True),
        ({"network_output": 2 * X, "loss": X}, 1, True),
        ({"loss": X}, 0, False),
        ({"network_output": X}, 0, False),
        ({"loss": X, "network_output": 2 * X}, -1, False),
        ({"loss": X, "network_output": X.to("meta")}, 0, False),
    ],
)
def test_tensors_are_measured_together_if_all_kinds_are_there(given, part, is_seen):
    case = Case(seeing := Seeing("loss", "network_output"), alone := Summing("loss"))
    case.recorder.receive_together(given, part)
    assert seeing.calls == [("", [X.tolist(), (2 * X).tolist()], *PLAIN)] * is_seen
    case.close((1,))
    assert seeing.values == [-3.0] * is_seen
    assert alone.values == []
    case.bus.close()


# -- distributed tensors


class DTensor(Tensor):
    """A tensor of which this rank has the first two elements."""


def distributed():
    return X.as_subclass(DTensor)


@pytest.fixture
def sharded(monkeypatch):
    """Let `DTensor` have a shard, whose position is stored in the list that this returns."""
    positions = [SimpleNamespace(is_shard=True)]

    def local_shard(tensor, may_communicate):
        return (tensor.as_subclass(Tensor)[:2], positions[0]) if positions else None

    monkeypatch.setattr("ikkuna.observation.rows.recorder.local_shard", local_shard)
    monkeypatch.setattr("ikkuna.observation.rows.recorder.full_tensor", lambda x: x.as_subclass(Tensor).clone())
    monkeypatch.setattr("ikkuna.observation.rows.recorder.has_numbers", lambda x: isinstance(x, Tensor))
    return positions


def whole(gather, name=""):
    seeing = Seeing("weights", name=name, gather=gather)
    seeing.needs_whole = True
    return seeing


@pytest.mark.parametrize("may_communicate", [False, True])
@pytest.mark.parametrize("position", ["shard", "replica", "collective", "partial"])
def test_a_shard_is_measured_and_gathered_only_for_those_who_need_it_and_may(
    sharded, position, may_communicate, caplog
):
    sharded[:] = {"shard": sharded[:], "replica": [SimpleNamespace(is_shard=False)], "collective": [None]}.get(
        position, []
    )
    any_part, gathering, not_gathering = Seeing("weights"), whole(True), whole(False)
    case = Case(any_part, gathering, not_gathering)
    case.recorder._may_communicate = lambda: may_communicate
    for path in ("a", "b"):
        case.recorder.receive(WEIGHTS, distributed(), path)
    if position == "partial":
        assert case.recorder.unreadable == {(WEIGHTS, "a"), (WEIGHTS, "b")}
        assert not any_part.calls + gathering.calls + not_gathering.calls
        assert means(case) == {}
        return
    local, full = ("", [[3.0, -5.0]], *PLAIN), ("", [[3.0, -5.0, 1.0]], *PLAIN)
    is_shard = position == "shard"
    assert not case.recorder.unreadable
    assert any_part.calls == [local] * 2
    assert gathering.calls == ([full] * 2 * may_communicate if is_shard else [local] * 2)
    assert not_gathering.calls == ([] if is_shard else [local] * 2)
    rows = case.recorder.rows
    case.close()
    assert not_gathering.values == pytest.approx([math.nan if is_shard else -2.0] * 2, nan_ok=True)
    expected = -2.0 if not is_shard else -1.0 if may_communicate else math.nan
    assert gathering.values == pytest.approx([expected] * 2, nan_ok=True)
    assert caplog.text.count("needs full tensors, but weights of fc") == is_shard * (2 - may_communicate)
    assert [*rows.shards.values()] == ([] if position == "collective" else sharded * 2)
    assert rows.values[0, COLUMN["n"]] == 2
    case.bus.close()


def test_a_shard_whose_numbers_cannot_be_read_is_left_out(sharded, monkeypatch):
    unreadable = SimpleNamespace(add=lambda *arguments: False)
    monkeypatch.setattr("ikkuna.observation.rows.rows.Part.statistics", lambda part, tensor: unreadable)
    case = Case(seeing := Seeing("weights"))
    case.recorder.receive(WEIGHTS, distributed(), "a")
    assert (case.recorder.unreadable, seeing.calls) == ({(WEIGHTS, "a")}, [])
    case.bus.close()


def test_shards_are_not_gathered_by_default(sharded):
    case = Case(gathering := whole(True))
    case.recorder.receive(WEIGHTS, distributed(), "a")
    assert gathering.calls == []
    case.bus.close()


@pytest.mark.parametrize("may_communicate", [False, True])
def test_tensors_measured_together_are_gathered_if_that_is_possible(sharded, may_communicate, monkeypatch):
    case, gathered = Case(seeing := Seeing("loss", "network_output")), []
    gather = recorder_module.full_tensor
    monkeypatch.setattr(recorder_module, "full_tensor", lambda x: gathered.append(x.tolist()) or gather(x))
    case.recorder._may_communicate = lambda: may_communicate
    case.recorder.receive_together({"loss": torch.tensor(2.0), "network_output": distributed()})
    assert seeing.calls == [("", [2.0, X.tolist()], *PLAIN)]
    assert gathered == [X.tolist()] * may_communicate
    case.bus.close()


# -- lists of tensors of a device


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_a_list_of_tensors_is_measured_each_into_its_row(case, elsewhere, dtype, monkeypatch):
    listed = []
    measure = Recorder._measure_list

    def measure_list(recorder, key, group, *others):
        listed.append([row for row, *_ in group])
        measure(recorder, key, group, *others)

    monkeypatch.setattr(Recorder, "_measure_list", measure_list)
    tensors = [torch.tensor([1.0 * i, 3.0 * i]).to(dtype) for i in range(1, 4)]
    sites = [*((WEIGHTS, path) for path in "ab"), (OTHER, "a")]
    given = [(site, x, path, None) for (site, path), x in zip(sites, tensors, strict=True)]
    case.recorder.receive_all([*given, (BIASES, X, "", None)])
    assert listed == ([] if dtype == torch.int64 else [[0, 1, 2]])
    found = means(case)
    assert found == {(s.kind, s.module, p): (2, 2.0 * i) for i, (s, p) in enumerate(sites, 1)}


def test_differences_of_a_list_are_measured(case, elsewhere):
    given = [(WEIGHTS, X, "a", torch.ones(3)), (OTHER, 2 * X, "b", torch.ones(3))]
    case.recorder.receive_all(given, part=1)
    assert means(case, (1,)) == {
        ("weights", "fc", "a"): (3, pytest.approx(-4 / 3)),
        ("weights", "other", "b"): (3, pytest.approx(-5 / 3)),
    }


def test_copies_are_made_with_the_measurement_and_those_that_were_made_are_removed(case, elsewhere, monkeypatch):
    target, unlisted = torch.zeros(3), torch.zeros(3)
    other = 2 * X
    copies = {id(X): (X, target), 7: (other, unlisted)}
    made = []

    def add_all(statistics, rows, tensors, fields, generator=None, copies=()):
        made.append((list(rows), [each is target for each in copies]))

    monkeypatch.setattr("ikkuna.numerics.statistics.device.statistics.DeviceStatistics.add_all", add_all)
    case.recorder.receive_all([(WEIGHTS, X, "a", None), (WEIGHTS, other, "b", None)], copies)
    assert [*copies] == [7]
    case.recorder.receive_all([(WEIGHTS, other, "b", None)], copies)
    assert made == [([0, 1], [True, False]), ([1], [])]
    assert [*copies] == [7]


@pytest.mark.parametrize(("error", "unreadable", "errors"), [(torch.OutOfMemoryError, 2, 0), (RuntimeError, 0, 1)])
def test_a_list_that_cannot_be_measured_costs_its_rows_alone(elsewhere, monkeypatch, caplog, error, unreadable, errors):
    def fail(*arguments):
        raise error("it is broken")

    case = Case(on_error="log")
    monkeypatch.setattr(Recorder, "_measure_list", fail)
    case.recorder.receive_all([(WEIGHTS, X, path, None) for path in "ab"] + [(WEIGHTS, X.long(), "c", None)])
    assert case.recorder.unreadable == {(WEIGHTS, path) for path in "ab"[:unreadable]}
    assert case.bus.error_guard.errors == errors
    assert ("the device has no memory to measure it" in caplog.text) is bool(unreadable)
    assert ("measuring parameters on cpu" in caplog.text) is bool(errors)
    assert {path for *_, path in means(case)} == {"c"}
    case.bus.close()


def test_a_tensor_with_a_measurer_or_of_another_class_or_place_is_measured_alone(elsewhere, monkeypatch):
    monkeypatch.setattr(Recorder, "_measure_list", lambda *arguments: 1 / 0)
    case = Case(seeing := Seeing("activations"))
    sub = X.as_subclass(type("Sub", (Tensor,), {}))
    case.recorder.receive_all(
        [(ACTIVATIONS, X, "a", None), (WEIGHTS, sub, "b", None), (WEIGHTS, X.to("meta"), "c", None)]
    )
    assert len(seeing.calls) == 1
    assert case.recorder.unreadable == {(WEIGHTS, "c")}
    assert {path for *_, path in means(case)} == {"a", "b"}
    case.bus.close()


def test_the_lists_of_the_host_are_those_of_a_part_if_kernels_can_read_tensors(case):
    lists = case.recorder.host_lists(2)
    if case.recorder.kernels is None:
        assert lists is None
        return
    assert lists == (case.recorder.kernels, case.recorder.rows.part(2).host, case.recorder.generator)
    assert case.recorder.rows.part(2).host is not case.recorder.rows.part(0).host
    case.recorder.kernels = SimpleNamespace(reader=None)
    assert case.recorder.host_lists() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("measures", [False, True])
def test_a_difference_overwrites_what_is_subtracted_only_where_that_is_wide_enough(dtype, measures):
    seeing = Seeing("weights")
    case = Case(*[seeing] * measures)
    before, after = torch.full((3,), 2.0, dtype=dtype), X.to(dtype)
    case.recorder.receive_difference(WEIGHTS, after, before, "")
    assert seeing.calls == [("", [(X - 2).tolist()], *PLAIN)] * measures
    assert after.tolist() == X.tolist()
    assert means(case) == {("weights", "fc", ""): (3, pytest.approx(-7 / 3))}
    case.bus.close()


def test_samples_of_histograms_are_drawn_from_a_source_of_their_own():
    class Sampling(Collecting):
        fields = ("sampled_codes",)

    x, found = torch.randn(2 * WORTH_SAMPLING, generator=torch.Generator().manual_seed(1)), []
    for _ in range(2):
        case = Case(Sampling("activations", records := {}))
        torch.manual_seed(5)
        state = torch.get_rng_state()
        case.recorder.receive(ACTIVATIONS, x, "", weight=1)
        assert torch.equal(state, torch.get_rng_state())
        case.close()
        found.append(records["activations"].sampled_codes)
        case.bus.close()
    source = torch.Generator().manual_seed(0)
    expected = measure(x, needed_fields(("sampled_codes",)), source).sampled_codes
    assert (found[0] == expected).all()
    assert (found[1] == expected).all()
