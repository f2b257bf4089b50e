import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from ikkuna.backends.backend import WallClock
from ikkuna.store import event_format

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def payload(record):
    """Return the payload of one record after checking its length and checksums."""
    length, check = struct.unpack("<QI", record[:12])
    body, body_check = record[12:-4], struct.unpack("<I", record[-4:])[0]
    assert len(body) == length
    assert (check, body_check) == (masked_crc32c(record[:8]), masked_crc32c(body))
    return body


@given(TEXT, st.floats(width=32, allow_nan=False), st.integers(0, 2**63 - 1), st.floats(0, 1e12))
def test_a_scalar_built_by_hand_is_the_one_of_the_protocol(tag, value, step, wall_time):
    built = event_format.step_record(event_format.scalar_prefix(tag) + event_format.float32(value), step, wall_time)
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    assert Event.FromString(payload(built)) == Event(wall_time=wall_time, step=step, summary=summary)


def test_many_values_share_one_event():
    tags = [f"weights_norm2/layer.{i}" for i in range(300)]
    entries = b"".join(event_format.scalar_prefix(tag) + event_format.float32(i) for i, tag in enumerate(tags))
    event = Event.FromString(payload(event_format.step_record(entries, 5, 1.5)))
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [(t, i) for i, t in enumerate(tags)]
    assert (event.step, event.wall_time) == (5, 1.5)


@pytest.mark.fault(80)
@pytest.mark.parametrize(
    ("value", "stored"),
    [(1e40, math.inf), (-1e40, -math.inf), (1e-50, 0.0), (2**24 + 1, 2.0**24), (math.inf, math.inf)],
)
def test_a_value_is_rounded_to_single_precision(value, stored):
    assert struct.unpack("<f", event_format.float32(value)) == (stored,)


def test_nan_is_a_value():
    [value] = Summary.FromString(event_format.scalar_prefix("a") + event_format.float32(math.nan)).value
    assert math.isnan(value.simple_value)
    assert value.WhichOneof("value") == "simple_value"


def test_a_title_travels_with_a_value():
    [value] = Summary.FromString(event_format.titled_scalar_value("a/b", 1e40, "Norm of a")).value
    assert (value.tag, value.simple_value, value.metadata.display_name) == ("a/b", math.inf, "Norm of a")


def test_a_histogram_of_arrays_is_stored():
    histogram = SimpleNamespace(
        min=-1,
        max=2.0,
        num=3,
        sum=1.0,
        sum_squares=5.0,
        bucket_limits=np.array([0, 2.0]),
        bucket_counts=np.array([1, 2]),
    )
    [value] = Summary.FromString(event_format.histogram_value("a/b", histogram)).value
    assert (value.histo.min, value.histo.max, value.histo.num, value.histo.sum_squares) == (-1.0, 2.0, 3.0, 5.0)
    assert (list(value.histo.bucket_limit), list(value.histo.bucket)) == ([0.0, 2.0], [1.0, 2.0])


def test_text_that_is_no_unicode_is_stored_all_the_same():
    [value] = Summary.FromString(event_format.text_value("a", "broken \ud800")).value
    assert value.tensor.string_val[0] == b"broken ?"
    assert value.metadata.plugin_data.plugin_name == "text"


def test_a_file_begins_with_its_version():
    event = Event.FromString(payload(event_format.EventFormat(WallClock().now).header()))
    assert event.file_version == "brain.Event:2"


@pytest.mark.fault(82)
def test_the_clock_never_runs_backwards(monkeypatch):
    clock = WallClock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    first, second = clock.now(), clock.now()
    assert 1e9 < first <= second
