"""A device without float64: rows, kinds and metrics have the values of the host."""

import math

import numpy as np
import pytest
import torch

from ikkuna.export import Exporter
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.statistics import FIELDS, needed_fields
from ikkuna.numerics.statistics.device import DeviceStatistics, exact
from ikkuna.numerics.statistics.device.exact import exact_sums, sum_of
from tests.accelerator.test_waiting import Run, always, close, values_on_host
from tests.numerics.test_measure import reference
from tests.simulated_device import memory, recorded
from tests.statistics_record import row_record

pytestmark = pytest.mark.simulated

ALL = needed_fields([name for name in FIELDS if "codes" not in name])
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0]
POWER = {"center": 1, "m2": 2, "m3": 3, "m4": 4, "l1": 1, "sumsq": 2}


@pytest.fixture(autouse=True)
def host_by_default():
    torch.set_default_device("cpu")
    yield
    torch.set_default_device("sim")


def numbers(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


DATA = {
    "normal": lambda: numbers(5000),
    "small": lambda: numbers(5000) * 1e-25,
    "large": lambda: numbers(5000) * 1e19,
    "offset": lambda: numbers(5000) + 1e6,
    "negative offset": lambda: numbers(70_000) * 1e-3 - 1e3,
    "skewed": lambda: numbers(5000).exp(),
    "an outlier": lambda: torch.cat((torch.full((9999,), 1e-6), torch.tensor([1.0]))),
    "one": lambda: torch.tensor([-7.5]),
    "constant": lambda: torch.full((4097,), 1 / 3),
    "not finite": lambda: torch.cat((torch.tensor(ODD), numbers(100))),
    "not finite alone": lambda: torch.tensor([math.inf, math.nan]),
    "zeros": lambda: torch.zeros(10),
    "half": lambda: numbers(5000).half() + 100,
    "bfloat16": lambda: (numbers(5000) * 1e30).bfloat16(),
    "integers": lambda: torch.arange(-50, 7000),
    "booleans": lambda: torch.arange(100) % 3 == 0,
    "complex": lambda: torch.complex(numbers(5000), numbers(5000, 1)),
    "several chunks": lambda: numbers(600_000) + 3,
}


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("name", DATA)
def test_rows_are_those_of_float64(name):
    x = DATA[name]()
    statistics = DeviceStatistics(torch.device("sim", 0))
    statistics._exact.add(0, x.to("sim"), ALL)
    record, values = row_record(statistics, 0, ALL), (x.abs() if x.is_complex() else x).double()
    expected = reference(values)
    size = np.sqrt(expected["m2"] / max(len(values), 1))  # of a deviation
    for field, value in expected.items():
        found = getattr(record, field)
        slack = 1e-6 * expected["n"] * size ** POWER[field] if field in ("m3", "center") else 0
        assert found == pytest.approx(value, rel=1e-6, abs=slack, nan_ok=True), field


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize(("weight", "as_tensor"), [(3, False), (2**24 + 1, True), (0.5, True)])
def test_a_row_is_weighted(weight, as_tensor):
    statistics, x = DeviceStatistics(torch.device("sim", 0)), torch.tensor([1.0, 4.0])
    statistics.add(0, x.to("sim"), ALL, torch.tensor(weight).to("sim") if as_tensor else weight)
    record = row_record(statistics, 0, ALL)
    assert (record.sumsq, record.center, record.m2) == (17 * weight, 2.5, 4.5 * weight)


@pytest.mark.usefixtures("without_float64")
def test_a_chunk_takes_32_mib_and_no_synchronisation():
    x = numbers(1 << 20).to("sim")
    statistics = DeviceStatistics(torch.device("sim", 0))
    memory.peak = used = memory.used
    with recorded() as log:
        statistics._exact.add(0, x, ALL)
    assert memory.peak - used <= 32 << 20
    assert log.count("sync") == 0
    assert log.launches <= 145 * 4


def test_sums_are_exact_in_any_order():
    terms = (numbers(100_000) * torch.logspace(0, -11, 100_000)).clamp(-1, 1)
    expected = math.fsum(terms.tolist())
    for order in (torch.arange(100_000), torch.randperm(100_000, generator=torch.Generator().manual_seed(0))):
        found = sum_of(exact_sums(terms[order][None])[0].tolist())
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-13)


@pytest.mark.usefixtures("like_mps")
@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("conv-bn-dropout", "attention"))]
)
def test_every_metric_has_the_values_of_the_host(name):
    found, expected = Run(name, "sim", always).values(), values_on_host(name)
    assert found.keys() == expected.keys()
    wrong = {key: (found[key], value) for key, value in expected.items() if not close(key, found[key], value)}
    assert not wrong


@pytest.mark.slow
def test_every_metric_of_an_lstm_has_the_values_of_a_device_with_float64(request):
    """The host computes an LSTM by other operators, whose bits differ."""
    expected = Run("lstm", "sim", always).values()
    request.getfixturevalue("like_mps")
    found = Run("lstm", "sim", always).values()
    assert found.keys() == expected.keys()
    wrong = {key: (found[key], value) for key, value in expected.items() if not close(key, found[key], value)}
    assert not wrong


class SpreadSubscriber(PlotSubscriber):
    """Measures the spread of outputs on the device, or of a copy on the host."""

    merge = "max"

    def __init__(self, needs_float64, **options):
        super().__init__("activations", publishes="spread", **options)
        self.needs_float64 = needs_float64
        self.devices, self.dtypes = set(), []

    def measure(self, message):
        self.devices.add(message.data.device.type)
        return (message.data.amax() - message.data.amin()).reshape(1)

    def compute(self, message):
        self.dtypes.append(message.data.dtype)
        self.emit(message, message.data[0])


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("needs_float64", [True, False])
def test_a_metric_gets_a_copy_on_the_host_if_it_needs_float64(bus, needs_float64):
    spread, layer = SpreadSubscriber(needs_float64, backend="null"), torch.nn.Linear(3, 3).to("sim")
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(layer)
        bus.register_subscriber(spread)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.ones(2, 3).to("sim")
        with recorded() as log:
            layer(x).sum().backward()
            optimizer.step()
    assert spread.devices == {"cpu" if needs_float64 else "sim"}
    assert spread.dtypes == [np.float64]
    assert bool(log.waits) == needs_float64


@pytest.mark.parametrize("has_float64", [True, False])
def test_rows_of_many_calls_are_merged(request, monkeypatch, has_float64):
    monkeypatch.setattr(exact, "_MOST", 6)
    if not has_float64:
        request.getfixturevalue("without_float64")
    statistics, n, fields = DeviceStatistics(torch.device("sim", 0)), 20, needed_fields(["m2", "max"])
    x = numbers(n)
    on_device = x.to("sim")
    for i in range(n):
        statistics.add(i % 2, on_device[i : i + 1], fields, weight=2)
    for row in range(2):
        record, expected = row_record(statistics, row, fields), reference(x[row::2])
        assert (record.n, record.max) == (n, expected["max"])
        assert record.m2 == pytest.approx(2 * expected["m2"])
