"""The later sets of programs: their labels are complete, and stored results are judged; the measurement is a command."""

import pytest
import torch

from tests.diagnosis.unseen import cases
from tests.diagnosis.unseen.configurations import configurations
from tests.diagnosis.unseen.judge import COLUMNS, accused, fits, load
from tests.diagnosis.unseen.recipes import Draw

SETS = {name: cases(name) for name in ("later", "third", "fourth")}
LATER = {name: case for programs in SETS.values() for name, case in programs.items()}
FAULTS = {name: case for name, case in LATER.items() if not case.healthy}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("programs", SETS.values(), ids=SETS)
def test_there_are_enough_kinds_and_families(programs):
    knowable = [case for case in programs.values() if not case.healthy and case.knowable]
    assert len(knowable) >= 70
    assert len({case.family for case in knowable}) >= 14


def test_no_program_is_in_two_sets():
    assert len(cases("first", *SETS)) == sum(len(programs) for programs in (cases("first"), *SETS.values()))


def test_a_label_states_cause_and_reason():
    assert not [name for name, case in FAULTS.items() if not (case.cause and case.why)]


@pytest.mark.parametrize("name", LATER)
def test_the_program_can_be_built_and_its_module_exists(name):
    torch.manual_seed(0)
    program, module = LATER[name].build(), LATER[name].module
    modules, parameters = dict(program.model.named_modules()), dict(program.model.named_parameters())
    assert parameters
    assert module is None or module in modules or module in parameters


def test_there_are_enough_healthy_configurations():
    listed = list(configurations())
    assert len({configuration.name for configuration in listed}) >= 600
    assert len({configuration.family for configuration in listed}) >= 20


@pytest.mark.parametrize("configuration", [c for c in configurations() if c.seed == 0], ids=lambda c: c.name)
def test_a_seed_decides_settings_and_weights(configuration):
    draws = Draw(configuration.seed), Draw(configuration.seed)
    first, second = (configuration.build(draw).model.state_dict() for draw in draws)
    assert draws[0].settings == draws[1].settings
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", SETS)
def test_every_stored_result_is_judged(name):
    results, judgements = load(f"{name}_results.json"), load(f"{name}_judgements.json")
    assert set(results) == set(SETS[name])
    assert set(judgements) <= set(SETS[name])
    for name, found in accused(results).items():
        assert {f["rule"] for _, f in found} <= set(judgements[name]["false"]), name


@pytest.mark.parametrize("name", ["results.json", *(f"{of}_results.json" for of in SETS), "fourth_again.json"])
def test_no_training_was_ended_by_ikkuna(name):
    assert not [program for program, result in load(name).items() if "watch_error" in result]


@pytest.mark.parametrize("of", SETS)
def test_every_judgement_is_about_something_that_was_found(of):
    runs = [load(f"{of}_results.json"), *([load("fourth_again.json")] if of == "fourth" else [])]
    for name, judged in load(f"{of}_judgements.json").items():
        for entry in (*judged.get("right", ()), *judged.get("symptom", ())):
            found = [(column, f) for run in runs if name in run for column in COLUMNS for f in run[name][column]]
            assert any(fits(entry, column, f) for column, f in found), (name, entry)


def test_every_accused_configuration_is_judged():
    runs, why = load("configurations.json"), load("configurations_judgements.json")
    assert len(runs) >= 600
    accused_runs = {name: {found["rule"] for found in run["found"]} for name, run in runs.items() if run["found"]}
    assert {name: set(rules) for name, rules in why.items()} == accused_runs
