"""Recovery finds all intact records of a damaged event file, and no others."""

import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.errors import ConfigError
from ikkuna.store import event_records
from ikkuna.store.event_records import masked_crc32c, record, recover, whole_records
from ikkuna.store.names import Series

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
STEPS = 8


@pytest.fixture
def file(tmp_path):
    backend = TensorBoardBackend()
    backend.open(tmp_path / "run")
    for step in range(STEPS):
        backend.add_scalar(Series("loss"), step / 2, step)
        backend.commit(step)
    assert backend.close()
    return backend.path


def scalars(directory):
    found = accumulators.EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in found.Scalars("Network/loss")]


def test_a_sound_file_is_read_as_it_is(file):
    assert b"".join(whole_records(file.read_bytes())) == file.read_bytes()


@pytest.mark.fault(79)
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_costs_the_record_it_is_in_and_no_other(file, bit):
    data = file.read_bytes()
    sound = list(whole_records(data))
    assert len(sound) == STEPS + 1
    ends = [sum(map(len, sound[: i + 1])) for i in range(len(sound))]
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << bit
        hit = next(i for i, end in enumerate(ends) if position < end)
        assert list(whole_records(bytes(damaged))) == sound[:hit] + sound[hit + 1 :], position


@pytest.mark.fault(79)
def test_a_missing_byte_costs_one_record(file):
    """If the byte equals its neighbour in the next record, the test cannot determine which of them is missing."""
    data = file.read_bytes()
    sound = list(whole_records(data))
    for position in range(len(data)):
        found = list(whole_records(data[:position] + data[position + 1 :]))
        assert any(found == sound[:i] + sound[i + 1 :] for i in range(len(sound))), position


@pytest.mark.fault(79)
def test_tensorboard_shows_what_was_recovered(file, tmp_path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    before = scalars(file.parent)
    (tmp_path / "clean").mkdir()
    path, records, lost = recover(file, tmp_path / "clean" / file.name)
    after = scalars(path.parent)
    assert len(before) < len(after) == STEPS - 1
    assert set(after) < {(step, step / 2) for step in range(STEPS)}
    assert records == STEPS  # the first record is the version
    assert 0 < lost < 200


def test_the_new_file_stands_beside_the_old_one_and_replaces_none(file):
    found = recover(file)
    assert found.path == file.with_name(f"{file.name}.recovered")
    assert found.path.read_bytes() == file.read_bytes()
    assert found.lost == 0
    with pytest.raises(ConfigError, match="recovered' exists; pass another name as to="):
        recover(file)


def test_what_is_no_event_file_is_refused(tmp_path):
    path = tmp_path / "events"
    path.write_bytes(b"\0" * 100 + b"no event")
    with pytest.raises(ConfigError, match="it has no intact record"):
        recover(path)


def test_a_length_beyond_the_file_is_not_believed():
    sound = record(Event(step=3).SerializeToString())
    for length in (2**31, 2**62):
        hostile = length.to_bytes(8, "little")
        hostile += masked_crc32c(hostile).to_bytes(4, "little")
        assert list(whole_records(hostile + sound)) == [sound]


@pytest.mark.fault(320)
def test_a_hostile_file_is_read_in_linear_time(monkeypatch):
    """Every record reaches to the end of the file, and its checksum is wrong."""
    count = 3000
    heads = [struct.pack("<Q", 12 * (count - i)) for i in range(count)]
    data = b"".join(head + struct.pack("<I", masked_crc32c(head)) for head in heads) + bytes(16)
    read = []
    monkeypatch.setattr(
        event_records, "masked_crc32c", lambda payload: read.append(len(payload)) or masked_crc32c(payload)
    )
    assert list(event_records.whole_records(data)) == []
    assert sum(read) < 20 * len(data)
