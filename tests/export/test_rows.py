"""The recorder's rows: parts of a step that count or do not, and what becomes of losses and subscribers' own results."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ikkuna.export.messages import Message, ModuleMessage
from ikkuna.export.subscriber import Subscriber
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Finished
from ikkuna.metrics.messages.batch import MeasuredStep
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.state import DeferredRow
from ikkuna.numerics.statistics.float_code import WORTH_SAMPLING
from ikkuna.numerics.statistics.table import COLUMN
from ikkuna.observation.rows.plan import Demand, Site
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.observation.rows.rows import Rows, _are_close
from ikkuna.support.device_thread import HostCopy

STAMP = Stamp(3, 1, 0)
ACTIVATIONS, WEIGHTS, LOSS = Site("activations", "fc"), Site("weights", "fc"), Site("loss")


class Collecting(Subscriber):
    """Keeps the records that are delivered."""

    fields = ("m4", "min", "max", "l1", "sumsq", "zeros", "codes")

    def __init__(self, kind: str, records: dict[str, object]) -> None:
        super().__init__(kind)
        self.records = records

    def compute(self, message: Message) -> None:
        self.records[message.kind] = message.record


class Summing(Subscriber):
    """Measures a sum of its own."""

    def __init__(self, kind: str, merge: str = "sum", shape: tuple[int, ...] = ()) -> None:
        super().__init__(kind)
        self.merge = merge
        self.values: list[float] = []
        self.stamps: list[Stamp] = []

    def measure(self, message: ModuleMessage) -> Tensor:
        self.stamps.append(message.stamp)
        return message.data.sum()

    def compute(self, message: ModuleMessage) -> None:
        self.values.append(float(message.data))


class Case:
    """A recorder with subscribers and an open step."""

    def __init__(self, *subscribers: Subscriber, on_error: str = "raise") -> None:
        self.bus = MessageBus("rows")
        self.bus.error_guard.set_policy(on_error)
        self.records: dict[str, object] = {}
        collecting = (Collecting(kind, self.records) for kind in ("activations", "weights", "loss"))
        for subscriber in (*collecting, *subscribers):
            self.bus.register_subscriber(subscriber)
        self.recorder = Recorder(self.bus.error_guard)
        self.open()

    def open(self) -> None:
        self.recorder.open(STAMP, Demand(self.bus).of(STAMP))

    def see(self, values: list[float] | float, part: int = 0, site: Site = ACTIVATIONS, **options: object) -> None:
        self.recorder.receive(site, torch.tensor(values), "", part=part, **options)

    def close(self, parts: tuple[int, ...] = ()) -> dict[str, object]:
        rows = self.recorder.close(parts)
        assert rows is not None
        return self.deliver(rows)

    def deliver(self, rows: Rows) -> dict[str, object]:
        self.records.clear()
        Finished(rows, None).deliver(self.bus)
        return dict(self.records)


@pytest.fixture
def summing() -> Summing:
    return Summing("activations")


@pytest.fixture
def case(summing: Summing) -> Iterator[Case]:
    case = Case(summing)
    yield case
    case.bus.close()


def test_only_part_0_is_delivered(case, summing):
    case.see([1.0, 2.0])
    case.see([100.0], part=2)
    record = case.close()["activations"]
    assert (record.n, record.mean, record.codes.sum()) == (2, 1.5, 2)
    assert summing.values == [3.0]


def test_parts_that_count_are_merged_when_the_step_closes(case, summing):
    case.see([1.0, 2.0], part=1)
    case.see([6.0], part=2)
    case.see([1e6], part=3)
    case.see([5.0], site=WEIGHTS)
    found = case.close((1, 2))
    assert (found["activations"].n, found["activations"].mean, found["activations"].m2) == (3, 3.0, 14.0)
    assert found["activations"].codes.sum() == 3
    assert found["weights"].mean == 5.0
    assert summing.values == [9.0]


def test_a_merged_part_is_empty_and_may_be_filled_again(case, summing):
    case.see([1.0], part=2)
    case.recorder.rows.merge_part(2, 1)
    case.see([3.0], part=2)
    case.recorder.rows.merge_part(2, 1)
    case.recorder.rows.merge_part(7, 1)
    case.see([50.0], part=2)
    record = case.close((1,))["activations"]
    assert (record.n, record.mean) == (2, 2.0)
    assert summing.values == [4.0]


def test_a_dropped_part_is_forgotten_and_its_stamp_can_be_renewed(case, summing):
    case.see([7.0], part=2)
    stamp = case.recorder.rows.stamp
    case.recorder.rows.drop_part(2)
    assert case.recorder.rows.stamp is stamp
    case.recorder.rows.renew_stamp()
    assert case.recorder.rows.stamp == stamp
    assert case.recorder.rows.stamp is not stamp
    case.see([1.0], part=2)
    record = case.close((2,))["activations"]
    assert (record.n, record.mean, record.codes.sum()) == (1, 1.0, 1)
    assert summing.values == [1.0]
    assert summing.stamps[0] is not summing.stamps[1]


def test_kinds_are_dropped_in_all_parts(case, summing):
    case.see([7.0], part=2)
    case.see([8.0])
    case.see([5.0], site=WEIGHTS)
    stamp = case.recorder.rows.stamp
    case.recorder.rows.drop(frozenset(["activations"]))
    assert case.recorder.rows.stamp == stamp
    assert case.recorder.rows.stamp is not stamp
    assert set(case.close((2,))) == {"weights"}
    assert summing.values == []


def test_split_rows_go_on_separately(case, summing):
    case.see([1.0])
    case.see([2.0], part=2)
    old = case.recorder.rows
    case.recorder.rows = old.split([2, 3])
    case.see([4.0])
    case.see([6.0], part=2)
    old.close()
    assert case.deliver(old)["activations"].mean == 1.0
    record = case.close((2,))["activations"]
    assert (record.n, record.mean) == (3, 4.0)
    assert summing.values == [1.0, 12.0]
    assert case.recorder.rows is None


def test_the_next_step_begins_with_empty_parts(case, summing):
    for value in (1.0, 2.0):
        case.see([value])
        case.see([100.0], part=2)
        assert case.close()["activations"].mean == value
        case.open()
    assert "activations" not in case.close((2,))


def test_a_row_has_the_same_number_in_all_steps(case):
    rows = set()
    for _ in range(3):
        case.see([1.0], site=WEIGHTS)
        case.see([1.0])
        rows.add(tuple(case.recorder.rows.index.keys))
        case.close()
        case.open()
    assert len(rows) == 1


def test_more_sites_than_the_table_had_rows(case):
    sites = [Site("activations", f"layer{i}") for i in range(500)]
    for part in (0, 2):
        for i, site in enumerate(sites):
            case.see([float(i), i + 2.0 * part], part, site)
    rows = case.recorder.close((2,))
    rows.complete()
    assert rows.values[rows.measured_rows(), COLUMN["mean"]].tolist() == [i + 1.0 for i in range(500)]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(2.0, 4), (5.0, 2)], 3.0),
        ([(2.0, 0.5), (5.0, 0.25)], 3.0),
        ([(2.0, torch.tensor(4)), (5.0, torch.tensor(2))], 3.0),
        ([(2.0, "sum"), (5.0, "sum")], 7.0),
        ([(2.0, 0), (5.0, 3)], 5.0),
        ([(math.inf, 4), (5.0, 2)], math.nan),
        ([(math.nan, "sum"), (5.0, "sum")], math.nan),
        ([(math.nan, 4), (math.inf, 2)], math.nan),
        ([(math.nan, 2), (math.inf, 2)], math.nan),
        ([(math.nan, "sum"), (math.inf, "sum")], math.nan),
        ([(2.0, "total"), (5.0, "total"), (8.0, "total")], 15.0),
        ([(math.inf, "total"), (5.0, "total")], math.nan),
        ([(math.nan, "total"), (math.inf, "total")], math.nan),
    ],
)
@pytest.mark.parametrize("part", [0, 2])
def test_the_calls_of_a_loss_become_one_number(case, calls, expected, part):
    for value, weight in calls:
        case.see(value, part, LOSS, weight=weight)
    record = case.close((2,))["loss"]
    assert (record.n, record.mean) == (1, pytest.approx(expected, nan_ok=True))
    assert record.l2_norm == pytest.approx(abs(expected), nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_difference_is_computed_in_at_least_float32(case, dtype):
    before = torch.linspace(-1, 1, 300).to(dtype)
    after = before * 0.3 + 0.01  # the difference of close numbers is exact in any dtype
    want = (after.double() - before.double()).norm().item()
    case.recorder.receive_difference(WEIGHTS, after, before.clone(), "")
    assert case.close()["weights"].l2_norm == pytest.approx(want, rel=1e-5)


def test_results_that_do_not_merge_are_an_error_of_the_subscriber():
    class Growing(Summing):
        def measure(self, message: ModuleMessage) -> Tensor:
            return message.data

    growing = Growing("activations")
    case = Case(growing, on_error="log")
    case.see([1.0, 2.0])
    case.see([1.0, 2.0, 3.0], part=2)
    assert case.close((2,))["activations"].n == 5
    assert case.bus.error_guard.errors == 2, "the merge, and the computation with two numbers"


@pytest.mark.fault(220)
def test_a_measurement_must_be_a_tensor():
    class Returning(Summing):
        def measure(self, message: ModuleMessage) -> Tensor:
            return 1.0  # type: ignore[return-value]

    case = Case(Returning("activations"))
    with pytest.raises(TypeError, match="measure must return a Tensor, a DeferredRow or None, got float"):
        case.see([1.0])


def test_tensors_of_a_device_are_copied_with_all_their_digits():
    given = [
        torch.tensor(2**60 + 1),
        torch.ones(2, 3),
        torch.empty(0),
        torch.tensor([True]),
        torch.full((2,), math.pi).double(),
    ]
    copy = HostCopy(given)
    assert copy.arrived()
    for array, tensor in zip(copy.arrays(), given, strict=True):
        assert array.shape == tensor.shape
        assert array.tolist() == tensor.tolist()


def test_a_step_on_several_devices_is_merged(monkeypatch):
    """Tensors that say they are elsewhere, as on a device; the host has others of the same site."""
    case = Case(summing := Summing("activations"))
    case.see([1.0, 2.0])
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    case.see([6.0])
    case.see([1e4, 1e4 + 2], site=WEIGHTS)
    monkeypatch.undo()
    case.see([3.0])
    found = case.close()
    assert (found["activations"].n, found["activations"].mean, found["activations"].m2) == (4, 3.0, 14.0)
    assert found["activations"].codes.sum() == 4
    assert (found["weights"].mean, found["weights"].m2, found["weights"].m4) == (1e4 + 1, 2.0, 2.0)
    assert summing.values == [12.0]


def test_a_scalers_flag_skips_the_step(case):
    case.recorder.rows.note_overflow(torch.zeros(1))
    case.recorder.rows.note_overflow(torch.ones(()))
    rows = case.recorder.close()
    rows.load()
    assert rows.skipped


@pytest.mark.parametrize("flags", [(0.0,), (1.0,), (0.0, 1.0), (1.0, 0.0)])
def test_the_flags_of_a_device_arrive_with_the_step(case, flags, monkeypatch):
    class Flags(Copy):
        def arrays(self):
            return [np.asarray(flag) for flag in flags]

    monkeypatch.setattr("ikkuna.observation.rows.rows.HostCopy", Flags)
    for _ in flags:
        case.recorder.rows.note_overflow(torch.empty((), device="meta"))
    rows = case.recorder.close()
    assert [rows.arrived(), rows.arrived()] == [False, True]
    rows.load()
    assert rows.skipped is any(flags)


def test_parts_are_used_again_in_later_steps(case):
    case.see([1.0], part=2)
    used = {id(case.recorder.rows.part(number)) for number in (0, 2)}
    case.close((2,))
    case.open()
    assert {id(case.recorder.rows.part(number)) for number in (1, 3)} == used


def test_a_device_whose_measurements_cannot_be_merged_is_reported_and_begins_anew(monkeypatch):
    from ikkuna.numerics.statistics.device.statistics import DeviceStatistics

    def see(value, is_on_device):
        with monkeypatch.context() as patched:
            if is_on_device:
                patched.setattr(torch.Tensor, "is_cpu", False)
            case.see([value])

    case = Case(on_error="log")
    see(1.0, True)
    see(3.0, False)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceStatistics, "take", lambda statistics: 1 / 0)
        assert case.close()["activations"].mean == 3.0
    assert case.bus.error_guard.errors == 1
    case.open()
    see(5.0, True)
    record = case.close()["activations"]
    assert (record.n, record.mean) == (1, 5.0)
    case.bus.close()


def test_rows_that_are_computed_later_are_awaited(monkeypatch):
    class Computed:
        """The result of a thread, which is there at the second question."""

        asked = 0

        def arrived(self):
            self.asked += 1
            return self.asked > 1

        def result(self):
            return [torch.tensor([7.0])]

    monkeypatch.setattr("ikkuna.observation.rows.rows.run_beside", lambda *arguments: Computed())
    case = Case(Summing("activations", merge="last"))
    rows = case.recorder.rows
    registered = case.bus.registered[-1]
    rows.part(0).measured = {0: {registered: DeferredRow(torch.tensor([3.0]), lambda stack: stack)}}
    case.recorder.close()
    assert [rows.arrived(), rows.arrived()] == [False, True]
    rows.load()
    assert rows.measured[0][registered].tolist() == [7.0]
    assert rows.arrived()
    case.bus.close()


def test_nothing_is_repeated_in_a_step_without_measurements(case):
    rows = case.recorder.rows
    rows.drop_if_equal(LOSS, "whole", "")
    case.recorder.close().complete()
    assert rows.measured_rows() == []


class Together(Subscriber):
    """Measures a loss and an output together."""

    def __init__(self) -> None:
        super().__init__(["loss", "network_output"], join=True)
        self.values: list[float] = []

    def measure(self, message: object) -> Tensor:
        return message["loss"].data + message["network_output"].data.sum()  # type: ignore[index]

    def compute(self, message: object) -> None:
        self.values.append(float(message.data))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dropped", "values"), [([], [6.0]), (["loss"], []), (["weights"], [6.0]), (["loss", "weights"], [])]
)
def test_what_was_measured_together_is_dropped_with_its_first_kind(dropped, values):
    case = Case(together := Together(), summing := Summing("biases"))
    for part in (0, 2):
        case.recorder.receive_together(
            {"loss": torch.tensor(1.0), "network_output": torch.tensor([2.0, 3.0])}, part=part
        )
    case.see([5.0], site=Site("biases", "fc"))
    rows = case.recorder.rows
    rows.drop_part(2)
    if dropped:
        rows.drop(frozenset(dropped))
    case.close()
    assert (together.values, summing.values) == (values, [5.0])
    assert rows.measured_rows() == [0]
    assert rows.discard() == 1 + len(values)
    assert rows.discard() == 0
    case.bus.close()


class Sometimes(Subscriber):
    """Measures every second tensor, and reads a statistic of all of them if `fields` has one."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields
        super().__init__("weights")
        self.found: list[object] = []

    def measure(self, message: ModuleMessage) -> Tensor | None:
        return message.data.sum() if message.path == "a" else None

    def compute(self, message: ModuleMessage) -> None:
        data = None if message.data is None else float(message.data)
        self.found.append((message.path, data, message.record.mean if self.fields else None))


def test_a_subscriber_that_did_not_measure_a_tensor_reads_its_statistics_alone():
    case = Case(reading := Sometimes("m4"), measuring := Sometimes())
    for path, value in (("a", 2.0), ("b", 4.0)):
        case.recorder.receive(WEIGHTS, torch.tensor([value]), path)
    case.close()
    assert reading.found == [("a", 2.0, 2.0), ("b", None, 4.0)]
    assert measuring.found == [("a", 2.0, None)]
    case.bus.close()


def test_a_row_has_the_fields_that_subscribers_of_its_kind_read(case, summing):
    case.see([1.0])
    case.see([1.0], site=WEIGHTS)
    rows = case.recorder.rows
    case.recorder.index.row(Site("biases", "fc"), "")
    fields = [rows.fields(row) for row in range(3)]
    assert fields[:2] == [registered.fields for registered in case.bus.registered[:2]]
    assert fields[2] == frozenset()
    case.close()


def test_the_rows_of_ranks_are_read_with_those_of_all_and_tables_are_not_written(case):
    records = []

    class RanksSubscriber(Collecting):
        def compute_batch(self, batch):
            records.append(batch.statistics)

    case.bus.register_subscriber(RanksSubscriber("weights", {}))
    case.open()
    case.see([1.0], site=WEIGHTS)
    rows = case.recorder.close()
    row = rows.index.row(WEIGHTS, "")
    merged = Ranks()
    merged.merge_into = lambda rows: rows.ranks.update({row: (rows.values[row].copy(), None)})
    rows.rank_merge = merged
    case.deliver(rows)
    (found,) = records
    first, second = found[0].ranks
    assert (first.mean, second) == (1.0, None)
    with pytest.raises(ValueError, match="read-only"):
        found.table[0, 0] = 1.0


AFTER, BEFORE = torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0])
WAYS = {
    "a tensor": (lambda r: r.receive(WEIGHTS, AFTER, ""), 4.0),
    "a list": (lambda r: r.receive_all([(WEIGHTS, AFTER, "", None)]), 4.0),
    "a difference": (lambda r: r.receive_difference(WEIGHTS, AFTER, BEFORE.clone(), ""), 3.0),
    "a list of differences": (lambda r: r.receive_all([(WEIGHTS, AFTER, "", BEFORE.clone())]), 3.0),
    "two dtypes": (lambda r: r.receive_all([(WEIGHTS, AFTER, "", BEFORE.bfloat16())]), 3.0),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_measures_into_the_part_that_counts(way, native):
    case = Case()
    case.recorder = Recorder(case.bus.error_guard, native)
    assert (case.recorder.kernels is not None) == native
    case.open()
    measure, mean = WAYS[way]
    measure(case.recorder)
    record = case.close()["weights"]
    assert (record.n, record.mean) == (2, mean)
    assert not case.recorder.unreadable
    case.bus.close()


@pytest.mark.parametrize("way", ["receive", "receive_difference"])
def test_an_error_in_measuring_is_counted_and_costs_its_tensor_alone(way, monkeypatch):
    case = Case(on_error="log")
    with monkeypatch.context() as patched:
        patched.setattr(case.recorder.index, "row", lambda site, path: 1 / 0)
        getattr(case.recorder, way)(WEIGHTS, *(AFTER, torch.ones(3))[: 1 + (way != "receive")], "")
    case.see([4.0])
    assert case.bus.error_guard.errors == 1
    assert set(case.close()) == {"activations"}
    case.bus.close()


@pytest.mark.parametrize("native", [True, False])
def test_each_step_draws_another_sample(native):
    class Sampling(Collecting):
        fields = ("sampled_codes",)

    records, found = {}, []
    case = Case(Sampling("activations", records))
    case.recorder = Recorder(case.bus.error_guard, native)
    x = torch.randn(2 * WORTH_SAMPLING)
    for _ in range(2):
        case.open()
        case.recorder.receive(ACTIVATIONS, x, "")
        case.close()
        found.append(records["activations"].sampled_codes)
    assert (found[0] != found[1]).any()
    case.bus.close()


@pytest.mark.parametrize("way", ["receive", "receive_difference"])
def test_a_tensor_without_numbers_is_left_out_and_said_once(case, way, caplog):
    nothing = torch.empty(2, device="meta")
    for site in (WEIGHTS, ACTIVATIONS, WEIGHTS):
        arguments = (nothing,) if way == "receive" else (nothing, nothing)
        getattr(case.recorder, way)(site, *arguments, "a.b")
    assert case.recorder.unreadable == {(WEIGHTS, "a.b"), (ACTIVATIONS, "a.b")}
    assert [line.split(" is left out: ")[1] for line in caplog.messages] == [
        "its tensors have no numbers to read; health().skipped counts such series"
    ]
    assert case.close() == {}


@pytest.mark.parametrize(
    "value", CLOSE := [0.0, 1.0, 1.000009, 1.00002, -1.0, 1e5, 1e5 + 1, 1e300, math.inf, -math.inf, math.nan]
)
@pytest.mark.parametrize("known", CLOSE)
def test_two_learning_rates_are_the_same_as_in_numpy(value, known):
    assert _are_close(value, known) == bool(np.isclose(value, known, rtol=1e-5, atol=0.0, equal_nan=True))


@pytest.mark.parametrize(("scale", "expected"), [(None, 7.0), (torch.tensor(4.0), 1.75), (torch.tensor([2.0]), 3.5)])
def test_a_total_has_its_own_path_and_loses_its_scale(case, scale, expected):
    for value in (2.0, 5.0):
        case.see(value, site=LOSS, weight="total")
    rows = case.recorder.rows
    rows.rename_total(LOSS, "", "whole", scale)
    if scale is not None:
        scale.zero_()  # a scaler goes on
    case.recorder.close().complete()
    found = {rows.index.keys[row][1]: rows.values[row, COLUMN["mean"]] for row in rows.measured_rows()}
    assert found == {"whole": expected}


@pytest.mark.parametrize(("other", "paths"), [(7.0, {""}), (7.00001, {""}), (7.1, {"", "whole"}), (None, {"whole"})])
def test_a_total_that_is_another_loss_is_left_out(case, other, paths):
    case.recorder.receive(LOSS, torch.tensor(7.0), "whole")
    if other is not None:
        case.see(other, site=LOSS)
    rows = case.recorder.rows
    rows.drop_if_equal(LOSS, "whole", "")
    case.recorder.close().complete()
    assert {rows.index.keys[row][1] for row in rows.measured_rows()} == paths


class Copy:
    """A copy of one number from a device, which arrives at the second question."""

    def __init__(self, tensors, error=None):
        self.number, self.error, self.asked = len(tensors), error, 0

    def arrived(self):
        self.asked += 1
        return self.asked > 1

    def arrays(self):
        if self.error is not None:
            raise self.error
        return [np.asarray(0.125)] * self.number


def with_rates(case):
    """Return the rows of a step with learning rates that are a number, a tensor of the host, and one of a device."""
    case.see([1.0, 2.0])
    rows = case.recorder.rows
    rows.rates = {"number": 0.5, "host": torch.tensor(0.25), "device": torch.empty((), device="meta")}
    return rows


def test_rates_on_a_device_arrive_with_the_step(case, monkeypatch):
    monkeypatch.setattr("ikkuna.observation.rows.rows.HostCopy", Copy)
    rows = with_rates(case)
    case.recorder.close()
    assert [rows.arrived(), rows.arrived()] == [False, True]
    rows.load()
    assert rows.rates == {"number": 0.5, "host": 0.25, "device": 0.125}
    assert {type(rate) for rate in rows.rates.values()} == {float}
    assert rows.arrived()
    assert case.bus.error_guard.errors == 0


@pytest.mark.parametrize("when", ["copied", "awaited"])
def test_a_device_that_fails_costs_its_own_values(when, monkeypatch, caplog):
    case, error = Case(on_error="log"), RuntimeError("the device is gone")
    if when == "awaited":
        monkeypatch.setattr("ikkuna.observation.rows.rows.HostCopy", lambda tensors: Copy(tensors, error))
    rows = with_rates(case)
    case.recorder.close()
    rows.complete()
    assert rows.rates == {"number": 0.5, "host": 0.25}
    assert rows.values[rows.measured_rows(), COLUMN["mean"]].tolist() == [1.5]
    assert case.bus.error_guard.errors == 1
    assert ("waiting for" in caplog.text, "copying the" in caplog.text) == (when == "awaited", when == "copied")
    case.bus.close()


@pytest.mark.parametrize("when", ["copied", "awaited"])
def test_a_request_of_the_user_passes_a_copy(case, when, monkeypatch):
    error = RuntimeError("the copy was interrupted")
    error.__cause__ = KeyboardInterrupt()

    def copy(tensors):
        if when == "copied":
            raise error
        return Copy(tensors, error)

    monkeypatch.setattr("ikkuna.observation.rows.rows.HostCopy", copy)
    rows = with_rates(case)
    with pytest.raises(KeyboardInterrupt):
        (case.recorder.close(), rows.load())
    assert case.bus.error_guard.errors == 0


def test_rows_that_are_computed_later_fail_alone():
    """A result that is no decomposition, and one that is."""
    case = Case(*(subscribers := [Summing("activations", merge="last"), Summing("activations", merge="last")]))
    case.bus.error_guard.set_policy("log")
    case.see([1.0, 2.0])
    rows, computed = case.recorder.rows, [lambda stack: 1 / 0, lambda stack: stack.sum(1, keepdim=True)]
    found = []
    for i, compute in enumerate(computed):
        rows.measured = {}
        registered = next(each for each in case.bus.registered if each.subscriber is subscribers[i])
        rows.part(0).measured = {0: {registered: DeferredRow(torch.tensor([3.0, 4.0]), compute)}}
        case.recorder.close()
        rows.load()
        found.append([array.tolist() for array in rows.measured[0].values()])
        case.open()
        rows = case.recorder.rows
    assert found == [[], [[7.0]]]
    assert case.bus.error_guard.errors == 1
    case.bus.close()


def test_discarded_rows_are_counted_and_keep_the_rates_that_are_known(case, monkeypatch):
    monkeypatch.setattr("ikkuna.observation.rows.rows.HostCopy", Copy)
    rows = with_rates(case)
    case.see([5.0], site=WEIGHTS)
    case.recorder.close()
    assert rows.discard() == 2
    assert set(rows.rates) == {"number", "host"}
    assert rows.measured_rows() == []
    assert rows.arrived()
    assert rows.discard() == 0


class Ranks:
    """Another rank, whose measurements are here at the second question."""

    def __init__(self):
        self.calls = []

    def arrived(self, rows):
        self.calls.append("arrived")
        return len(self.calls) > 1

    def merge_into(self, rows):
        self.calls.append("merged")

    def abandon(self):
        self.calls.append("abandoned")


def test_the_measurements_of_other_ranks_are_awaited_and_merged(case):
    case.see([1.0])
    rows = case.recorder.close()
    rows.abandon()  # there is no other rank
    rows.rank_merge = ranks = Ranks()
    assert [rows.arrived(), rows.arrived()] == [False, True]
    rows.complete()
    rows.abandon()
    assert ranks.calls == ["arrived", "arrived", "merged", "abandoned"]


class Both(Summing):
    """Reads statistics beside what it measures."""

    fields = ("m4",)

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.found: list[tuple[float, float]] = []

    def compute(self, message: ModuleMessage) -> None:
        self.found.append((float(message.data), message.record.mean))


def test_a_subscriber_reads_statistics_beside_what_it_measures():
    case = Case(both := Both("activations"), summing := Summing("activations"))
    case.see([1.0, 2.0])
    case.close()
    assert both.found == [(3.0, 1.5)]
    assert summing.values == [3.0]
    case.bus.close()


@pytest.mark.parametrize(("value", "is_finite"), [(1.0, True), (0.0, True), (math.nan, False), (math.inf, False)])
def test_a_step_is_plain_if_all_its_elements_are_finite_and_nothing_else_is_read(value, is_finite):
    case = Case(summing := Summing("activations"))
    case.see([value, 2.0])
    case.see([3.0], site=WEIGHTS)
    rows = case.recorder.close()
    rows.complete()
    for registered in case.bus.registered:
        step, kinds = rows.step(registered), registered.kinds
        assert step.stamp is rows.stamp
        assert step.is_plain is (is_finite and registered.subscriber is not summing)
        names = {"activations": {"fc"}, "weights": {"fc"}}.get(kinds[0], set())
        assert {name for batch in step for name in batch.names.modules} == names
        assert [batch.kind for batch in step] == [kind for kind in kinds if names]
        assert bool(step.rows) is (bool(names) and registered.subscriber is not summing)
    case.bus.close()


class Stepping(Subscriber):
    """Keeps whole steps."""

    fields = ("m4",)

    def __init__(self, *kinds: str) -> None:
        super().__init__(*kinds)
        self.found: list[object] = []

    def compute_step(self, step: MeasuredStep) -> None:
        self.found.append((step.stamp, [batch.kind for batch in step]))


def test_the_observer_sees_a_step_before_and_after_its_subscribers():
    case, calls = Case(stepping := Stepping("activations")), []

    class Observer:
        def rows_complete(self, rows: Rows, event: NetworkMessage) -> None:
            calls.append((rows.stamp, event.skipped, dict(event.data), list(stepping.found)))

        def step_delivered(self, stamp: Stamp) -> None:
            calls.append((stamp, list(stepping.found)))

    case.see([1.0, 2.0])
    case.recorder.rows.rates = {"group 0": 0.5}
    rows = case.recorder.close()
    Finished(rows, NetworkMessage(STAMP, "batch_finished", {}), Observer()).deliver(case.bus)
    seen = [(STAMP, ["activations"])]
    assert stepping.found == seen
    assert calls == [(STAMP, False, {"learning_rates": {"group 0": 0.5}}, []), (STAMP, seen)]
    case.bus.close()


class Finishing(Stepping):
    """Keeps the end of steps, too."""

    def finish(self, stamp: Stamp) -> None:
        self.found.append("end")


@pytest.mark.parametrize(("skipped", "sees", "count"), [(False, False, 2), (True, False, 0), (True, True, 2)])
def test_a_step_that_was_skipped_is_for_those_that_see_it(skipped, sees, count):
    finishing = type("SeeingSubscriber", (Finishing,), {"sees_skipped": sees})("activations")
    case, calls = Case(finishing), []

    class Observer:
        def step_delivered(self, stamp: Stamp) -> None:
            calls.append(stamp)

    case.see([1.0, 2.0])
    rows = case.recorder.close()
    rows.skipped = skipped
    Finished(rows, None, Observer()).deliver(case.bus)
    assert finishing.found == [(STAMP, ["activations"]), "end"][:count]
    assert calls == []  # another pass than training
    case.bus.close()
