"""Event files are read as TensorBoard reads them, by the native library and by Python, also damaged and unfinished ones."""

import itertools
import random
import struct

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.scalar.summary_v2 import scalar_pb as tensor_scalar
from tensorboardX import SummaryWriter as XWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from torch import nn
from torch.utils.tensorboard import SummaryWriter as TorchWriter

import ikkuna
from ikkuna.reading import StoredRun
from ikkuna.store import event_reader
from ikkuna.store.event_format import float32, scalar_prefix, step_record
from ikkuna.store.event_reader import EventFile
from ikkuna.store.event_records import record
from ikkuna.testing import small_model

EVERY = {"size_guidance": {"scalars": 0, "histograms": 0}}
BOTH = pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
DRAW = torch.Generator().manual_seed(3)


def watched(directory):
    """A real run, with a pass over test data, histograms, images and texts."""
    from ikkuna.export.subscriber import HistogramSubscriber, LossSubscriber, NormSubscriber

    torch.manual_seed(0)
    model, loss = small_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    subscribers = NormSubscriber("weights"), LossSubscriber(), HistogramSubscriber("weights", subsample=5)
    with ikkuna.watch(model, *subscribers, loss=loss, log_dir=directory):
        for _ in range(30):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 4, generator=DRAW)), torch.randint(0, 3, (8,), generator=DRAW)).backward()
            optimizer.step()


def by_others(writer_class, **options):
    def write(directory):
        with writer_class(str(directory / "run0001"), **options) as writer:
            for step in range(40):
                writer.add_scalar("loss", 1 / (1 + step), step)
                writer.add_scalar("Train/accuracy", step / 40, step)
                writer.add_scalar("loss/test.1", float("nan") if step == 7 else step, step)
            writer.add_histogram("weights/fc", np.arange(10.0), 3)
            writer.add_text("note", "some text", 1)

    return write


def packed(steps, start=None):
    """Return an event file with 20 series, which perhaps continues an earlier one."""
    prefixes = [scalar_prefix(f"weights_norm2/features.{i}") for i in range(20)]
    parts = [record(Event(file_version="brain.Event:2").SerializeToString())]
    if start is not None:
        parts.append(record(Event(step=start, session_log=SessionLog(status=1)).SerializeToString()))
    for step in steps:
        parts.append(
            step_record(b"".join(p + float32(step * 100 + i) for i, p in enumerate(prefixes)), step, 1e9 + step)
        )
    return b"".join(parts)


def resumed(directory):
    (directory / "run0001").mkdir()
    for second, data in enumerate([packed(range(50)), packed(range(30, 60), 30), packed(range(40, 45), 40)]):
        (directory / "run0001" / f"events.out.tfevents.{second}").write_bytes(data)


def of_tensors(directory):
    (directory / "run0001").mkdir()
    records = []
    for step in range(5):
        value = tensor_scalar("accuracy", step / 5).value[0]
        message = b"\x2a" + bytes([len(body := b"\x0a" + bytes([value.ByteSize()]) + value.SerializeToString())]) + body
        records.append(record(b"\x09" + struct.pack("<d", step) + b"\x10" + bytes([step]) + message))
    (directory / "run0001" / "events.out.tfevents.1").write_bytes(b"".join(records))


RUNS = {
    "watched": watched,
    "torch": by_others(TorchWriter),
    "tensorboardX": by_others(XWriter),
    "resumed": resumed,
    "tensors": of_tensors,
}


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run_directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    RUNS[request.param](directory)
    return directory / "run0001"


def accumulated(directory):
    """Return everything that TensorBoard reads as scalars and is no summary of other series, by tag."""
    accumulator = EventAccumulator(str(directory), **EVERY).Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if not tag.startswith(("Overview/", "Dashboard/"))]
    found = {tag: [(e.step, e.wall_time, e.value) for e in accumulator.Scalars(tag)] for tag in tags}
    for tag in accumulator.Tags()["tensors"]:
        if accumulator.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            found[tag] = [(e.step, e.wall_time, e.tensor_proto.float_val[0]) for e in accumulator.Tensors(tag)]
    return found


def tag_of(kind, name, pass_name):
    kind = kind if pass_name == "training" else f"{kind}.{pass_name}"
    return f"Network/{kind}" if name is None else f"{kind}/{name}"


@BOTH
def test_every_value_is_that_of_tensorboard(run_directory, is_native):
    run, found = StoredRun(run_directory, is_native=is_native), {}
    for pass_name in run.passes():
        for kind in run.kinds(pass_name):
            for name in run.names(kind, pass_name):
                values = run.series(kind, name, pass_name)
                found[tag_of(kind, name, pass_name)] = list(
                    zip(values.steps.tolist(), values.times.tolist(), values.values.tolist(), strict=True)
                )
    expected = {tag if "/" in tag else f"Network/{tag}": values for tag, values in accumulated(run_directory).items()}
    assert found.keys() == expected.keys()
    assert len(found) >= 1
    for tag in found:
        np.testing.assert_array_equal(np.array(found[tag]), np.array(expected[tag]), err_msg=tag)
    assert (run.lost, run.waiting) == (0, 0)
    run.close()


def test_histograms_and_texts_are_those_of_tensorboard(run_directory):
    run, accumulator = StoredRun(run_directory), EventAccumulator(str(run_directory), **EVERY).Reload()
    found = {
        f"{kind}/{name}": [(step, *_fields(h)) for step, h in run.histograms(kind, name)]
        for kind in run.histogram_kinds()
        for name in run.histogram_names(kind)
    }
    assert found == {
        tag: [(e.step, *_fields(e.histogram_value)) for e in accumulator.Histograms(tag)]
        for tag in accumulator.Tags()["histograms"]
    }
    texts = [
        tag
        for tag in accumulator.Tags()["tensors"]
        if accumulator.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    ]
    assert len(run.texts) == len(texts)
    for tag in texts:
        text = accumulator.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        assert text in run.texts.values()


def _fields(h):
    limits = getattr(h, "bucket_limits", None)
    limits = h.bucket_limit if limits is None else limits
    counts = getattr(h, "bucket_counts", None)
    counts = h.bucket if counts is None else counts
    return h.min, h.max, h.num, h.sum, h.sum_squares, tuple(limits), tuple(counts)


def columns_of(path, is_native):
    """Return what a scanner reads, in a form that does not depend on the numbers of tags."""
    file = EventFile(path, is_native)
    columns = file.update()
    values = [
        (tag, int(columns.steps[event]), float(columns.times[event]), repr(float(value)))
        for tag, (begin, end) in zip(columns.tags, itertools.pairwise(columns.bounds), strict=True)
        for event, value in zip(columns.event[begin:end], columns.value[begin:end], strict=True)
    ]
    others = [(columns.tags[t], int(columns.steps[e]), *rest) for t, e, *rest in columns.others.tolist()]
    file.close()
    return values, others, columns.starts.tolist(), columns.lost, file.waiting


def damaged(data, rng):
    """Return an event file with a few faults: changed, missing, repeated and added bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 300)]
            case 3:
                data[at:at] = bytes(rng.randint(1, 30))
            case 4:
                del data[at + 1 :]
    return bytes(data)


@pytest.mark.parametrize("chunk", [1 << 25, 512])
def test_both_scanners_read_the_same_from_damaged_files(run_directory, tmp_path, chunk, monkeypatch):
    monkeypatch.setattr(event_reader, "_CHUNK", chunk)
    rng, path = random.Random(1), tmp_path / "events.out.tfevents.1"
    original = b"".join(file.read_bytes() for file in sorted(run_directory.glob("*tfevents*")))[:20_000]
    for _ in range(25):
        path.write_bytes(damaged(original, rng))
        assert columns_of(path, True) == columns_of(path, False)


@BOTH
def test_everything_behind_a_damaged_record_is_read(is_native, tmp_path):
    data, path = packed(range(10)), tmp_path / "events.out.tfevents.1"
    size = len(packed(range(1))) - len(packed([]))
    broken = bytearray(data)
    broken[len(packed([])) + 3 * size + 100] ^= 1
    path.write_bytes(broken)
    values, _, _, lost, waiting = columns_of(path, is_native)
    assert sorted({step for _, step, _, _ in values}) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert (lost, waiting) == (size, 0)


@BOTH
@pytest.mark.parametrize("chunk", [1 << 25, 300])
def test_a_file_that_grows_is_read_on(is_native, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(event_reader, "_CHUNK", chunk)
    data, path = packed(range(12)), tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"")
    run, rng = StoredRun(tmp_path, is_native=is_native), random.Random(2)
    size = 0
    while size < len(data):
        size = min(size + rng.randint(1, 2000), len(data))
        path.write_bytes(data[:size])
        run.update()
        complete = sum(len(packed(range(n + 1))) <= size for n in range(12))
        assert run.count == 20 * complete
        assert run.lost == 0
        assert (run.waiting > 0) == (size not in {len(packed(range(n))) for n in range(13)} | {0})
    assert run.series("weights_norm2", "features.3").values.tolist() == [step * 100 + 3 for step in range(12)]
    path.write_bytes(data[: len(packed(range(5)))])  # the writer has removed the end
    run.update()
    assert run.last_step == 4
    run.close()


@BOTH
@pytest.mark.parametrize("data", [b"", b"\0" * 500, b"text, no events\n" * 50, b"\xff" * 300, bytes(range(256)) * 4])
def test_a_foreign_file_has_no_values(data, is_native, tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(data)
    values, others, starts, lost, waiting = columns_of(path, is_native)
    assert not values
    assert not others
    assert not starts
    assert lost + waiting == len(data)


@BOTH
def test_a_record_that_is_no_event_is_lost_and_leaves_nothing(is_native, tmp_path):
    good = packed([1])
    event = step_record(scalar_prefix("loss") + float32(1) + b"\x0a\x7f", 2, 0.0)  # its last value is incomplete
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(good + event + good)
    values, _, _, lost, _ = columns_of(path, is_native)
    assert len(values) == 40
    assert lost == len(event)
