"""Histograms of float codes on a device: the counts of the host, with few launches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ikkuna.export import Exporter
from ikkuna.export.subscriber import HistogramSubscriber, PercentileSubscriber
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.device import DeviceStatistics, buffers, statistics, triton_launcher
from ikkuna.numerics.statistics.float_code import WORTH_SAMPLING, codes, draw_seed, sampled_codes
from ikkuna.numerics.statistics.histogram import Buckets
from ikkuna.numerics.statistics.native import library
from ikkuna.testing import RecordingBackend
from tests.accelerator.models import MODELS, train
from tests.simulated_device import Stream, memory, recorded
from tests.simulated_device.reference_kernels import mixed
from tests.statistics_record import row_record

pytestmark = pytest.mark.simulated

BOTH = needed_fields(["codes", "sampled_codes", "sumsq"])
LARGE = WORTH_SAMPLING + 4321


def special(n, dtype=torch.float32):
    x = torch.randn(n, device="cpu") * torch.randn(n, device="cpu").mul(20).exp()
    odd = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-40, 6e-8], device="cpu")
    return torch.cat((odd, x))[:n].to(dtype)


def generator():
    return torch.Generator("cpu").manual_seed(7)


def new():
    return DeviceStatistics(torch.device("sim", 0))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_elements_have_the_codes_of_the_host(dtype):
    x = special(40_000, dtype)
    for host in (x, x.view(100, 400).t(), x[3:], x[::2]):
        device, found = host.to("sim"), new()
        device = device.as_strided(host.shape, host.stride()) if host.is_contiguous() else device
        found.add(0, device, BOTH)
        found.add(0, device, BOTH)
        record = row_record(found, 0, BOTH)
        assert (record.codes == 2 * codes(host).numpy()).all()
        assert (record.sampled_codes == record.codes).all()
        assert record.n == 2 * host.numel()


@pytest.mark.usefixtures("kernels")
def test_a_sample_has_the_codes_of_the_native_kernels():
    x, found = special(LARGE), new()
    source, again = generator(), generator()
    for _ in range(2):
        found.add(5, x.to("sim"), BOTH, generator=source)
    expected = sum(sampled_codes(x, again).numpy() for _ in range(2))
    assert (row_record(found, 5, BOTH).sampled_codes == expected).all()
    assert (row_record(found, 5, BOTH).codes == 2 * codes(x).numpy()).all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("are_differences", [False, True])
def test_a_list_counts_small_tensors_completely_and_draws_from_large_ones(are_differences):
    host = [special(n) for n in (10, 0, LARGE, 3000)]
    others = [torch.randn(x.shape, device="cpu") for x in host]
    found, device = new(), [x.to("sim") for x in host]
    with recorded() as log:
        if are_differences:
            found.add_differences(range(4), device, [y.to("sim") for y in others], BOTH, generator())
        else:
            found.add_all(range(4), device, BOTH, generator())
    assert [entry.name for entry in log if entry.kind == "launch" and entry.name != "copy_"][-2:] == [
        *("measure_list", "sample_list")
    ]
    wanted = [x - y for x, y in zip(host, others, strict=True)] if are_differences else host
    for i in (0, 2, 3):
        assert (row_record(found, i, BOTH).codes == codes(wanted[i]).numpy()).all(), i
    for i in (0, 3):
        assert (row_record(found, i, BOTH).sampled_codes == codes(wanted[i]).numpy()).all()
    expected = torch.empty(4096, dtype=torch.int64, device="cpu")
    library().sampled_codes(wanted[2], 3, expected, mixed(draw_seed(generator()) + 2))
    assert (row_record(found, 2, BOTH).sampled_codes == expected.numpy()).all()


@pytest.mark.usefixtures("kernels")
def test_parts_are_merged_and_dropped(monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_COUNTS", 4)
    monkeypatch.setattr(buffers, "_FIRST_CAPACITY", 2)
    x, small = special(LARGE), special(50)
    whole, part, dropped = new(), new(), new()
    for found in (whole, part, dropped):
        for row in range(3):
            found.add(row, x.to("sim"), BOTH)
            found.add(row, small.to("sim"), BOTH)
    dropped.clear()
    part.clear([1])
    whole.merge(part)
    whole.merge(dropped)
    taken, on_device = whole.take()
    arrays = {name: tensor.cpu().numpy() for name, tensor in taken.tensors.items()}
    found = taken.codes(arrays)
    once = {"codes": codes(x) + codes(small), "sampled_codes": sampled_codes(x) + codes(small)}
    for row, times in ((0, 2), (1, 1), (2, 2)):
        for name, expected in once.items():
            total = found.get(row, {}).get(name, 0) + on_device.get(row, {}).get(name, torch.zeros(4096)).cpu().numpy()
            assert (total == times * expected.numpy()).all(), (row, name)
    assert not len(whole._kernels.counts)


@pytest.mark.usefixtures("kernels")
def test_counts_that_might_not_fit_into_32_bits_go_to_another_histogram(monkeypatch):
    monkeypatch.setattr(buffers, "_LIMIT", 100)
    found, x = new(), torch.ones(60)
    for _ in range(3):
        found.add(0, x, BOTH)
    assert len(found._kernels.counts) == 3
    assert row_record(found, 0, BOTH).codes.max() == 180


@pytest.mark.usefixtures("kernels")
def test_each_stream_has_its_own_histograms():
    """They are cleared on the stream that counts."""
    found, side = new(), Stream()
    found.add(0, torch.ones(10), BOTH)
    with torch.sim.stream(side):
        found.add(0, torch.ones(10), BOTH)
    taken, _ = found.take()
    assert taken.codes({"counts": taken.tensors["counts"].cpu().numpy()})[0]["codes"].sum() == 20


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "failing", ["measure_one", "sample_one", "sample_list", "measure_list", "merge_codes", "merge_rows"]
)
def test_a_kernel_that_fails_costs_no_value(monkeypatch, failing):
    launch = triton_launcher.launch

    def fails(kernel, *args, **kwargs):
        if kernel.__name__ == failing:
            raise RuntimeError("no compiler")
        launch(kernel, *args, **kwargs)

    found, x, small = new(), special(LARGE), special(100)
    monkeypatch.setattr(triton_launcher, "launch", fails)
    found.add(0, x.to("sim"), BOTH)
    found.add_all((1, 2), [x.to("sim"), small.to("sim")], BOTH)
    taken, on_device = found.take()
    found._kernels.kernels.works = True
    arrays = {name: tensor.cpu().numpy() for name, tensor in taken.tensors.items()}
    counted = taken.codes(arrays)
    for row, host in ((0, x), (1, x), (2, small)):
        exact = counted.get(row, {}).get("codes", 0)
        more = on_device.get(row, {}).get("codes")
        assert (exact + (0 if more is None else more.cpu().numpy()) == codes(host).numpy()).all()
    rows, values = taken.rows({name: array.astype(np.float64) for name, array in arrays.items()})
    assert sorted(rows) == [0, 1, 2]
    by_row = dict(zip(rows, values[:, 0].tolist(), strict=True))
    assert by_row == {0: LARGE, 1: LARGE, 2: 100}


@pytest.mark.parametrize("with_kernels", [False, True])
def test_percentiles_and_histograms_of_a_training_are_those_of_the_host(bus, request, with_kernels):
    if with_kernels:
        request.getfixturevalue("kernels")

    def values(device):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, inputs, labels = MODELS["mlp"]()
        model.to(device)
        optimizer, recording = torch.optim.SGD(model.parameters(), lr=0.1), RecordingBackend()
        with Exporter(message_bus=bus, on_error="raise") as exporter:
            exporter.add_modules(model)
            for kind in ("activations", "weights", "weight_updates", "weight_gradients"):
                bus.register_subscriber(HistogramSubscriber(kind, exact=True, subsample=1, backend=recording))
                bus.register_subscriber(PercentileSubscriber(kind, subsample=1, backend=recording))
            for _ in range(2):
                train(model, optimizer, inputs.to(device), labels.to(device))
        return {(s.kind, s.name, step): value for s, value, step in recording.values}

    def counts(found):
        return {key: replace(v, sum=0.0, sum_squares=0.0) if isinstance(v, Buckets) else v for key, v in found.items()}

    on_device, on_host = values("sim"), values("cpu")
    assert repr(counts(on_device)) == repr(counts(on_host))
    histograms = [key for key, value in on_host.items() if isinstance(value, Buckets)]
    assert len(on_device) > 50
    assert histograms
    for key in histograms:  # the sums of the elements are added in another order
        tolerance = 1e-5 * (on_host[key].num * on_host[key].sum_squares) ** 0.5
        assert on_device[key].sum == pytest.approx(on_host[key].sum, abs=tolerance)
        assert on_device[key].sum_squares == pytest.approx(on_host[key].sum_squares, rel=1e-5)


def test_operators_count_codes_in_ten_launches_and_64_mib():
    """Without kernels: the code, its index and the count of each element, of at most 2**22 elements at a time."""
    for dtype, launches in ((torch.float32, 8), (torch.bfloat16, 9), (torch.float16, 9), (torch.float64, 9)):
        x = torch.ones(1000, dtype=dtype)
        codes(x)
        with recorded() as log:
            codes(x)
        assert log.launches <= launches, [entry.name for entry in log]
        assert log.count("sync") == 0
    x = torch.ones(9_000_000)
    memory.peak = used = memory.used
    codes(x)
    assert memory.peak - used <= 64 << 20


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_elements_that_must_be_converted_take_64_mib(dtype):
    """Statistics and codes of 9 million elements; in one piece, float64 alone would take 72 MiB."""
    n = 9_000_000
    x = torch.zeros(n, dtype=torch.uint8, device="cpu").to(dtype).to("sim")
    found = new()
    memory.peak = used = memory.used
    found.add(0, x, BOTH)
    assert memory.peak - used <= 64 << 20
    record = row_record(found, 0, BOTH)
    assert (record.n, record.codes[2048]) == (n, n)
