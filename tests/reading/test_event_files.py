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
from ikkuna.store.event_format import float32, scalar_prefix
from ikkuna.store.event_reader import EventFile, MalformedError
from ikkuna.store.event_records import record, step_record
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


@BOTH
def test_starts_and_entries_without_a_value(is_native, tmp_path):
    """The start of a session alone replaces earlier values; a tag without a value is none."""
    path = tmp_path / "events.out.tfevents.1"
    logs = [SessionLog(status=status, checkpoint_path="x", msg="y") for status in (0, 2, 3, 1)]
    starts = [record(Event(step=step, session_log=log).SerializeToString()) for step, log in enumerate(logs)]
    only_tag = b"\x0a\x06\x0a\x04loss"
    empty = step_record(only_tag, 7, 0.0)
    path.write_bytes(packed([5]) + b"".join(starts) + empty + packed([6]) + starts[3])
    columns = EventFile(path, is_native).update()
    assert columns.steps.tolist() == [5, 6]
    assert columns.starts.tolist() == [[3, 1, 0], [3, 2, 0]]
    assert columns.others.tolist() == []
    assert (columns.lost, len(columns.tags), len(columns.value)) == (0, 20, 40)


@BOTH
def test_other_values_have_their_place_in_the_file(is_native, tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    entries = {
        kind: b"\x0a\x01" + b"abcdefgh"[kind - 1 : kind] + bytes([kind << 3 | 2, 3]) + b"xyz"
        for kind in (3, 4, 5, 6, 7, 8)
    }
    records = [
        step_record(b"\x0a" + bytes([len(entry)]) + entry, step, 0.5) for step, entry in enumerate(entries.values())
    ]
    path.write_bytes(packed([]) + b"".join(records))
    columns, data = EventFile(path, is_native).update(), path.read_bytes()
    assert columns.steps.tolist() == [0, 1, 2, 3, 5]  # the seventh field is metadata
    assert [columns.tags[tag] for tag in columns.others[:, 0].tolist()] == ["c", "d", "e", "f", "h"]
    assert columns.others[:, 1].tolist() == [0, 1, 2, 3, 4]
    assert columns.others[:, 2].tolist() == [3, 4, 5, 6, 8]
    assert [data[place : place + size] for place, size in columns.others[:, 3:].tolist()] == [
        entry for kind, entry in entries.items() if kind != 7
    ]
    assert columns.times.tolist() == [0.5] * 5


def test_python_reads_only_where_the_library_is_not_wanted():
    assert isinstance(event_reader.new_scanner(False), event_reader.PythonScanner)
    assert isinstance(event_reader.new_scanner(True), event_reader.NativeScanner) is (
        event_reader.event_library() is not None
    )


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1])
def test_a_number_of_variable_length_is_read_back(value):
    rest, data = value, b""
    while rest > 127:
        data, rest = data + bytes([rest & 127 | 128]), rest >> 7
    data += bytes([rest])
    assert event_reader.varint(b"ab" + data + b"c", 2) == (value, 2 + len(data))
    assert [*event_reader.fields(b"\x18" + data)] == [(3, value, 1)]
    with pytest.raises(MalformedError, match="incomplete"):
        event_reader.varint(data[:-1], 0)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xff" * 10 + b"\x01", "more than ten bytes"),
        (b"\x0b", "no type 3"),
        (b"\x0c", "no type 4"),
        (b"\x0f", "no type 7"),
        (b"\x0a\x04abc", "a field is incomplete"),
        (b"\x09" + b"1234567", "a field is incomplete"),
        (b"\x0d123", "a field is incomplete"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_the_reason(data, text):
    with pytest.raises(MalformedError, match=text):
        list(event_reader.fields(data))


def test_fields_of_each_type_have_their_value_and_place():
    data = b"\x09" + b"12345678" + b"\x15" + b"1234" + b"\x1a\x02ab" + b"\x22\x00"
    assert [*event_reader.fields(data)] == [(1, b"12345678", 1), (2, b"1234", 10), (3, b"ab", 16), (4, b"", 20)]
    assert event_reader.number(struct.pack("<f", 0.1)) == np.float32(0.1)
    assert event_reader.number(struct.pack("<d", 0.1)) == 0.1
    assert event_reader.floats(struct.pack("<3d", 0.1, 2.0, -1.0)) == [0.1, 2.0, -1.0]
    assert event_reader.floats(b"") == []
    for function, wrong in [(event_reader.number, (3, b"123", b"12345")), (event_reader.floats, (3, b"123456789"))]:
        for value in wrong:
            with pytest.raises(MalformedError):
                function(value)


@BOTH
def test_an_event_without_step_and_time_has_zeros(is_native, tmp_path):
    path, entry = tmp_path / "events.out.tfevents.1", scalar_prefix("loss") + float32(0.5)
    path.write_bytes(record(b"\x2a" + bytes([len(entry)]) + entry))
    columns = EventFile(path, is_native).update()
    assert (columns.steps.tolist(), columns.times.tolist(), columns.value.tolist()) == ([0], [0.0], [0.5])
