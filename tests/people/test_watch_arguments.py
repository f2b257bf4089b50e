"""`ikkuna.watch` understands what other libraries call the same, and names the nearest option of its own."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import schedules
from ikkuna.errors import ConfigError, ConfigTypeError, IkkunaError
from ikkuna.export.subscriber import NormSubscriber


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def watch(model, tmp_path):
    handles = []

    def call(*arguments, **options):
        handles.append(ikkuna.watch(model, *arguments, log_dir=tmp_path, verbosity=0, **options))
        return handles[-1]

    yield call
    for handle in handles:
        handle.close()


def periods(handle):
    return {r.subscriber.subscription.subsample for r in handle.message_bus.registered if r.subscriber.backends}


CRITERION = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((CRITERION,), {}),
        ((NormSubscriber("weights"), CRITERION), {}),
        ((), {"criterion": CRITERION}),
        ((), {"loss_fn": CRITERION, "log": "all"}),
    ],
)
def test_the_loss_is_recognised(watch, arguments, options):
    assert watch(*arguments, **options).loss is CRITERION


def test_an_optimizer_is_accepted(watch, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = set(watch().message_bus.kinds)
    assert set(watch(optimizer).message_bus.kinds) == expected
    assert set(watch(optimizer=optimizer, log="gradients").message_bus.kinds) == expected


@pytest.mark.parametrize("name", ["every", "log_freq", "subsample"])
def test_one_number_sets_the_steps_of_all_metrics(watch, name):
    handle = watch(NormSubscriber("weights"), rules=None, recorder=False, **{name: 7})
    assert periods(handle) == {7}


@pytest.mark.parametrize(("options", "expected"), [({}, {3, 4, 9, 10}), ({"every": 2}, {4, 10})])
def test_a_schedule_sets_the_steps_of_all_metrics(watch, model, options, expected):
    """Those of the preset sample every tenth step by themselves."""
    handle = watch(CRITERION, rules=None, recorder=False, schedule=schedules.at(3, 4, 9, 10), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(14):
        optimizer.zero_grad()
        CRITERION(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
        optimizer.step()
    handle.close()
    assert set(handle.history("loss").steps) == set(handle.history("weights_norm2", "0").steps) == expected


def test_the_older_name_of_every_keeps_working_for_metrics():
    older, newer = NormSubscriber("weights", subsample=3), NormSubscriber("weights", every=3)
    assert older.subscription.subsample == newer.subscription.subsample == 3


@pytest.mark.parametrize(
    ("spelled", "meant"), [("tensorboard", "tb"), ("matplotlib", "mpl"), (["json", "null"], ("jsonl", "null"))]
)
def test_backends_have_their_full_names_too(watch, spelled, meant):
    handle = watch(NormSubscriber("weights"), backend=spelled, rules=None, recorder=False)
    shown = {registered.subscriber.backends for registered in handle.message_bus.registered}
    assert shown == {(meant,) if isinstance(meant, str) else meant}


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((), {"evry": 3}, ["watch() has no option 'evry'", "did you mean 'every'?"]),
        ((), {"logdir": "x"}, ["'logdir'", "did you mean 'log_dir'?"]),
        ((), {"name": "x"}, ["'name'", "did you mean 'run_name'?"]),
        ((), {"critereon": 1}, ["'critereon'", "did you mean 'criterion'?"]),
        ((), {"module_filter": []}, ["'module_filter'", "options: backend, compiled, config"]),
        ((), {"log": "everything"}, ["watch(log=)", "'everything'", "preset="]),
        ((), {"every": 2, "log_freq": 3}, ["watch() needs one every, got 2: 2, 3"]),
        ((CRITERION,), {"loss": nn.MSELoss()}, ["watch() needs one loss, got 2: MSELoss(), CrossEntropyLoss()"]),
        ((3,), {}, ["watch() needs subscribers, a loss or an optimizer after the model, got int 3"]),
        ((NormSubscriber,), {}, ["got the class NormSubscriber; create one"]),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(model, tmp_path, arguments, options, words):
    with pytest.raises(ConfigError) as error:
        ikkuna.watch(model, *arguments, **{"run_name": "r"} | options)
    assert [word for word in words if word not in str(error.value)] == []
    ikkuna.watch(model, log_dir=tmp_path).close()  # nothing is left from the failed call


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"backend": "nope"}, {"recorder": "x"}, {"mute": ["x"]}, {"rules": ["x"]}]
)
def test_a_failed_call_says_nothing_of_a_training_and_leaves_no_file(model, tmp_path, wrong, capsys):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(IkkunaError):
        ikkuna.watch(model, log_dir=tmp_path, **wrong)
    assert [*tmp_path.rglob("*")] == []
    assert "no_batch" not in capsys.readouterr().err
    del optimizer


def test_a_second_call_does_not_say_that_a_training_has_not_begun(model, tmp_path):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first, second = (ikkuna.watch(model, log_dir=tmp_path, verbosity=0) for _ in range(2))
    second.close()
    assert [finding.rule for finding in first.findings] == []
    assert [finding.rule for finding in second.findings] == ["no_batch"]
    del optimizer


def test_the_kind_of_a_metric_is_needed(watch):
    with pytest.raises(ConfigTypeError, match="metric.. needs a kind"):

        @watch().metric
        def near_zero(tensor):
            return tensor.mean()


def test_an_unknown_option_is_also_a_type_error(model):
    with pytest.raises(ConfigTypeError):
        ikkuna.watch(model, whatever=1)


def test_editors_see_the_functions_and_their_arguments():
    assert {"watch", "preflight", "replay", "observe", "schedules", "netdict", "probe"} <= set(dir(ikkuna))
    assert not {"Any", "TYPE_CHECKING"} & set(dir(ikkuna))
    for name in (name for name in dir(ikkuna) if not name.startswith("_")):
        assert getattr(ikkuna, name) is not None
    assert {"model", "loss", "every", "backend", "on_finding"} <= inspect.signature(ikkuna.watch).parameters.keys()
    code = "import ikkuna, sys; dir(ikkuna); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
