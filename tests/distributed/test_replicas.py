"""Ranks that must hold the same bits: flips are named with tensor, step and rank; what may differ is not accused."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ikkuna.distributed.replicas import Replicas
from ikkuna.support.modules import parameters_of, walk
from tests.distributed import replicas
from tests.distributed.launch import launch

SCENARIOS = (
    "flips_of_ddp",
    "flips_of_hsdp",
    *replicas.MISTAKES,
    "never_synchronised",
    "replicas_that_cannot_be_found",
    *replicas.HEALTHY,
)


@pytest.fixture(scope="session", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def outcomes(request, tmp_path_factory):
    names = [f"tests.distributed.replicas:{name}" for name in (*SCENARIOS, "post_local_sgd")]
    return launch(names, request.param, tmp_path_factory.mktemp("replicas"))


def is_named(findings, holders, case, size):
    """Whether the first finding names the tensor, the step, and the rank or the pair of ranks."""
    what, module, name, _, _, rank = case
    (found, step, message, _), *_ = findings
    owner = {"weights": "The {}", "gradients": "The gradient of the {}"}.get(what, what + " of the {}").format(name)
    odd = f"rank {rank} differs" if len(holders) > 2 else "ranks {} and {} differ".format(*holders)
    # what the flipped state has changed may be read before the state, in turns of eight samples
    tensors = (owner,) if what in ("weights", "gradients") else (owner, f"The {name}")
    begins = replicas.FLIPPED + (what != "gradients")
    last = begins + (0 if what in ("weights", "gradients") else 7)
    return found == module and begins <= step <= last and any(f"{tensor}: {odd}" in message for tensor in tensors)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_a_flipped_bit_is_named(outcomes, strategy):
    size, named = len(outcomes), 0
    for case, findings, holders, are_equal in outcomes[0][f"flips_of_{strategy}"]:
        if not holders:  # an empty shard
            assert findings == []
        elif not are_equal or case[0] in ("weights", "gradients"):
            assert is_named(findings, holders, case, size), (case, findings)
            named += 1
        else:  # the optimizer has rounded the difference away
            assert not findings or is_named(findings, holders, case, size)
    assert named >= replicas.COUNT / 2


def test_weights_that_differ_from_the_start_are_named(outcomes):
    for name, step in (("different_start", 0), ("different_start_by_hand", 3)):
        [(module, found, message, modules)], _ = outcomes[0][name]
        assert (module, found) == ("0", step)
        assert "The weight: " in message
        assert f"never equal up to step {step}" in message
        assert modules == ("0", "2")


def test_clipping_on_one_rank_is_named_in_its_first_step(outcomes):
    size = len(outcomes)
    [(module, step, message, modules)], _ = outcomes[0]["clipped_on_one_rank"]
    assert (module, step) == ("first", 5)
    odd = "ranks 0 and 1 differ" if size == 2 else f"rank {size - 1} differs from the others"
    assert f"The gradient of the weight: {odd}; equal at step 4, different at step 5." in message
    assert set(modules) == set(replicas.MODULES)


def test_another_rate_is_named_after_the_first_update(outcomes):
    [(module, step, message, _)], _ = outcomes[0]["other_rate"]
    assert (module, step) == ("first", 1)
    assert "equal at step 0, different at step 1" in message


def test_a_flip_is_named_if_the_program_averages_gradients_itself(outcomes):
    [(module, step, message, _)], _ = outcomes[0]["flip_by_hand"]
    assert (module, step) == ("block.0", 7)
    assert ("ranks 0 and 1 differ" if len(outcomes) == 2 else "rank 1 differs from the others") in message


def test_a_flip_in_a_buffer_that_the_program_keeps_equal_is_named_in_the_next_step(outcomes):
    [(module, step, message, _)], _ = outcomes[0]["flip_of_a_buffer"]
    assert (module, step) == ("1.running_mean", 9)
    assert "The buffer: rank" in message
    assert "equal at step 8, different at step 9" in message


def test_steps_without_synchronisation_are_named(outcomes):
    [(_, step, message, _)], _ = outcomes[0]["never_synchronised"]
    assert step <= 1
    assert "The weight: " in message
    assert "gradient" not in message


@pytest.mark.parametrize("name", replicas.HEALTHY)
def test_what_may_differ_is_not_accused(outcomes, name):
    for outcome in outcomes:
        findings, judged = outcome[name]
        assert findings == []
        assert judged == (() if name in replicas.NOT_COMPARED else ("ranks_differ",))


def test_an_error_in_the_search_for_replicas_does_not_reach_the_training(outcomes):
    for outcome in outcomes:
        findings, _ = outcome["replicas_that_cannot_be_found"]
        assert findings == []
        assert any(
            "finding the replicas of parameters" in line for line in outcome.logs["replicas_that_cannot_be_found"]
        )


def test_a_hook_of_local_sgd_withdraws_the_claim(outcomes):
    """The first steps average gradients, which is seen; the later ones do not, which is what the hook is for."""
    findings, _ = outcomes[0]["post_local_sgd"]
    assert findings == []


def test_a_wrapper_of_another_model_is_not_read():
    """Its process group was destroyed, as by an earlier training of the same program."""
    groups = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.append(DistributedDataParallel(nn.Linear(2, 2)))
        if len(groups) == 1:
            dist.destroy_process_group()
    try:
        numbers = Replicas(parameters_of(walk(groups[1].module))).numbers
    finally:
        dist.destroy_process_group()
    assert set(numbers.values()) == {0}
