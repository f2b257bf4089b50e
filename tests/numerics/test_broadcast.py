"""Broadcast and overlapping tensors are measured without a copy of all their elements."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber, PrecisionSubscriber
from ikkuna.numerics.elements import pieces, without_repeats
from ikkuna.numerics.layers import active_units, count_saturated, unit_counters
from ikkuna.numerics.precision import count_losses
from ikkuna.numerics.statistics import FIELDS, needed_fields
from ikkuna.numerics.statistics.device import DeviceStatistics
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.testing import RecordingBackend
from tests.statistics_record import row_record

ALL = needed_fields(FIELDS)
MiB = 1 << 20

SMALL = {
    "scalar": torch.tensor(-1.5).expand(7, 9),
    "row": torch.tensor([[1.0, -2.0, 0.5]]).expand(4, 3),
    "column, permuted": torch.tensor([[1.0], [float("nan")], [3.0]]).expand(3, 5).t(),
    "two axes": torch.randn(2, 1, 3, 1, generator=torch.Generator().manual_seed(0)).expand(2, 4, 3, 5),
    "integers": torch.tensor([[3], [-4]]).expand(2, 6),
    "booleans": torch.tensor([[True], [False]]).expand(2, 6),
    "complex": torch.tensor([[3 + 4j], [1 + 0j]]).expand(2, 6),
    "bfloat16": torch.tensor([[3.0], [1.0]], dtype=torch.bfloat16).expand(2, 6),
    "overlapping": torch.arange(10.0).as_strided((4, 7), (1, 1)),
    "every second one": torch.arange(20.0)[::2],
    "no element": torch.ones(1, 3).expand(0, 3),
}


def statistics(kind):
    return DeviceStatistics(torch.device("cpu")) if kind == "device" else HostStatistics(kind == "native")


@pytest.mark.fault(316)
@pytest.mark.parametrize("kind", ["native", "numpy", "device"])
@pytest.mark.parametrize("name", SMALL)
def test_statistics_are_those_of_a_copy(name, kind):
    x = SMALL[name]
    records = []
    for tensor in (x, x.contiguous().clone()):
        rows = statistics(kind)
        rows.add(0, tensor, ALL, weight=2)
        rows.add(0, tensor, ALL)
        records.append(row_record(rows, 0, ALL))
    found, expected = records
    for field in (*(ALL - {"codes", "sampled_codes", "mean"}), "center"):
        value = getattr(expected, field)
        assert getattr(found, field) == pytest.approx(value, rel=1e-6, abs=1e-5, nan_ok=True), field
    if x.numel():
        assert (found.codes == expected.codes).all()
        assert (found.sampled_codes == expected.sampled_codes).all()


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", SMALL)
def test_pieces_are_all_elements_once(name, size):
    x = SMALL[name].real if SMALL[name].is_complex() else SMALL[name]
    parts = list(pieces(x, size))
    found, expected = (y.flatten().double().sort().values.nan_to_num(7.0) for y in (torch.cat(parts), x))
    assert torch.equal(found, expected)
    assert sum(part.numel() for part in parts) == x.numel()
    few, times = without_repeats(x)
    assert few.numel() * times == x.numel()


def peak(call):
    """Return by how many MiB the memory of this process grows in a call."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = resident("VmRSS")
    call()
    return (resident("VmHWM") - before) / 1024


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


LARGE = {
    "scalar": lambda: torch.tensor(2.0).expand(8192, 8192),
    "integer": lambda: torch.tensor(2).expand(8192, 8192),
    "half": lambda: torch.ones(1, dtype=torch.float16).expand(8192, 8192),
}


@pytest.mark.fault(316)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("kind", ["native", "numpy", "device"])
def test_67_million_elements_over_one_number(name, kind):
    """They need no memory: their copy in float64 would take 512 MiB."""
    rows, x = statistics(kind), LARGE[name]()
    assert peak(lambda: rows.add(0, x, ALL)) < 32
    record = row_record(rows, 0, ALL)
    assert record.n == record.codes.sum() == record.sampled_codes.sum() == x.numel()
    assert record.sumsq == x.numel() * float(x[0, 0]) ** 2


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("name", ["scalar", "row", "column, permuted", "two axes", "bfloat16", "every second one"])
def test_units_of_broadcast_tensors_are_those_of_their_copies(name, axis):
    x = SMALL[name]
    assert torch.equal(unit_counters(x, axis), unit_counters(x.clone().contiguous(), axis))
    assert torch.equal(active_units(x, axis), active_units(x.clone().contiguous(), axis))
    assert torch.equal(count_saturated(x, "tanh"), count_saturated(x.clone().contiguous(), "tanh"))


@pytest.mark.parametrize("count", [unit_counters, active_units, lambda x: count_saturated(x, "tanh")])
def test_units_of_67_million_elements_over_one_number(count):
    x = LARGE["scalar"]()
    assert peak(lambda: count(x)) < 32


@pytest.mark.fault(316)
@pytest.mark.parametrize("kind", ["native", "numpy", "device"])
def test_overlapping_elements_are_read_in_parts(kind):
    """A copy in float32 would take 256 MiB."""
    x = torch.arange(2.0 * 8192).as_strided((8192, 8192), (1, 1))
    rows = statistics(kind)
    fields = needed_fields(["sumsq", "m2", "codes"])
    assert peak(lambda: rows.add(0, x, fields)) < 200
    assert row_record(rows, 0, fields).center == pytest.approx(8191, rel=1e-6)


@pytest.mark.fault(316)
def test_the_largest_view_there_is():
    """The elements of 2**16 rows and columns are counted exactly."""
    rows = HostStatistics()
    rows.add(0, torch.tensor(1.0).expand(1 << 16, 1 << 16), ALL)
    assert row_record(rows, 0, ALL).n == 1 << 32
    assert row_record(rows, 0, ALL).l2_norm == 1 << 16


@pytest.mark.fault(316)
def test_a_module_that_broadcasts_its_output(bus):
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return self.scale.expand(4096, 4096)

    model, recording = nn.Sequential(Broadcast()), RecordingBackend()
    exporter = Exporter(message_bus=bus, on_error="raise")
    exporter.add_modules(model)
    for p in (1, 2, 3):
        bus.register_subscriber(NormSubscriber("activations", p=p, backend=recording))
    bus.register_subscriber(HistogramSubscriber("activations", exact=True, subsample=1, backend=recording))
    bus.register_subscriber(PrecisionSubscriber("activations", backend="null"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output = []
    assert peak(lambda: output.append(model(None))) < 32  # in float32 64 MiB
    output[0][0, 0].backward()
    optimizer.step()
    exporter.close()
    values = {series.kind: value for series, value, _ in recording.values if series.kind.startswith("activations_norm")}
    assert values == pytest.approx({f"activations_norm{p}": 3.0 * 4096 ** (2 / p) for p in (1, 2, 3)}, rel=1e-6)


@pytest.mark.fault(316)
def test_counts_of_a_format_are_those_of_a_copy():
    x = torch.tensor([[1e-9], [1.0], [1e9]]).expand(3, 7)
    assert torch.equal(count_losses(x, "fp16"), count_losses(x.contiguous(), "fp16"))
