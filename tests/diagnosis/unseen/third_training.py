"""Programs of the third set: the optimizer, its settings and schedules, and the loop around it."""

import copy

import torch
from torch import nn

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp


def waves(rows=768):
    """Eight columns and a target that is a sum of waves."""
    inputs = torch.randn(rows, 8)
    return inputs, inputs[:, :1] + (2 * inputs[:, 1:2]).sin() + 0.05 * torch.randn(rows, 1)


def fitted(model, optimizer, loop, epochs=5, data=None, loss=None):
    """Return the program of a regression by a loop of its own."""
    return Program(model, loss or nn.MSELoss(), data or loader(*waves()), optimizer, epochs, loop=loop)


def stepping(after=lambda program, step: None, before=lambda program, step: None):
    """Return the usual loop with a call before the backward pass and one after the step of the optimizer."""

    def loop(program):
        step = 0
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                loss = program.loss(program.model(rows), goals)
                before(program, step)
                loss.backward()
                program.optimizer.step()
                after(program, step)
                step += 1

    return loop


# --- the loop ---------------------------------------------------------------------------------------------------------


@fault(
    "loop",
    "`zero_grad` is never called, so that each step takes the sum of all gradients since the start",
    why="the gradients after each backward pass are those before it plus the new ones",
)
def gradients_never_cleared():
    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()

    model = mlp(8, 1)
    return fitted(model, torch.optim.SGD(model.parameters(), 0.02), loop)


@fault(
    "loop",
    "`optimizer.step()` slipped into the branch that prints every twentieth loss",
    why="nineteen of twenty backward passes are followed by clearing and not by a step",
)
def step_within_the_branch_of_the_log():
    def loop(program):
        step = 0
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                step += 1
                if step % 20 == 0:
                    program.optimizer.step()

    model = mlp(8, 1)
    return fitted(model, torch.optim.Adam(model.parameters(), 3e-3), loop)


@fault(
    "loop",
    "the seed is set within the loop, so that dropout removes the same units at every step",
    "2",
    why="the places where the dropout gives zero are the same in all calls",
)
def the_same_units_dropped_every_step():
    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                torch.manual_seed(1234)
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()

    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1))
    return fitted(model, torch.optim.Adam(model.parameters(), 3e-3), loop, data=loader(*waves(), shuffle=False))


@fault(
    "train and eval",
    "`model.eval()` of the validation is never followed by `model.train()`, so that dropout ends with the first epoch",
    "2",
    why="from the second epoch on the batches with gradients go through modules that are set to evaluation",
)
def evaluation_mode_for_good():
    held = waves(64)

    def loop(program):
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                program.loss(program.model(held[0]), held[1])

    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 1))
    return fitted(model, torch.optim.Adam(model.parameters(), 3e-3), loop)


@fault(
    "checkpoints",
    "the best state is kept as `model.state_dict()`, which is no copy: what is restored is the last state, not the best",
    knowable=False,
    why="the training itself is sound, and loading a state that is equal to the present one changes nothing",
)
def best_state_without_a_copy():
    def loop(program):
        best, kept = float("inf"), None
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                loss = program.loss(program.model(rows), goals)
                loss.backward()
                program.optimizer.step()
                if loss.item() < best:
                    best, kept = loss.item(), program.model.state_dict()
        program.model.load_state_dict(kept)

    model = mlp(8, 1)
    return fitted(model, torch.optim.Adam(model.parameters(), 3e-3), loop)


# --- the optimizer ----------------------------------------------------------------------------------------------------


@fault(
    "optimizer",
    "the optimizer was made before the network was copied, and it updates the parameters of the original",
    why="the optimizer's parameters are none of those that get gradients, and the network never changes",
)
def optimizer_of_the_original():
    original = mlp(8, 1)
    optimizer = torch.optim.Adam(original.parameters(), 3e-3)
    return fitted(copy.deepcopy(original), optimizer, stepping(), epochs=3)


@fault(
    "optimizer",
    "the optimizer got the parameters of the body alone, and the head stays at its random start",
    "4",
    why="the parameters of the last layer get gradients but are in no group of the optimizer",
)
def head_not_in_the_optimizer():
    inputs, labels = blobs()
    model = mlp(20, 5)
    optimizer = torch.optim.Adam(model[:4].parameters(), 3e-3)
    return fitted(model, optimizer, stepping(), data=loader(inputs, labels), loss=nn.CrossEntropyLoss())


@fault(
    "optimizer",
    "a new optimizer is made for every batch, so that Adam never has moments and moves all weights by the full rate",
    why="each step comes from another optimizer object, whose count of steps is 1",
)
def new_optimizer_for_every_batch():
    def renew(program, step):
        program.optimizer = torch.optim.Adam(program.model.parameters(), 0.02)

    model = mlp(8, 1)
    return fitted(model, torch.optim.Adam(model.parameters(), 0.02), stepping(after=renew))


@fault(
    "optimizer settings",
    "the weight decay was set to 1 in place of 1e-4, and the penalty outweighs the loss",
    why="the group of the optimizer says so, and the norms of all weights fall towards zero",
)
def weights_decayed_by_one():
    model = mlp(8, 1)
    return fitted(model, torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1.0), stepping())


@fault(
    "optimizer settings",
    "the rate of 3 was meant as 3e-3, and SGD throws the weights about until all units of a layer are dead",
    why="the first steps change the weights by many times their norm; after that the outputs are constant or NaN",
)
def rate_a_thousand_times_too_large():
    model = mlp(8, 1)
    return fitted(model, torch.optim.SGD(model.parameters(), 3.0), stepping())


# --- schedules --------------------------------------------------------------------------------------------------------


@fault(
    "schedules",
    "a schedule that was written for epochs is stepped after each batch, and the rate is gone after half an epoch",
    why="the rate falls tenfold after every three batches and is below 1e-7 in the first epoch already",
)
def schedule_of_epochs_stepped_by_batch():
    model = mlp(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    return fitted(model, optimizer, stepping(after=lambda program, step: schedule.step()))


# --- precision --------------------------------------------------------------------------------------------------------


@fault(
    "precision",
    "all weights are bfloat16 and the rate is small, so that most updates are rounded away",
    why="gradients and rate are not zero, but the parameters, which are bfloat16, are the same after the step as before",
)
def updates_lost_in_bfloat16():
    inputs, targets = waves()
    model = mlp(8, 1).bfloat16()
    data = loader(inputs.bfloat16(), targets.bfloat16())
    return fitted(model, torch.optim.Adam(model.parameters(), 2e-4), stepping(), data=data)


@fault(
    "precision",
    "the gradients are clipped while they still have the factor of the scaler, so that each has the norm 1 / 65536",
    why="the scaled gradients are clipped to the norm 1 and divided afterwards; the steps are smaller by this factor",
)
def clipped_with_the_factor_of_the_scaler():
    def loop(program):
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                scaler.scale(program.loss(program.model(rows), goals)).backward()
                nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
                scaler.step(program.optimizer)
                scaler.update()

    model = mlp(8, 1)
    return fitted(model, torch.optim.SGD(model.parameters(), 0.05), loop)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("accumulation")
def four_batches_for_a_step():
    """Gradients of four small batches are averaged for each step; the loss falls by more than a half."""

    def loop(program):
        for _ in range(program.epochs):
            for i, (rows, goals) in enumerate(program.loader):
                (program.loss(program.model(rows), goals) / 4).backward()
                if i % 4 == 3:
                    program.optimizer.step()
                    program.optimizer.zero_grad()

    model = mlp(8, 1)
    return fitted(model, torch.optim.Adam(model.parameters(), 0.03), loop, epochs=2, data=loader(*waves(600), batch=8))


@healthy("optimizer settings")
def rate_of_one_that_works():
    """SGD at a rate of 1 behind batch norms; the cross entropy falls below 0.3, from 1.6."""
    inputs, labels = blobs()
    model = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return fitted(model, optimizer, stepping(), data=loader(inputs, labels), loss=nn.CrossEntropyLoss())


@healthy("averages of weights")
def evaluated_by_the_average_of_weights():
    """A moving average of the weights is evaluated each epoch; the loss falls to less than a quarter."""
    average = torch.optim.swa_utils.AveragedModel(
        model := mlp(8, 1), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)
    )
    held = waves(64)

    def measure(program, step):
        average.update_parameters(program.model)
        if step % 24 == 23:
            average.eval()
            with torch.no_grad():
                program.loss(average(held[0]), held[1])

    program = fitted(model, torch.optim.Adam(model.parameters(), 5e-3), stepping(after=measure))
    program.others.append(average)
    return program


@healthy("schedules")
def rate_that_goes_up_and_down():
    """A cyclic rate between 1e-4 and 0.05; the loss falls to less than a quarter, with a rise at each peak."""
    model = mlp(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 0.05, step_size_up=15)
    return fitted(model, optimizer, stepping(after=lambda program, step: schedule.step()), epochs=6)


@healthy("noise")
def noise_added_to_the_gradients():
    """Noise that shrinks is added to all gradients, on purpose; the loss falls to less than a third."""

    def loop(program):
        step = 0
        for _ in range(program.epochs):
            for rows, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(rows), goals).backward()
                step += 1
                for parameter in program.model.parameters():
                    parameter.grad += 0.05 / step**0.55 * torch.randn_like(parameter)
                program.optimizer.step()

    model = mlp(8, 1)
    return fitted(model, torch.optim.Adam(model.parameters(), 3e-3), loop)


@healthy("optimizer settings")
def a_quasi_newton_method():
    """L-BFGS on the whole set, several evaluations a step; the loss falls below a tenth."""
    inputs, targets = waves(256)

    def loop(program):
        for _ in range(program.epochs):

            def closure():
                program.optimizer.zero_grad()
                loss = program.loss(program.model(inputs), targets)
                loss.backward()
                return loss

            program.optimizer.step(closure)

    model = mlp(8, 1, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
    return fitted(model, optimizer, loop, epochs=20, data=[(inputs, targets)])
