"""The flight recorder: dumps of planted mistakes, triggers, bounds, bad input, and that training stays the same."""

import copy
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis import RecorderOptions, Rule, Score, read_dump
from ikkuna.errors import ConfigError, ConfigTypeError, DumpError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber
from ikkuna.flight_recorder import options as memory
from ikkuna.flight_recorder.recorder import CoolDown, FlightRecorder
from ikkuna.store.values import ModuleEntry
from ikkuna.support.files import available_bytes
from ikkuna.support.random_states import RandomReader, RandomStates
from ikkuna.testing import small_model

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(2))


class Loop:
    """A training loop with a flight recorder, whose batches can be spoiled."""

    def __init__(self, log_dir, every=5, rules=None, model=None, bus=None, **options):
        self.model, self.loss = model or small_model(), nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.exporter = Exporter(message_bus=bus or MessageBus("recorder"), log_dir=log_dir, on_error="raise")
        self.exporter.add_modules(self.model)
        self.exporter.set_loss(self.loss)
        if bus is None:
            for subscriber in (
                LossSubscriber(backend="null"),
                NormSubscriber("weights", subsample=every, backend="null"),
                NormSubscriber("activations", subsample=every, backend="null"),
            ):
                self.exporter.message_bus.register_subscriber(subscriber)
        if rules is not None:
            self.exporter.apply_rules(rules, every=every, backend="null")
        self.exporter.record_steps(RecorderOptions(every=every, **options))
        self.step = 0

    def run(self, steps, factor=1.0):
        for _ in range(steps):
            rows = torch.arange(self.step, self.step + 16) % 64
            self.optimizer.zero_grad()
            self.loss(self.model(X[rows] * factor), Y[rows]).backward()
            self.optimizer.step()
            self.step += 1
        return self

    def close(self):
        self.exporter.close()
        return [read_dump(path) for path in self.exporter.dumps]


class FromStepRule(Rule):
    """The step is 30 or later."""

    name, needs, meaning, patience = "from_step_30", {"loss": "LossSubscriber()"}, "Step {figure:g}.", 1

    def scores(self, history):
        yield Score(float(history.step >= 30), history.step)


# -- what a dump holds --------------------------------------------------------------------------------------------


def test_the_dump_of_a_spike_holds_the_steps_before_it_and_a_burst_follows(tmp_path):
    loop = Loop(tmp_path, burst=4)
    norms = {}
    for step in range(50):
        norms[step] = float(loop.model.first.weight.detach().double().norm())
        loop.run(1)
    loop.run(1, factor=1e4)
    loop.run(10)
    [dump] = loop.close()
    assert dump.step == 50
    assert dump.path == tmp_path / "run0001" / "dumps" / "step_000050"
    assert dump.reasons[0].startswith("the loss jumped to")
    assert dump.steps.tolist() == [*range(0, 51, 5)]
    sums = dump.series("weights", "sumsq", "first")
    assert {step: pytest.approx(sums[step] ** 0.5, rel=1e-6) for step in range(0, 50, 5)} == {
        step: norms[step] for step in range(0, 50, 5)
    }
    losses = dump.losses
    assert [*losses] == [*range(51)]
    assert losses[50] > 10 * losses[49]
    assert np.allclose(dump.rows["learning_rates"], 1e-3)
    burst = dump.arrays("burst.npz")
    assert burst["steps"].tolist() == [51, 52, 53, 54]
    first = (burst["kinds"] == "weights") & (burst["modules"] == "first")
    assert not np.isnan(burst["values"][:, first][..., :12]).any()
    assert {"activations", "layer_gradients", "weight_updates", "bias_gradients"} <= set(burst["kinds"])


def test_steps_that_no_subscriber_samples_have_no_rows_and_their_number_is_known(tmp_path):
    bus = MessageBus("rare")
    loop = Loop(tmp_path, bus=bus)
    bus.register_subscriber(NormSubscriber("weights", subsample=5, backend="null"))
    loop.run(13)
    assert loop.exporter._session.context.recorder.rows is None
    path = loop.exporter.dump()
    loop.close()
    dump = read_dump(path)
    assert dump.step == 12
    assert dump.steps.tolist() == [0, 5, 10]
    assert dump.rows["log_steps"].tolist() == [0, 5, 10]


def test_the_histograms_of_a_burst_count_every_element(tmp_path):
    loop = Loop(tmp_path, burst=2).run(3)
    loop.exporter.dump()
    loop.run(4)
    [dump] = loop.close()
    burst = dump.arrays("burst.npz")
    for row in range(burst["values"].shape[1]):
        counts = burst["histograms"][(burst["histograms"][:, 0] == 1) & (burst["histograms"][:, 1] == row)]
        n = burst["values"][1, row, 0]
        assert counts[:, 3].sum() == (0 if np.isnan(n) or burst["kinds"][row] in ("input_data", "loss") else n)


def test_a_dump_is_read_with_numpy_alone(tmp_path):
    loop = Loop(tmp_path).run(12)
    path = loop.exporter.dump("by hand")
    loop.close()
    with np.load(path / "rows.npz", allow_pickle=False) as rows:
        assert rows["steps"].tolist() == [0, 5, 10, 11]  # of the last step only the loss was measured
        assert rows["values"].shape == (4, len(rows["kinds"]), len(rows["columns"]))
    assert json.loads((path / "dump.json").read_text())["reasons"] == ["by hand"]


def test_statistics_that_were_not_measured_are_nan(tmp_path):
    loop = Loop(tmp_path).run(6)
    path = loop.exporter.dump()
    loop.close()
    dump = read_dump(path)
    assert dump.series("weights", "min", "first") == {}
    assert [*dump.series("weights", "sumsq", "first")] == [0, 5]
    with pytest.raises(DumpError, match="no sumsq of weights of second"):
        dump.series("weights", "sumsq", "second")


def test_random_states_are_those_before_the_forward(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    loop = Loop(tmp_path, model=model, every=1)
    torch.manual_seed(3)
    states = []
    for _ in range(4):
        states.append(torch.get_rng_state())
        loop.run(1)
    path = loop.exporter.dump()
    loop.close()
    arrays = read_dump(path).arrays("random.npz")
    for step in range(4):
        assert np.array_equal(arrays[f"{step} torch"], states[step].numpy())


def test_random_states_are_restored_exactly():
    import random

    before = random.getstate(), np.random.get_state()
    reader = RandomReader()
    try:
        for draws in range(4):
            for _ in range(draws):
                np.random.standard_normal()  # an odd number leaves a second normal number behind
            states = RandomStates.of_arrays(reader.read().arrays())
            expected = np.random.standard_normal(3).tolist(), random.gauss(0, 1), torch.rand(2).tolist()
            states.restore()
            assert (np.random.standard_normal(3).tolist(), random.gauss(0, 1), torch.rand(2).tolist()) == expected
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


# -- triggers -----------------------------------------------------------------------------------------------------


def test_a_finding_writes_a_dump_that_names_it(tmp_path):
    loop = Loop(tmp_path, rules=FromStepRule()).run(33)
    [dump] = loop.close()
    assert (dump.step, dump.steps[-1]) == (30, 30)
    assert [(f.rule, f.step, f.value) for f in dump.findings] == [("from_step_30", 30, 30.0)]


def test_a_finding_below_the_severity_writes_none(tmp_path):
    loop = Loop(tmp_path, rules=FromStepRule(severity="info")).run(33)
    assert loop.close() == []


def test_a_number_that_becomes_nan_writes_a_dump(tmp_path):
    loop = Loop(tmp_path).run(13)
    with torch.no_grad():
        loop.model.last.weight[0, 0] = torch.nan
    loop.run(5)
    dumps = loop.close()
    assert [dump.step for dump in dumps] == [13]  # by the loss, which is seen at every step
    assert "nan" in dumps[0].reasons[0]


def test_infinities_that_were_always_there_write_none(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.mask = nn.Identity()

        def forward(self, x):
            scores = self.mask(self.first(x).masked_fill(torch.eye(16, 8, dtype=torch.bool), -torch.inf))
            return self.last(scores.clamp_min(0))

    loop = Loop(tmp_path, model=Masked()).run(30)
    assert loop.close() == []


def test_an_exception_that_leaves_the_with_block_writes_a_dump(tmp_path):
    loop = Loop(tmp_path).run(7)
    with pytest.raises(ZeroDivisionError), loop.exporter:
        loop.step / 0
    [dump] = [read_dump(path) for path in loop.exporter.dumps]
    assert (dump.step, dump.reasons) == (6, ["ZeroDivisionError: division by zero"])


def test_an_exception_that_ends_the_process_writes_a_dump_and_reaches_the_former_hook(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error[0]))
    former = sys.excepthook
    first, second = Loop(tmp_path / "a").run(3), Loop(tmp_path / "b").run(5)
    sys.excepthook(ValueError, ValueError("no data"), None)
    assert seen == [ValueError]
    assert [[dump.reasons for dump in loop.close()] for loop in (first, second)] == [[["ValueError: no data"]]] * 2
    assert sys.excepthook is former


def test_a_signal_writes_a_dump_and_reaches_the_former_handler(tmp_path):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        former = signal.getsignal(signal.SIGUSR1)
        loop = Loop(tmp_path, signals=("SIGUSR1",)).run(3)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [read_dump(path).reasons for path in loop.exporter.dumps] == [["signal SIGUSR1"]]
        loop.run(3).close()
        assert seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is former
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_that_is_broken_does_not_write_dumps_for_ever(tmp_path):
    loop = Loop(tmp_path, cool_down=20, max_dumps=3, burst=0).run(45)
    for _ in range(5):
        loop.run(2).run(1, factor=1e5)
    loop.exporter._attachment.recorder.process_fails(RuntimeError("first"))
    loop.exporter._attachment.recorder.process_fails(RuntimeError("second"))
    loop.run(600).run(1, factor=1e5)  # the spikes before are usual for 512 steps
    reasons = [dump.reasons[0][:15] for dump in loop.close()]
    assert reasons == ["the loss jumped", "RuntimeError: f", "the loss jumped"]


def test_nan_writes_a_dump_shortly_after_another_one(tmp_path):
    loop = Loop(tmp_path, cool_down=200, burst=0).run(60)
    loop.run(1, factor=1e4).run(2).run(1, factor=2e4).run(2).run(1, factor=float("nan")).run(3)
    dumps = loop.close()
    assert [(dump.step, dump.reasons[0][:16]) for dump in dumps] == [(60, "the loss jumped "), (66, "the loss jumped ")]
    assert "nan" in dumps[1].reasons[0]


SPOILED = {"inf": [], "nan": ["NaN or Inf in activations of mask"]}


@pytest.mark.parametrize("number", SPOILED)
def test_activations_that_become_nan_write_a_dump_and_infinities_write_none(tmp_path, number):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mask, self.last = nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 3)
            self.added = 0.0

        def forward(self, x):
            return self.last(self.mask(self.first(x) + self.added).nan_to_num(0.0, 0.0, 0.0))

    loop = Loop(tmp_path, model=Masked(), every=1, burst=0).run(3)
    loop.model.added = float(number)
    assert [dump.reasons for dump in loop.run(3).close()] == [SPOILED[number]] * bool(SPOILED[number])


def test_a_dump_names_three_of_the_tensors_that_become_nan(tmp_path):
    bus = MessageBus("nan")
    bus.register_subscriber(NormSubscriber("weights", backend="null"))
    loop = Loop(tmp_path, model=wide(4), bus=bus, every=1, burst=0).run(3)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.fill_(torch.nan)
    [dump] = loop.run(3).close()
    assert dump.reasons == ["NaN or Inf in weights of 0, weights of 1, weights of 2 and 2 more"]


def test_a_dump_that_cannot_be_written_is_tried_again_after_a_tenth_of_the_pause():
    cool_down = CoolDown(steps=100, limit=1)
    cool_down.add(40, has_failed=lambda: True)
    assert [step for step in range(41, 60) if cool_down.allows(step)] == [*range(50, 60)]


def test_the_state_of_a_dump_is_from_before_the_mistake_began(tmp_path):
    class SinceStep29Rule(FromStepRule):
        patience = 3

        def scores(self, history):
            yield Score(float(history.step >= 29), history.step)

    loop = Loop(tmp_path, rules=SinceStep29Rule(), every=1, state_every=5, burst=0).run(33)
    [dump] = loop.close()
    assert (dump.step, dump.tensors("state.pt")["step"]) == (31, 25)


# -- durability ---------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from tests.diagnosis.test_flight_recorder import Loop
loop = Loop(sys.argv[1], signals=("SIGTERM",)).run(45)
path = loop.exporter.dump("before the end")
print(path, flush=True)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize("name", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_a_dump_survives_the_death_of_the_process(tmp_path, name):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, name], capture_output=True, text=True, timeout=300)
    assert done.returncode == -getattr(signal, name), done.stderr
    dump = read_dump(done.stdout.strip())
    assert dump.steps.tolist() == [*range(0, 45, 5), 44]
    assert dump.rows["values"].shape[0] == 10
    written = sorted(path.name for path in dump.path.parent.iterdir())
    assert written == (["step_000044"] if name == "SIGKILL" else ["step_000044", "step_000044_2"])
    if name == "SIGTERM":
        assert read_dump(dump.path.parent / "step_000044_2").reasons == ["signal SIGTERM"]


# -- training stays the same --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"state_every": 2, "burst": 3}])
def test_training_is_bit_identical_with_a_recorder_that_writes(tmp_path, options):
    def dropout():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    torch.manual_seed(5)
    watched = Loop(tmp_path, model=dropout(), **options)
    plain = copy.deepcopy(watched.model)
    optimizer = torch.optim.Adam(plain.parameters(), 1e-3)
    torch.manual_seed(6)
    watched.run(12)
    watched.exporter.dump()
    watched.run(12)
    state = torch.get_rng_state()
    watched.close()
    torch.manual_seed(6)
    for step in range(24):
        rows = torch.arange(step, step + 16) % 64
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(plain(X[rows]), Y[rows]).backward()
        optimizer.step()
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, plain.state_dict().values(), watched.model.state_dict().values()))


def test_memory_does_not_grow_with_steps(tmp_path):
    import tracemalloc

    loop = Loop(tmp_path, every=1, state_every=1, length=5, burst=0).run(20)
    tracemalloc.start()
    try:
        loop.run(75)  # until the ring holds states of its final size
        before = tracemalloc.get_traced_memory()[0]
        loop.run(60)
        assert tracemalloc.get_traced_memory()[0] - before < 40_000
    finally:
        tracemalloc.stop()
        loop.close()


def wide(layers):
    return nn.Sequential(nn.Linear(4, 3), *(nn.Linear(3, 3) for _ in range(layers)))


@pytest.mark.fault(504)
def test_a_burst_counts_as_many_histograms_as_memory_permits_those_with_findings_first(tmp_path):
    class LateRule(FromStepRule):
        def scores(self, history):
            yield Score(float(history.step >= 30), history.step, module="39")

    loop = Loop(tmp_path, model=wide(40), rules=LateRule(), every=1, max_memory=1 << 28, burst=2).run(34)
    [dump] = loop.close()
    assert [finding.module for finding in dump.findings] == ["39"]
    burst = dump.arrays("burst.npz")
    counted = {str(burst["modules"][row]) for row in burst["histograms"][:, 1]}
    assert "39" in counted
    assert 2 <= len(counted) < 41
    assert len(set(burst["modules"]) - {""}) == 41  # all other statistics are there


@pytest.mark.parametrize(
    ("in_modules", "number", "chosen"),
    [
        *((True, 2, ""), (True, 3, "c"), (True, 8, "c"), (True, 9, "ca"), (True, 17, "ca"), (True, 18, "cab")),
        *((False, 0, "c"), (False, 2, "c"), (False, 3, "ca"), (False, 8, "ca"), (False, 9, "cab")),
    ],
)
def test_a_module_has_three_histograms_inside_and_three_for_each_parameter(in_modules, number, chosen):
    network = [ModuleEntry(name, "Linear", (("p", (2,)),) * count) for name, count in (("a", 1), ("b", 2), ("c", 0))]
    recorder = FlightRecorder.__new__(FlightRecorder)
    recorder._findings = [SimpleNamespace(module="c"), SimpleNamespace(module=None)]
    recorder._budget, recorder._bus = SimpleNamespace(histograms=number << 19), SimpleNamespace(network=network)
    assert recorder._modules_with_histograms(in_modules) == [*chosen]
    recorder._budget.histograms -= 1
    assert len(recorder._modules_with_histograms(in_modules)) <= len(chosen)


def test_the_rows_that_are_kept_fit_into_the_budget(tmp_path):
    loop = Loop(tmp_path, model=wide(40), every=1, max_memory=1 << 22, length=10, burst=3).run(12)
    path = loop.exporter.dump()
    loop.run(5).close()
    rows = read_dump(path).rows["values"]
    assert 10 < rows.shape[1] < 120
    assert rows.nbytes <= (1 << 22) // 32


def test_a_state_that_does_not_fit_is_not_copied(tmp_path, caplog):
    loop = Loop(tmp_path, model=wide(400), state_every=1, max_memory=1 << 16).run(3)
    path = loop.exporter.dump()
    loop.close()
    assert "the state of the training has" in caplog.text
    assert not read_dump(path).has("state.pt")


GROUP_FILES = {"max": "1000000", "current": "900000", "stat": "anon 700000\ninactive_file 150000"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2000 kB\n"}, 2_048_000),
        ({}, 1 << 62),
        (
            {"proc/self/cgroup": "0::/a/b\n", **{f"sys/fs/cgroup/a/memory.{k}": v for k, v in GROUP_FILES.items()}},
            250_000,
        ),
        ({"proc/self/cgroup": "0::/\n", **{f"sys/fs/cgroup/memory.{k}": v for k, v in GROUP_FILES.items()}}, 250_000),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0",
            },
            0,
        ),
        ({"proc/self/cgroup": "0::/\n", **{f"sys/fs/cgroup/memory.{k}": "max" for k in GROUP_FILES}}, 1 << 62),
    ],
)
def test_the_memory_that_a_container_has_left_is_known(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == expected


@pytest.mark.fault(505)
def test_without_memory_nothing_is_copied_and_no_burst_follows(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    loop = Loop(tmp_path, state_every=1).run(3)
    path = loop.exporter.dump()
    loop.run(12).close()
    dump = read_dump(path)
    assert not dump.has("state.pt")
    assert not dump.has("burst.npz")
    assert "and memory is short" in caplog.text
    assert loop.exporter.health().errors == 0


@pytest.mark.parametrize(("missing", "has_burst"), [(0, True), (2, False)])
def test_a_burst_needs_memory_for_its_histograms_and_four_times_what_it_keeps(
    tmp_path, monkeypatch, missing, has_burst
):
    budget = memory.MemoryBudget(1 << 24)
    room = 2 * (budget.histograms + 4 * budget.burst)  # half of what is left may be used
    monkeypatch.setattr(memory, "available_bytes", lambda: room - missing)
    loop = Loop(tmp_path, max_memory=1 << 24, burst=1).run(3)
    path = loop.exporter.dump()
    loop.run(2).close()
    assert read_dump(path).has("burst.npz") == has_burst


@pytest.mark.parametrize(("others", "added"), [(0, 1 << 20), (10 << 20, 5 << 20)])
def test_a_burst_is_as_large_as_a_dumps_share_of_the_other_files_of_the_run_or_a_mebibyte(tmp_path, others, added):
    loop = Loop(tmp_path, max_dumps=2).run(1)
    path = loop.exporter.dump()
    (path.parents[1] / "others").write_bytes(bytes(others))
    own = sum(file.stat().st_size for file in path.iterdir())
    more = loop.exporter._attachment.recorder._size_with_burst(path) - own - added
    assert 0 <= more < 10_000  # half of the small files
    loop.close()


@pytest.mark.parametrize("max_bytes", [1000, 20_000, 60_000])
def test_a_dump_with_its_burst_is_not_larger_than_allowed(tmp_path, max_bytes):
    loop = Loop(tmp_path, state_every=1, max_bytes=max_bytes, burst=3).run(8)
    path = loop.exporter.dump()
    loop.run(6).close()
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size <= max(max_bytes, 2048)
    dump = read_dump(path)
    assert dump.step == 7
    assert dump.has("rows.npz") == (max_bytes > 1000)
    assert max_bytes < 60_000 or size > max_bytes // 4


def test_only_the_user_can_read_a_dump(tmp_path):
    loop = Loop(tmp_path, burst=2).run(3)
    path = loop.exporter.dump()
    loop.run(4).close()
    assert (path / "burst.npz").exists()
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o600"}
    assert path.stat().st_mode & 0o777 == 0o700


def test_nobody_else_can_read_a_dump_or_the_configuration_of_a_run(tmp_path):
    loop = Loop(tmp_path, burst=2).run(12)
    path = loop.exporter.dump()
    loop.run(4).close()
    modes = {each.name: each.stat().st_mode & 0o777 for each in path.iterdir()}
    assert "burst.npz" in modes
    assert set(modes.values()) == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path.parents[1] / "run.json").stat().st_mode & 0o777 == 0o600


# -- which dumps are written --------------------------------------------------------------------------------------


@pytest.mark.fault(502)
def test_a_budget_that_is_used_up_is_said_once_and_one_dump_is_kept_for_the_end(tmp_path, caplog):
    loop = Loop(tmp_path, cool_down=0, max_dumps=2, burst=0).run(45)
    for _ in range(5):
        loop.run(50).run(1, factor=1e5)
    assert loop.exporter.health().dumps == 2
    assert caplog.text.count("2 dumps of this run are written") == 1
    loop.exporter._attachment.recorder.process_fails(RuntimeError("the end"))
    assert read_dump(loop.exporter.dumps[-1]).reasons == ["RuntimeError: the end"]
    loop.exporter._attachment.recorder.process_fails(RuntimeError("again"))
    assert len(loop.close()) == 3


@pytest.mark.fault(501)
def test_dumps_that_a_failing_disk_refuses_do_not_count(tmp_path, caplog, monkeypatch):
    loop = Loop(tmp_path, cool_down=10, max_dumps=1, burst=0).run(45)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = loop.exporter._attachment.recorder._writer
    for _ in range(3):
        loop.run(50).run(1, factor=1e5)
        assert writer._worker.wait_for(lambda: not writer._jobs, 10.0)
    assert loop.exporter.health().failed_dumps == 3
    assert caplog.text.count("a dump cannot be written") == 1
    monkeypatch.undo()
    loop.run(50).run(1, factor=1e5)
    [dump] = loop.close()
    assert dump.reasons[0].startswith("the loss jumped")


UNFINISHED = """
import os, sys
from pathlib import Path
from ikkuna.flight_recorder import dump_writing
content = dump_writing.DumpContent("step_000001", {"reasons": []}, {})
dump = dump_writing.write_dump(Path(sys.argv[1]), content) if sys.argv[2] == "burst" else None
dump_writing.write_arrays = lambda *_: (print("writing", flush=True), sys.stdin.read())
if dump is None:
    content.arrays["rows.npz"] = {}
    dump_writing.write_dump(Path(sys.argv[1]), content)
dump_writing.add_arrays(dump, "burst.npz", {}, {})
"""


@pytest.mark.fault(503)
@pytest.mark.parametrize("what", ["dump", "burst"])
def test_what_killed_processes_left_is_removed_by_the_next_run_and_what_others_write_is_not(tmp_path, what):
    directory = tmp_path / "run0001" / "dumps"
    command = [sys.executable, "-c", UNFINISHED, directory, what]
    writing = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    hidden = {"dump": ".step_*", "burst": "step_*/.*"}[what]
    try:
        assert [process.stdout.readline() for process in writing] == [b"writing\n"] * 2
        assert len([*directory.glob(hidden)]) == 2
        writing[0].kill()
        writing[0].wait()
        Loop(tmp_path).run(1).close()
        assert len([*directory.glob(hidden)]) == 1
        writing[1].kill()
        writing[1].wait()
        Loop(tmp_path).run(1).close()
        assert [*directory.glob(hidden)] == []
    finally:
        for process in writing:
            process.kill()
            process.communicate()


# -- bad input ----------------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_said_and_counted(tmp_path, caplog):
    loop = Loop(tmp_path).run(3)
    (tmp_path / "run0001").mkdir()
    (tmp_path / "run0002").write_text("a file where the directory should be")
    loop.exporter.message_bus.open_run().make_directory()
    (tmp_path / "run0003" / "dumps").write_text("a file where the directory should be")
    assert loop.exporter.dump() is None
    loop.run(3).close()
    assert "a dump cannot be written (training is not affected)" in caplog.text
    assert (loop.exporter.health().dumps, loop.exporter.health().failed_dumps) == (0, 1)
    assert loop.exporter.health().errors == 0


def test_a_disk_without_space_leaves_nothing_behind(tmp_path, caplog, monkeypatch):
    loop = Loop(tmp_path).run(3)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert loop.exporter.dump() is None
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert [*(tmp_path / "run0001" / "dumps").iterdir()] == []
    assert loop.exporter.dump() is not None
    loop.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "dump.json").unlink(), "is not a dump: it has no dump.json"),
        (lambda path: (path / "dump.json").write_text("{"), "dump.json' is damaged"),
        (lambda path: (path / "dump.json").write_text('{"format": 99}'), "written by a newer ikkuna"),
        (lambda path: (path / "rows.npz").write_bytes((path / "rows.npz").read_bytes()[:-9]), "rows.npz' is damaged"),
        (lambda path: (path / "rows.npz").unlink(), "rows.npz' cannot be read"),
    ],
)
def test_a_damaged_dump_is_refused(tmp_path, damage, message):
    loop = Loop(tmp_path).run(3)
    path = loop.exporter.dump()
    loop.exporter.close()
    damage(path)
    with pytest.raises(DumpError, match=message):
        read_dump(path).rows  # noqa: B018


def test_the_directory_of_a_run_is_no_dump_but_its_dumps_are_named(tmp_path):
    loop = Loop(tmp_path).run(3)
    path = loop.exporter.dump()
    loop.close()
    with pytest.raises(DumpError, match="it contains step_000002"):
        read_dump(path.parent)


def test_batches_that_are_too_large_are_left_out(tmp_path, caplog):
    loop = Loop(tmp_path, state_every=1, max_bytes=1000).run(3)
    path = loop.exporter.dump()
    loop.close()
    assert "cannot be recorded for a replay: batches of more than 500 bytes are not kept" in caplog.text
    with pytest.raises(DumpError, match="has no batches"):
        read_dump(path).tensors("batches.pt")


def test_a_batch_of_unknown_objects_is_left_out(tmp_path, caplog):
    class Batch:
        def __init__(self, x):
            self.x = x

    class TakesObjects(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, batch):
            return self.inner(batch.x if isinstance(batch, Batch) else batch)

    model = TakesObjects()
    loop = Loop(tmp_path, model=model, state_every=1)
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.loss(model(Batch(X)), Y).backward()
        loop.optimizer.step()
    path = loop.exporter.dump()
    loop.close()
    assert "a Batch cannot be copied into a dump" in caplog.text
    assert not read_dump(path).has("batches.pt")
    assert loop.exporter.health().errors == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length must be an int >= 1, got 0"),
        ({"length": 2.5}, "length must be an int >= 1"),
        ({"severity": "warn"}, "did you mean 'warning'"),
        ({"signals": ("SIGTREM",)}, "did you mean 'SIGTERM'"),
        ({"signals": "SIGTERM"}, "must be a tuple of names"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RecorderOptions(**options)


def test_a_signal_that_cannot_be_handled_is_refused_and_nothing_is_left(tmp_path):
    loop = Loop(tmp_path)
    other = Exporter(message_bus=MessageBus("other"))
    registered = other.message_bus.registered
    with pytest.raises(ConfigError, match="SIGKILL cannot be installed"):
        other.record_steps(RecorderOptions(signals=("SIGKILL",)))
    assert other.message_bus.registered == registered
    with pytest.raises(ConfigError, match="recorded already"):
        loop.exporter.record_steps()
    with pytest.raises(ConfigTypeError, match="needs RecorderOptions, got bool"):
        other.record_steps(True)
    with pytest.raises(ConfigError, match="no step is recorded"):
        other.dump()
    other.close()
    loop.close()


def test_exporters_of_one_bus_write_their_own_dumps(tmp_path):
    bus = MessageBus("two", log_dir=tmp_path)
    first = Exporter(message_bus=bus)
    first.add_modules(("a", a := small_model()))
    second = Exporter(message_bus=bus)
    second.add_modules(("b", b := small_model()))
    bus.register_subscriber(NormSubscriber("weights", backend="null"))
    first.record_steps(), second.record_steps()
    for _ in range(3):
        for model in (a, b):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(X).sum().backward()
            optimizer.step()
    paths = first.dump(), second.dump()
    first.close(), second.close()
    modules = [set(read_dump(path).rows["modules"]) for path in paths]
    assert [{name[:1] for name in found} - {""} for found in modules] == [{"a"}, {"b"}]


def test_a_forked_child_writes_no_dump(tmp_path):
    loop = Loop(tmp_path).run(3)
    child = os.fork()
    if not child:
        loop.exporter._attachment.recorder.process_fails(RuntimeError("in the child"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert loop.close() == []
    assert not (tmp_path / "run0001").exists()


def test_a_watched_model_is_recorded(tmp_path):
    model, loss = small_model(), nn.CrossEntropyLoss()
    with ikkuna.watch(
        model, NormSubscriber("weights", backend="null"), loss=loss, log_dir=tmp_path, rules=None
    ) as exporter:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss(model(X), Y).backward()
        optimizer.step()
        path = exporter.dump()
    assert read_dump(path).steps.tolist() == [0]
    with ikkuna.watch(model, recorder=False, log_dir=tmp_path, rules=None) as exporter, pytest.raises(ConfigError):
        exporter.dump()
