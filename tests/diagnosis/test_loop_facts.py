"""Facts of the training loop: steps left out, repeated gradients and random numbers, rates, frozen statistics, no batch."""

import copy
import re
from math import inf, nan

import pytest
import torch
from torch import nn

import ikkuna

INPUTS = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS[:, 0] > 0).long()
LOSS = nn.CrossEntropyLoss()
NEW = {
    *("steps_left_out", "no_batch", "repeated_backward", "same_random_numbers", "rate_squared", "frozen_statistics"),
    *("unbounded_loss", "loss_scale", "changed_after_step", "step_repeated", "parameter_in_two_groups"),
    *("weights_restored", "scheduled_in_vain"),
}


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Let dumps, which findings write, be written to a directory of the test."""
    monkeypatch.chdir(tmp_path)


def network():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))


def batches(steps):
    order = torch.Generator().manual_seed(1)
    for number in range(steps):
        rows = torch.randint(0, 512, (16,), generator=order)
        yield number, INPUTS[rows], LABELS[rows]


def findings(loop, steps=80):
    """Return severity by rule of the new findings in a training by `loop`."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ikkuna.watch(model, LOSS, backend="null", verbosity=0, preflight=False) as watched:
        loop(model, optimizer, steps)
    return {finding.rule: finding.severity for finding in watched.findings if finding.rule in NEW}


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    LOSS(model(x), y).backward()
    optimizer.step()


def plain(model, optimizer, steps):
    for _, x, y in batches(steps):
        step(model, optimizer, x, y)


def every_twentieth_step(model, optimizer, steps):
    for number, x, y in batches(steps):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        if number % 20 == 19:
            optimizer.step()


def gradients_multiplied(model, optimizer, steps):
    """The norms are those of a sum of two equal gradients."""
    for _, x, y in batches(steps):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad *= 2**0.5
        optimizer.step()


def step_of_the_least_loss(model, optimizer, steps):
    least = 9.0
    for _, x, y in batches(steps):
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        if loss.item() < least:
            least = loss.item()
            optimizer.step()


def accumulation(model, optimizer, steps):
    for number, x, y in batches(2 * steps):
        (LOSS(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def sharpness_aware(model, optimizer, steps):
    parameters = list(model.parameters())
    for _, x, y in batches(steps):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in parameters]
            torch._foreach_add_(parameters, moves)
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        optimizer.step()


def one_step_left_out_now_and_then(model, optimizer, steps):
    for number, x, y in batches(steps):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        if number % 10:
            optimizer.step()


def two_backward_passes(model, optimizer, steps):
    for _, x, y in batches(steps):
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def one_micro_batch_twice(model, optimizer, steps):
    model[3].p = 0.0
    for _, x, y in batches(steps):
        optimizer.zero_grad()
        for _ in range(2):
            (LOSS(model(x), y) / 2).backward()
        optimizer.step()


def two_losses(model, optimizer, steps):
    for _, x, y in batches(steps):
        optimizer.zero_grad()
        outputs = model(x)
        LOSS(outputs, y).backward(retain_graph=True)
        outputs.square().mean().backward()
        optimizer.step()


def gradients_of_single_terms_first(model, optimizer, steps):
    for _, x, y in batches(steps):
        terms = LOSS(model(x), y), model(x + 1).square().mean()
        for term in (*terms, terms[0] + 0.1 * terms[1]):
            optimizer.zero_grad()
            term.backward(retain_graph=True)
        optimizer.step()


def gradients_of_micro_batches_first(model, optimizer, steps):
    for number, x, y in batches(steps):
        losses = [LOSS(model(inputs), y) for inputs in (x, INPUTS[16 * number % 496 :][:16])]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
        optimizer.zero_grad()
        for loss in losses:
            (loss / 2).backward()
        optimizer.step()


def attacked(order):
    def loop(model, optimizer, steps):
        for _, x, y in batches(steps):
            for _ in range(4):
                x = x.detach().requires_grad_()
                if order == "before":
                    model.zero_grad()
                loss = LOSS(model(x), y)
                if order == "between":
                    model.zero_grad()
                loss.backward()
                x = x + 0.01 * x.grad.sign()
            step(model, optimizer, x.detach(), y)

    return loop


def seed_in_the_loop(model, optimizer, steps):
    for _, x, y in batches(steps):
        torch.manual_seed(3)
        step(model, optimizer, x, y)


def seed_without_a_draw(model, optimizer, steps):
    model[3].p = 0.0
    seed_in_the_loop(model, optimizer, steps)


def and_then(change):
    """Return a loop that changes the gradients after each step, and clears them before the next backward."""

    def loop(model, optimizer, steps):
        for _, x, y in batches(steps):
            step(model, optimizer, x, y)
            with torch.no_grad():
                change([*model.parameters()])

    return loop


def clipped_before_and_after(model, optimizer, steps):
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    and_then(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1))(model, optimizer, steps)


def updated_by_hand_as_well(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.01)
    for parameter in parameters:
        parameter -= 0.01 * parameter.grad


def cleared_twice(parameters):
    for parameter in parameters:
        parameter.grad.zero_()


def normalised_one_by_one(parameters):
    for parameter in parameters:
        parameter.grad /= 10 * parameter.grad.norm()


def gradients_that_decay(model, optimizer, steps):
    """The gradients are those of all batches so far, and the later ones count more."""
    for _, x, y in batches(steps):
        LOSS(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad *= 0.5


def two_optimizers(has_own_backward):
    def loop(model, optimizer, steps):
        other = torch.optim.Adam(model[4].parameters(), 0.01)
        for _, x, y in batches(steps):
            step(model, optimizer, x, y)
            if has_own_backward:
                other.zero_grad()
                LOSS(model(x), y).backward()
            other.step()

    return loop


def two_steps(model, optimizer, steps):
    for _, x, y in batches(steps):
        step(model, optimizer, x, y)
        optimizer.step()


def put_back_after(number_of_steps):
    def loop(model, optimizer, steps):
        before = copy.deepcopy(model.state_dict())
        for number, x, y in batches(steps):
            step(model, optimizer, x, y)
            if number % number_of_steps == number_of_steps - 1:
                model.load_state_dict(before)

    return loop


def search_along_a_line(has_new_gradient):
    """Steps are made again with a smaller rate, until the loss has fallen."""

    def loop(model, optimizer, steps):
        model[3].p = 0.0
        for _, x, y in batches(steps):
            before, first = copy.deepcopy(model.state_dict()), LOSS(model(x), y).item()
            optimizer.param_groups[0]["lr"] = 1000.0
            for attempt in range(12):
                if has_new_gradient or not attempt:
                    optimizer.zero_grad()
                    LOSS(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    if LOSS(model(x), y) < first:
                        break
                optimizer.param_groups[0]["lr"] /= 4
                model.load_state_dict(before)

    return loop


def extragradient(model, optimizer, steps):
    for _, x, y in batches(steps):
        before = copy.deepcopy(model.state_dict())
        step(model, optimizer, x, y)
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        model.load_state_dict(before)
        optimizer.step()


def first_rate_of_zero(model, optimizer, steps):
    scheduled(lambda step: max(step - 15, 0) / 20)(model, optimizer, steps)


def steps_with_a_closure(model, optimizer, steps):
    for _, x, y in batches(steps):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = LOSS(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that lets another one with the same parameters make its steps."""

    def __init__(self, inner):
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def step(self):
        self.inner.step()


def wrapped_optimizer(model, optimizer, steps):
    plain(model, Wrapper(optimizer), steps)


def outer_gradients_by_hand(model, optimizer, steps):
    """Reptile: the gradient of the outer optimizer is how far the inner one has come."""
    parameters = [*model.parameters()]
    outer = torch.optim.Adam(parameters, 0.01)
    for number, x, y in batches(steps):
        if number % 3 == 0:
            before = [parameter.detach().clone() for parameter in parameters]
        step(model, optimizer, x, y)
        if number % 3 == 2:
            with torch.no_grad():
                for parameter, start in zip(parameters, before, strict=True):
                    parameter.grad = start - parameter
                    parameter.copy_(start)
            outer.step()


def optimizers_that_take_turns(has_seed, draws):
    """Two layers are trained alternately; of one seed in each round both draw numbers, or only the first."""

    def loop(model, optimizer, steps):
        optimizers = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[4].parameters(), 0.1)
        for _, x, y in batches(steps):
            if has_seed:
                torch.manual_seed(3)
            for optimizer, rate in zip(optimizers, draws, strict=True):
                model[3].p = rate
                step(model, optimizer, x, y)

    return loop


def scheduled(function):
    def loop(model, optimizer, steps):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, function)
        for _, x, y in batches(steps):
            step(model, optimizer, x, y)
            scheduler.step()

    return loop


def scheduled_before(begin_again):
    """Return a loop whose scheduler is made before the optimizer is made again."""

    def loop(model, optimizer, steps):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
        for _ in begin_again(model, optimizer, scheduler, batches(steps)):
            scheduler.step()

    return loop


def optimizer_made_again(model, optimizer, scheduler, drawn):
    again = optimizer.next = torch.optim.SGD(model.parameters(), 0.1)
    for batch in drawn:
        step(model, again, *batch[1:])
        yield batch


def scheduler_made_again(model, optimizer, scheduler, drawn):
    again = optimizer.next = torch.optim.SGD(model.parameters(), 0.1)
    follows = torch.optim.lr_scheduler.StepLR(again, 20, 0.5)
    for batch in drawn:
        step(model, again, *batch[1:])
        follows.step()
        yield batch


def rates_copied(model, optimizer, scheduler, drawn):
    again = optimizer.next = torch.optim.SGD(model.parameters(), 0.1)
    for batch in drawn:
        again.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        step(model, again, *batch[1:])
        yield batch


def two_phases(model, optimizer, scheduler, drawn):
    first = optimizer.next = torch.optim.Adam(model.parameters(), 0.01)
    for batch in drawn:
        step(model, first if batch[0] < 30 else optimizer, *batch[1:])
        yield batch


def a_phase_that_is_not_reached(model, optimizer, steps):
    torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: min(1.0, (epoch + 1) / 10)
    )  # which changes the rate at once
    first = optimizer.next = torch.optim.Adam(model.parameters(), 0.01)
    for _, x, y in batches(steps):
        step(model, first, x, y)


def frozen(part, mode):
    def loop(model, optimizer, steps):
        model[:part].requires_grad_(False)
        model[:part].train(mode)
        plain(model, optimizer, steps)

    return loop


def outputs_without_a_bound(model, optimizer, steps):
    model[1] = nn.Identity()
    for _, x, _ in batches(4 * steps):
        optimizer.zero_grad()
        model(x)[:, 0].mean().backward()
        optimizer.step()


def likelihood_that_ends(model, optimizer, steps):
    """A loss of 0 that falls to -300 and ends there."""
    for _, x, _ in batches(4 * steps):
        optimizer.zero_grad()
        outputs = model(x)[:, 0]
        (-300 * (1 - (1 - outputs).square().mean()).tanh()).backward()
        optimizer.step()


LOOPS = {
    "every twentieth step": (every_twentieth_step, {"steps_left_out": "warning"}),
    "only the least loss": (step_of_the_least_loss, {"steps_left_out": "warning"}),
    "accumulation": (accumulation, {}),
    "sharpness-aware": (sharpness_aware, {}),
    "now and then": (one_step_left_out_now_and_then, {}),
    "two backward passes": (two_backward_passes, {"repeated_backward": "warning"}),
    "gradients are multiplied": (gradients_multiplied, {}),
    "one micro-batch twice": (one_micro_batch_twice, {"repeated_backward": "warning"}),
    "two losses": (two_losses, {}),
    "gradients of micro-batches first": (gradients_of_micro_batches_first, {}),
    "attack on the inputs": (attacked("before"), {}),
    "attack on the inputs, cleared between forward and backward": (attacked("between"), {}),
    "gradients of single terms first": (gradients_of_single_terms_first, {}),
    "seed in the loop": (seed_in_the_loop, {"same_random_numbers": "warning"}),
    "seed without a draw": (seed_without_a_draw, {}),
    "seed and two optimizers": (optimizers_that_take_turns(True, (0.3, 0.3)), {"same_random_numbers": "warning"}),
    "seed and one of two draws": (optimizers_that_take_turns(True, (0.3, 0.0)), {"same_random_numbers": "warning"}),
    "two optimizers": (optimizers_that_take_turns(False, (0.3, 0.3)), {}),
    "one of two draws": (optimizers_that_take_turns(False, (0.0, 0.3)), {}),
    "clipped after the step": (
        and_then(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.01)),
        {"changed_after_step": "warning"},
    ),
    "values clipped after the step": (
        and_then(lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3)),
        {"changed_after_step": "warning"},
    ),
    "norm read after the step": (and_then(lambda parameters: nn.utils.clip_grad_norm_(parameters, inf)), {}),
    "clipped before and after the step": (clipped_before_and_after, {}),
    "updated by hand as well": (and_then(updated_by_hand_as_well), {}),
    "cleared twice": (and_then(cleared_twice), {}),
    "normalised one by one": (and_then(normalised_one_by_one), {}),
    "gradients that decay": (gradients_that_decay, {}),
    "one gradient and two optimizers": (two_optimizers(False), {"parameter_in_two_groups": "warning"}),
    "two gradients and two optimizers": (two_optimizers(True), {}),
    "two steps": (two_steps, {"step_repeated": "warning"}),
    "put back after each step": (put_back_after(1), {"weights_restored": "warning"}),
    "put back after two steps": (put_back_after(2), {}),
    "search along a line": (search_along_a_line(False), {}),
    "search along a line with new gradients": (search_along_a_line(True), {}),
    "extragradient": (extragradient, {}),
    "first rate of zero": (first_rate_of_zero, {}),
    "steps with a closure": (steps_with_a_closure, {}),
    "wrapped optimizer": (wrapped_optimizer, {}),
    "outer gradients by hand": (outer_gradients_by_hand, {}),
    "plain": (plain, {}),
    "rate in place of a factor": (scheduled(lambda epoch: 0.1 * 0.99**epoch), {"rate_squared": "warning"}),
    "rate with a warm-up": (scheduled(lambda epoch: min(epoch, 10) / 100), {"rate_squared": "warning"}),
    "factor": (scheduled(lambda epoch: 0.99**epoch), {}),
    "warm-up from the rate": (scheduled(lambda epoch: 0.1 + 0.001 * epoch), {}),
    "optimizer made again": (scheduled_before(optimizer_made_again), {"scheduled_in_vain": "warning"}),
    "optimizer and scheduler made again": (scheduled_before(scheduler_made_again), {}),
    "rates copied by hand": (scheduled_before(rates_copied), {}),
    "two phases": (scheduled_before(two_phases), {}),
    "a phase that is not reached": (a_phase_that_is_not_reached, {}),
    "frozen in training mode": (frozen(2, True), {"frozen_statistics": "info"}),
    "frozen in evaluation mode": (frozen(2, False), {}),
    "nothing frozen": (frozen(0, True), {}),
    "only the first layer frozen": (frozen(1, True), {}),
    "no batch": (lambda model, optimizer, steps: None, {"no_batch": "warning"}),
    "evaluation alone": (lambda model, optimizer, steps: model.eval()(INPUTS), {}),
    "without a bound": (outputs_without_a_bound, {"unbounded_loss": "warning"}),
    "likelihood": (likelihood_that_ends, {}),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler:UserWarning")
@pytest.mark.parametrize("name", LOOPS)
def test_a_fact_of_the_loop_is_found_where_it_is(name):
    loop, expected = LOOPS[name]
    assert findings(loop) == expected


def test_a_model_without_an_optimizer_needs_no_batch():
    with ikkuna.watch(network(), backend="null", verbosity=0) as watched:
        pass
    assert not list(watched.findings)


def test_complex_gradients_are_left_out():
    model = nn.Linear(8, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ikkuna.watch(model, backend="null", verbosity=0, preflight=False) as watched:
        for _, x, _ in batches(10):
            optimizer.zero_grad()
            model(x.cfloat()).abs().square().mean().backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert not watched.health().errors


@pytest.mark.parametrize(("at", "divisor"), [(20, 1), (27, 2)])
@pytest.mark.parametrize(("value", "module"), [(nan, "4"), (inf, "4"), (nan, None)])
def test_a_weight_that_is_not_finite_is_named_in_every_step(value, module, divisor, at, tmp_path):
    """The step after such a loss makes all weights NaN; without a module the batch is the cause."""
    model = network()
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss, backend="null", log_dir=tmp_path, verbosity=0) as watched:
        for number, x, y in batches(40):
            if number == at:
                if module:
                    model[4].weight.data[0, 0] = value
                else:
                    x = x * nan
            optimizer.zero_grad()
            (loss(model(x), y) / divisor).backward()
            optimizer.step()
    [found] = [finding for finding in watched.findings if finding.rule == "nonfinite"]
    assert found.step == at
    if module:
        assert (found.severity, found.module, found.modules) == ("error", module, (module,))
        assert "an earlier step" in found.advice
    else:
        assert "an earlier step" not in found.advice


def test_the_number_of_gradients_without_a_step_is_a_lower_bound(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer, cleared = torch.optim.SGD(model.parameters(), 0.1), 0
    with ikkuna.watch(model, log_dir=tmp_path, backend="null", verbosity=0) as handle:
        while not (found := [each for each in handle.findings if each.rule == "steps_left_out"]) and cleared < 300:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            cleared += 3
    least = int(re.search(r"at least (\d+) backward passes", found[0].message)[1])
    assert 0 < least <= cleared
