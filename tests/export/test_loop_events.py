"""The state machine that recognises evaluation passes: as a table, and on loops that are drawn at random."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ikkuna
from ikkuna.observation.steps.counters import LoopEvents


def events_of(loop):
    """Return both counts after a loop: "t" is a step, "n" a forward without gradients, "e" one in evaluation mode."""
    events, step = LoopEvents(), 0
    for letter in loop:
        events.forward(step, training=letter != "e", gradients=letter == "t")
        step += letter == "t"
    events.forward(step, training=True, gradients=True)
    return events.in_training_mode, events.in_evaluation_mode


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("t" * 30, (0, 0)),
        (("t" * 20 + "nnn") * 3, (3, 0)),
        ("nnn" + "t" * 20, (0, 0)),  # before the first step: it may initialise lazy modules
        (("t" * 20 + "n") * 3, (0, 0)),  # a single forward, as of a figure
        (("t" * 9 + "nnn") * 3, (0, 0)),  # too often
        ("tnn" * 30, (0, 0)),
        (("t" * 20 + "eee") * 3, (0, 3)),
        (("t" * 20 + "ene") * 3, (0, 3)),
        ("te" * 3, (0, 3)),
        (("t" * 20 + "nn" + "t" * 20 + "ee") * 2, (2, 2)),
    ],
)
def test_passes_are_counted_by_their_mode(loop, expected):
    assert events_of(loop) == expected


BLOCKS = st.one_of(
    st.integers(1, 60).map(lambda n: "t" * n),  # plain steps, several optimizers, closures, accumulation
    st.integers(2, 40).map(
        lambda n: "nt" * n
    ),  # a target network, a teacher, a generator, a checkpoint around the root
    st.integers(2, 20).map(lambda n: "nnnt" * n),
    st.integers(1, 20).map(lambda n: "e" * n),  # a right evaluation
    st.just("t" * 12 + "n" + "t" * 12),
)


@given(st.lists(BLOCKS, max_size=8))
@settings(max_examples=200, deadline=None)
def test_right_loops_have_no_evaluation_in_training_mode(blocks):
    """A block may begin behind a single forward without gradients of another one, so that a step stands between them."""
    assert events_of("t".join(blocks))[0] <= sum(block[:2] == "nn" for block in blocks)


@given(st.lists(st.sampled_from("tne"), max_size=200))
def test_facts_only_grow(loop):
    counts = [events_of(loop[:i]) for i in range(0, len(loop), 10)]
    assert counts == sorted(counts, key=sum)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_of_the_loop_is_seen_at_any_step(is_right, no_gradients, tmp_path):
    """Steps 11 to 13 are between two samples; the finding comes with the next sampled step."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ikkuna.watch(model, log_dir=tmp_path, backend="null", verbosity=0) as exporter:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if step % 17 == 12:
                model.train(not is_right)
                with no_gradients():
                    for _ in range(4):
                        model(torch.randn(4, 8))
                model.train()
    found = [finding.step for finding in exporter.findings if finding.rule == "evaluation_in_training_mode"]
    assert found == ([] if is_right else [30])
