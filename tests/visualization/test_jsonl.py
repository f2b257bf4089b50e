import json
import math
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.reading import StoredRun
from ikkuna.store.append_file import ReplacedEnd
from ikkuna.store.json_lines import read
from ikkuna.store.names import Series
from ikkuna.store.values import Matrix


@pytest.fixture
def backend(tmp_path):
    backend = JSONLinesBackend()
    backend.open(tmp_path)
    yield backend
    backend.close(30)


def reread(backend, *additions):
    for add in additions:
        add(backend)
    backend.commit(0)
    assert backend.close(30)
    return read(backend.path)


@pytest.mark.fault(80)
@given(st.lists(st.floats(), min_size=1, max_size=20), st.text())
def test_every_bit_of_a_value_survives(tmp_path_factory, values, name):
    backend = JSONLinesBackend()
    backend.open(tmp_path_factory.mktemp("log"))
    additions = [lambda b, v=value: b.add_scalar(Series("loss", name), v, 3) for value in values]
    entries = reread(backend, *additions)
    assert [entry["module"] for entry in entries] == [name] * len(values)
    for entry, value in zip(entries, values, strict=True):
        same = struct.pack("d", entry["value"]) == struct.pack("d", value)
        assert same or math.isnan(value) == math.isnan(entry["value"]) is True


def test_an_entry_says_what_where_and_when(backend):
    [entry] = reread(backend, lambda b: b.add_scalar(Series("weights_norm2", "fc", "testing"), 0.1, 3))
    assert entry.pop("time") > 1.7e9
    assert entry == {"kind": "weights_norm2", "module": "fc", "pass": "testing", "step": 3, "value": 0.1}


def test_every_line_is_json_for_strict_readers(backend):
    def refuse(constant):
        raise AssertionError(constant)

    for value in (math.nan, math.inf, -math.inf):
        backend.add_scalar(Series("loss"), value, 0)
    backend.commit(0)
    backend.close(30)
    lines = [json.loads(line, parse_constant=refuse) for line in backend.path.read_text().splitlines()]
    assert [line["value"] for line in lines] == ["NaN", "Infinity", "-Infinity"]


def test_histograms_and_texts_are_entries(backend):
    histogram = SimpleNamespace(
        min=-math.inf, max=2.0, num=3, sum=1.0, sum_squares=5.0, bucket_limits=[0, math.inf], bucket_counts=[1, 2]
    )
    first, second = reread(
        backend,
        lambda b: b.add_histogram(Series("weights", "fc"), histogram, 0),
        lambda b: b.add_text("Model", "NaN", 0),
    )
    assert first["histogram"] == vars(histogram)
    assert (second["title"], second["text"]) == ("Model", "NaN")


@pytest.mark.fault(78)
def test_a_file_cut_anywhere_is_read_up_to_there(backend, tmp_path):
    values = [1.5, -2.25, math.inf, 1e-300]
    whole = reread(backend, *(lambda b, v=value: b.add_scalar(Series("loss"), v, 0) for value in values))
    content = backend.path.read_bytes()
    cut = tmp_path / "cut.jsonl"
    counts = []
    for size in range(len(content) + 1):
        cut.write_bytes(content[:size])
        entries = read(cut)
        assert entries == whole[: len(entries)]
        counts.append(len(entries))
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.fault(79)
def test_a_damaged_line_costs_itself_only(backend, tmp_path, caplog):
    reread(backend, *(lambda b, v=value: b.add_scalar(Series("loss"), v, 0) for value in (1.0, 2.0, 3.0)))
    lines = backend.path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\xff" + lines[1]
    backend.path.write_bytes(b"".join(lines))
    assert [entry["value"] for entry in read(backend.path)] == [1.0, 3.0]
    assert "1 incomplete lines were skipped" in caplog.text


@pytest.mark.fault(79)
@pytest.mark.parametrize(("old", "new", "found"), [(b'"value": 2.0', b'"value": 6.0', [1, 6, 3]), (b"}\n", b"}x", [3])])
def test_a_line_has_no_checksum(backend, tmp_path, old, new, found):
    """A changed digit is not noticed, and a line without its end costs the next one as well."""
    reread(backend, *(lambda b, v=value: b.add_scalar(Series("loss"), v, 0) for value in (1.0, 2.0, 3.0)))
    backend.path.write_bytes(backend.path.read_bytes().replace(old, new, 1))
    assert [entry["value"] for entry in read(backend.path)] == found


def test_a_directory_is_read_as_one(tmp_path):
    for value in (1.0, 2.0):
        backend = JSONLinesBackend()
        backend.open(tmp_path)
        reread(backend, lambda b, v=value: b.add_scalar(Series("loss"), v, 0))
    assert [entry["value"] for entry in read(tmp_path)] == [1.0, 2.0]


@pytest.mark.fault(301)
def test_lines_that_a_later_file_replaces_are_not_read(tmp_path):
    first, second = tmp_path / "values.1.jsonl", tmp_path / "values.2.jsonl"
    lines = [b'{"step": %d}\n' % step for step in range(5)]
    first.write_bytes(b"".join(lines[:4]))
    header = JSONLinesBackend()._format().header(ReplacedEnd(first.name, len(lines[0]) * 2, 2))
    second.write_bytes(header + b"".join(lines[2:]))
    assert [entry["step"] for entry in read(tmp_path)] == [0, 1, 2, 3, 4]
    assert [entry["step"] for entry in read(first)] == [0, 1, 2, 3]
    assert [entry["step"] for entry in read(second)] == [2, 3, 4]


@pytest.mark.fault(320)
@pytest.mark.parametrize(
    "header",
    [("../values.1.jsonl", 0), ("values.2.jsonl", 0), ("values.1.jsonl", -1), ("values.1.jsonl", 1.5), (None, 0)],
)
def test_an_odd_claim_to_replace_lines_is_ignored(tmp_path, header):
    (tmp_path / "values.1.jsonl").write_bytes(b'{"step": 0}\n')
    claim = json.dumps({"replaces": header[0], "size": header[1]}).encode()
    (tmp_path / "values.2.jsonl").write_bytes(claim + b'\n{"step": 1}\n')
    assert [entry["step"] for entry in read(tmp_path)] == [0, 1]


def test_losses_are_entries(backend):
    block = backend._format().loss(5, 1, 2)
    assert json.loads(block) == {"lost": 5, "first_step": 1, "step": 2}


@pytest.mark.fault(320)
@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        b'{"matrix": {}}',
        b'{"matrix": {"values": 1}}',
        b'{"matrix": {"values": [1]}}',
        b'{"histogram": {"bucket_limits": 3}}',
        b'{"value": {"value": []}}',
        b'{"kind": ' + b"1" * 10_000 + b"}",
        b"\xff\xfe",
        b"null",
        b'{"replaces": 3, "size": "x"}',
    ],
)
def test_a_hostile_line_is_skipped_or_returned_and_never_raises(tmp_path, line):
    path = tmp_path / "values.x.jsonl"
    path.write_bytes(b'{"kind": "a", "value": "NaN"}\n' + line + b'\n{"kind": "b", "value": 1.0}\n')
    entries = read(path)
    assert [entry["kind"] for entry in (entries[0], entries[-1])] == ["a", "b"]
    assert len(entries) in (2, 3)
    assert math.isnan(entries[0]["value"])


@pytest.mark.parametrize("last", [4, 3], ids=["with values", "without values"])
def test_a_resumed_training_replaces_values_of_every_kind(tmp_path, last):
    """Also if it has ended before its first value."""
    histogram = SimpleNamespace(min=0, max=1, num=1, sum=1, sum_squares=1, bucket_limits=[1], bucket_counts=[1])
    for first, end in ((0, 5), (3, last)):
        backend = JSONLinesBackend()
        backend.open(tmp_path)
        if first:
            backend.resume(first)
        for step in range(first, end):
            backend.add_scalar(Series("loss"), 1.0, step)
            backend.add_histogram(Series("weights", "fc"), histogram, step)
            backend.add_matrix(Series("similarity"), Matrix(("a",), ("b",), np.ones((1, 1))), step)
        backend.commit(end)
        assert backend.close(30)
    run, entries = StoredRun(tmp_path), read(tmp_path)
    assert run.series("loss").steps.tolist() == [entry["step"] for entry in entries if "value" in entry]
    assert [step for step, _ in run.histograms("weights", "fc")] == list(range(last))
    assert [matrix["step"] for matrix in run.matrices] == list(range(last))
    assert run.last_step == last - 1
