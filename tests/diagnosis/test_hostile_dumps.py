"""Dumps and runs of others: damaged at random, or made to harm their reader; only documented errors come out."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis import RecorderOptions, read_dump
from ikkuna.errors import DumpError, IkkunaError
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber
from ikkuna.reading import read_run
from ikkuna.report.content import RunContent

HUGE = 10**12


def built():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters())


@cache
def files_of_a_run():
    """Return the files of a run and of its dump, which holds all that a dump can hold."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        model, loss, optimizer = built()
        with ikkuna.watch(
            model,
            LossSubscriber(),
            NormSubscriber("weights"),
            loss=loss,
            log_dir=directory,
            run_name="r",
            backend=["tb", "jsonl"],
            rules="loss_spike",
            every=1,
            recorder=RecorderOptions(state_every=2, burst=1, length=2),
        ) as handle:
            for step in range(6):
                optimizer.zero_grad()
                loss(model(torch.randn(8, 4)), torch.randint(0, 2, (8,))).backward()
                optimizer.step()
                if step == 3:
                    path = handle.dump()
        run = path.parent.parent
        dump = {file.name: file.read_bytes() for file in path.iterdir()}
        assert {"rows.npz", "state.pt", "batches.pt", "history.npz", "burst.npz"} < dump.keys()
        return {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}, dump


def written(directory, contents, listed=True):
    """Write the files of a dump, whose index has their sizes and checksums if `listed`."""
    directory.mkdir(exist_ok=True)
    if listed and isinstance(facts := json.loads(contents["dump.json"]), dict):
        known = {name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in contents.items()}
        facts["files"] = {name: each for name, each in known.items() if name != "dump.json"}
        contents = {**contents, "dump.json": json.dumps(facts).encode()}
    for name, data in contents.items():
        (directory / name).write_bytes(data)
    return directory


def read_all(path):
    """Read everything in a dump, and run its step again; return whether something was refused."""
    refused = 0
    dump = read_dump(path)
    for read in (
        lambda: str(dump),
        lambda: dump.findings,
        lambda: dump.losses,
        lambda: dump.names,
        lambda: dump.series("weights", "sumsq", "0"),
        *(lambda name=name: dump.arrays(name) for name in ("burst.npz", "random.npz", "history.npz")),
        lambda: ikkuna.replay(dump, *built()),
    ):
        try:
            read()
        except DumpError:
            refused += 1
    return refused > 0


def mutated(data, rng):
    """Return bytes that differ from `data` in one of several ways."""
    data, i = bytearray(data), rng.randrange(len(data))
    match rng.randrange(7):
        case 0:
            data[i] ^= 1 << rng.randrange(8)
        case 1:
            for _ in range(rng.randrange(1, 50)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 2:
            del data[i:]
        case 3:
            data[i:i] = rng.randbytes(rng.randrange(1, 3000))
        case 4:
            data[i : i + 8] = rng.choice([2**63, 2**64 - 1, 2**31, 0]).to_bytes(8, "little")
        case 5:
            data[i : i + 300] = bytes(min(300, len(data) - i))
        case _:
            del data[i : i + rng.randrange(1, 300)]
    return bytes(data)


ODD = (
    None,
    True,
    -1,
    HUGE,
    2**80,
    0.5,
    float("nan"),
    "",
    "x" * 5000,
    "../../etc/passwd",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
)


def spoiled(value, rng):
    """Return a JSON value in which one value, at any depth, is another one or is missing."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(ODD)
    value = value.copy()
    place = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.2:
        del value[place]
    else:
        value[place] = spoiled(value[place], rng)
    return value


def mutated_arrays(data, rng):
    """Return a ``.npz`` file in which one array has another content, type or shape, or is missing."""
    arrays = dict(np.load(io.BytesIO(data)))
    name = rng.choice([*arrays])
    found = arrays[name]
    change = rng.choice(["drop", "shape", "type", "values", "text"])
    if change == "drop":
        del arrays[name]
    elif change == "shape":
        arrays[name] = rng.choice([found[:-1] if found.ndim else found, found.ravel(), found[None], np.zeros(0)])
    elif change == "type":
        arrays[name] = np.zeros(found.shape, rng.choice(["?", "i1", "u8", "f2", "U3", "c8"]))
    elif change == "values" and found.dtype.kind in "iuf":
        arrays[name] = np.full_like(
            found, rng.choice([0, 1, 99]) if found.dtype.kind == "u" else rng.choice([-1, 99, 2**30])
        )
    else:
        arrays[name] = np.full(found.shape, "\x1b[31m")
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def mutated_tensors(data, rng):
    """Return a ``.pt`` file in which one value, at any depth, is another one or is missing."""

    def change(value):
        if not isinstance(value, dict | list | tuple) or not value or rng.random() < 0.1:
            return rng.choice([*ODD, torch.zeros(3), torch.zeros(1).expand(1 << 40), torch.zeros(2, device="meta")])
        value = value.copy() if isinstance(value, dict) else list(value)
        place = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.2:
            del value[place]
        else:
            value[place] = change(value[place])
        return value

    buffer = io.BytesIO()
    torch.save(change(torch.load(io.BytesIO(data), weights_only=True)), buffer)
    return buffer.getvalue()


def hostile_dump(directory, rng):
    """Write a dump in which one file is damaged; the index knows its checksum, as that of an attacker does."""
    contents = dict(files_of_a_run()[1])
    name = rng.choice([*contents])
    if rng.random() < 0.4:
        contents[name] = mutated(contents[name], rng)
        try:
            return written(directory, contents, listed=rng.random() < 0.9)
        except ValueError:  # the index is no JSON
            return written(directory, contents, listed=False)
    if name == "dump.json":
        facts = spoiled(json.loads(contents[name]), rng)
        return written(directory, {**contents, name: json.dumps(facts).encode()}, listed=False)
    change = mutated_arrays if name.endswith(".npz") else mutated_tensors
    return written(directory, {**contents, name: change(contents[name], rng)})


def hostile_run(directory, rng):
    contents = dict(files_of_a_run()[0])
    name = rng.choice([*contents])
    contents[name] = mutated(contents[name], rng)
    if name == "run.json" and rng.random() < 0.5:
        contents[name] = json.dumps(spoiled(json.loads(files_of_a_run()[0][name]), rng)).encode()
    directory.mkdir(exist_ok=True)
    for each, data in contents.items():
        (directory / each).write_bytes(data)
    return directory


def read_all_of_run(path):
    run = read_run(path)
    for pass_name in run.passes():
        for kind in run.kinds(pass_name):
            for name in run.names(kind, pass_name):
                run.series(kind, name, pass_name)
    RunContent("r", run).read_settings()


@pytest.mark.fault(506)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_mutated_dumps_and_runs_raise_documented_errors_only(tmp_path, seed, caplog):
    caplog.set_level("CRITICAL", "ikkuna")
    rng = random.Random(seed)
    refused = 0
    for number in range(10_000 if seed else 200):
        make, read = ((hostile_dump, read_all), (hostile_run, read_all_of_run))[number % 3 == 2]
        path = make(tmp_path / "x", rng)
        try:
            refused += bool(read(path))
        except IkkunaError:
            refused += 1
        except BaseException as error:
            error.add_note(f"in round {number}; the files are kept in {shutil.copytree(path, tmp_path / 'bad')}")
            raise
        shutil.rmtree(path)
    assert refused > (3000 if seed else 60)


# -- made to harm -------------------------------------------------------------------------------------------------


def npz(compression=zipfile.ZIP_DEFLATED, **members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def header(shape, data=b"", kind="|u1"):
    text = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def nested(depth, width):
    value = []
    for _ in range(depth):
        value = [value] * width
    return value


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/ikkuna-evil-code-ran",)


def compressed(data):
    """Return a ``.pt`` file whose members are compressed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as copy:
            for name in archive.namelist():
                copy.writestr(name, archive.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.npz", lambda: npz(steps=header((1 << 27,), bytes(1 << 27))), "more than 67108864"),
        ("rows.npz", lambda: npz(steps=header((HUGE,))), r"has no \(1000000000000,\) elements"),
        ("rows.npz", lambda: npz(steps=header((HUGE, 0, HUGE))), "damaged"),
        ("rows.npz", lambda: npz(steps=b"\x93NUMPY\x02\x00" + (9000).to_bytes(4, "little") + b"(" * 9000), "damaged"),
        ("rows.npz", lambda: npz(steps=pickle.dumps(Evil())), "damaged"),
        ("rows.npz", lambda: pickle.dumps(Evil()), "damaged"),
        ("rows.npz", lambda: b"", "damaged"),
        ("state.pt", lambda: saved(Evil()), "damaged"),
        ("state.pt", lambda: saved({"step": torch.zeros(1).expand(1 << 40)}), "larger than the file"),
        ("state.pt", lambda: saved(nested(40, 10)), "more than 1000000 values"),
        ("state.pt", lambda: saved(nested(100, 1)), "nested more than 64"),
        ("state.pt", lambda: compressed(saved({"step": torch.zeros(1 << 20)})), "bytes, more than|compressed"),
        ("state.pt", lambda: saved({"step": torch.zeros(3).to_sparse()}), "layout torch.sparse_coo"),
        ("state.pt", lambda: saved({"step": HUGE}), "has no field 'parameters'"),
    ],
)
def test_a_file_that_grows_in_memory_or_runs_code_is_refused(tmp_path, name, content, message):
    path = written(tmp_path / "x", {**files_of_a_run()[1], name: content()})
    dump = read_dump(path)
    with pytest.raises(DumpError, match=message):
        dump.arrays(name) if name.endswith(".npz") else dump.tensors(name)
    assert not os.path.exists("/tmp/ikkuna-evil-code-ran")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("step", HUGE, "lacks batches of the steps"),
        ("step", -1, "'step' of .*dump.json' must be an int from 0"),
        ("reasons", [{}], r"'reasons' of .*\[0\] must be a text"),
        ("files", {"../x.npz": {}}, "must be the name of a file"),
        ("files", {"rows.npz": {"bytes": "1", "crc32": 0}}, r"'bytes' of 'files' of .*\['rows.npz'\] must be an int"),
        ("findings", [{"rule": "x", "severity": "fatal", "message": ""}], "must be one of info, warning, error"),
        (
            "findings",
            [{"rule": "x", "severity": "info", "message": "", "limits": [1]}],
            "'limits' of 'findings' of .* a list of two",
        ),
        ("rules", [{"name": "loss_spike", "patience": "x"}], "'patience' of 'rules' of .* must be an int"),
        ("options", {}, "has no field 'every'"),
        ("left_out", [1], "'left_out' of .* must be a dict"),
    ],
)
def test_a_field_of_the_index_that_is_wrong_is_named(tmp_path, field, value, message):
    path = written(tmp_path / "x", files_of_a_run()[1])
    facts = json.loads((path / "dump.json").read_text())
    (path / "dump.json").write_text(json.dumps({**facts, field: value}))
    with pytest.raises(DumpError, match=message):
        ikkuna.replay(path, *built())


def make_pipe(path):
    os.mkfifo(path)


@pytest.mark.fault(507)
@pytest.mark.parametrize("make", [make_pipe, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
@pytest.mark.parametrize("name", ["dump.json", "rows.npz", "run.json"])
def test_what_is_no_regular_file_is_not_read(tmp_path, make, name):
    run, dump = files_of_a_run()
    path = written(tmp_path / "x", run if name == "run.json" else dump, listed=False)
    (path / name).unlink()
    make(path / name)
    if name == "run.json":
        content = RunContent("r", read_run(path))
        content.read_settings()
        assert (content.config, content.environment) == ({}, {})
    else:
        with pytest.raises(DumpError, match="is not a regular file"):
            read_dump(path).rows  # noqa: B018


def test_an_index_that_is_nested_deeply_or_large_is_refused(tmp_path):
    for text, message in (("[" * 200_000, "recursion"), ('{"a": "' + "x" * (1 << 22) + '"}', "more than 4194304")):
        (tmp_path / "dump.json").write_text(text)
        with pytest.raises(DumpError, match=message):
            read_dump(tmp_path)


def test_a_random_state_that_numpy_would_read_beyond_is_refused():
    from ikkuna.support.random_states import RandomReader, RandomStates

    arrays = RandomReader().read().arrays()
    for position in (-1, 625, float("nan")):
        with pytest.raises(ValueError, match="numpy.random has another size|NaN"):
            RandomStates.of_arrays({**arrays, "numpy_rest": np.array([position, 0, 0.0])})
