"""Programs of the fourth set: optimizers, their parameters, learning rates, schedulers and number formats."""

import torch
from torch import nn

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import SmallNet, fit, fit_with, glyphs, split
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp, program

CROSS_ENTROPY = nn.CrossEntropyLoss()


# --- rates ------------------------------------------------------------------------------------------------------------


@fault(
    "rate",
    "Adam has the learning rate 0.3, which was copied from a script with SGD",
    why="the weights are thrown to values far above those at the beginning within a few steps, and the loss stays high",
)
def adam_with_a_rate_of_sgd():
    layers = [nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)]
    return program(nn.Sequential(*layers), CROSS_ENTROPY, loader(*glyphs()), 0.3, epochs=6, loop=fit)


@fault(
    "rate",
    "SGD has the learning rate 1e-5, with which nothing is learned in the time given",
    why="the weights change by less than a thousandth of their size in the whole run, and the loss hardly falls",
)
def sgd_with_a_tiny_rate():
    data = loader(*glyphs())
    return program(SmallNet(), CROSS_ENTROPY, data, 1e-5, torch.optim.SGD, epochs=6, loop=fit)


def fit_and_schedule(program):
    """Train in a loop in which the schedulers step after each batch."""
    for _ in range(program.epochs):
        program.model.train()
        for inputs, labels in program.loader:
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            for scheduler in program.schedulers:
                scheduler.step()


@fault(
    "scheduler",
    "StepLR was set for epochs, but steps with each batch, so that the rate is 0 for all purposes after one epoch",
    why="the learning rate falls by a factor of ten again and again while the loss is still high",
)
def step_scheduler_in_each_batch():
    model = mlp(20, 5, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.1)
    return Program(model, CROSS_ENTROPY, loader(*blobs(1024)), optimizer, 6, fit_and_schedule, [scheduler])


@fault(
    "scheduler",
    "a warm-up of 500 steps is advanced once per epoch, so that the rate hardly leaves 0",
    why="the learning rate is 0 in the first epoch and 2 % of the chosen one in the last",
)
def warm_up_in_epochs():
    model = SmallNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 500))
    return Program(model, CROSS_ENTROPY, loader(*glyphs(512)), optimizer, 8, fit, [scheduler])


# --- what the optimizer knows and does --------------------------------------------------------------------------------


@fault(
    "parameters",
    "the last layer is replaced after the optimizer was made, so that the optimizer trains the old one",
    "fc",
    why="the weights of the layer get gradients and never change; the optimizer holds tensors that are not in the model",
)
def head_replaced_after_the_optimizer():
    model = SmallNet(classes=1000)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    model.fc = nn.Linear(model.fc.in_features, 8)
    return Program(model, CROSS_ENTROPY, loader(*glyphs()), optimizer, 5, fit)


@fault(
    "regularisation",
    "weight_decay=0.3 in Adam, where it is added to the gradient, pulls all weights to 0",
    why="the norms of the weights shrink to almost nothing, and the outputs become equal for all rows",
)
def decay_that_wins():
    model = mlp(20, 5, 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=0.3)
    return Program(model, CROSS_ENTROPY, loader(*blobs(1024)), optimizer, 10, fit)


# --- number formats ---------------------------------------------------------------------------------------------------


@fault(
    "precision",
    "the gradients are clipped before the scaler has divided them, so that its factor of 65536 counts in the norm",
    why="the norm at the clipping is tens of thousands of times the limit, and the steps are next to nothing",
)
def limit_on_gradients_still_scaled():
    scaler = torch.amp.GradScaler("cpu")

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = program.loss(program.model(inputs), labels)
                scaler.scale(loss).backward()
                nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
                scaler.step(program.optimizer)
                scaler.update()

    return program(mlp(20, 5, 64), CROSS_ENTROPY, loader(*blobs(1024)), 0.1, torch.optim.SGD, epochs=6, loop=loop)


@fault(
    "precision",
    "weights in bfloat16 with a rate of 1e-4, whose steps are smaller than the format can add",
    why="the weights are in bfloat16, and most of them do not change although they have gradients",
)
def weights_in_half_the_bits():
    model = mlp(20, 5, 64).bfloat16()
    inputs, labels = blobs(1024)
    data = loader(inputs.bfloat16(), labels)
    return program(model, CROSS_ENTROPY, data, 1e-4, torch.optim.AdamW, epochs=20, loop=fit)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("scheduler")
def cyclic_rates_over_two_decades():
    model = mlp(20, 5, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.003, 0.3, step_size_up=30)
    return Program(model, CROSS_ENTROPY, loader(*blobs(1024)), optimizer, 8, fit_and_schedule, [scheduler])


@healthy("scheduler")
def warm_restarts_with_momentum():
    (inputs, labels), held_out = split(*glyphs())
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    return Program(model, CROSS_ENTROPY, loader(inputs, labels), optimizer, 6, fit_with(held_out), [scheduler])


@healthy("precision")
def scaled_unscaled_and_clipped():
    scaler = torch.amp.GradScaler("cpu")

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = program.loss(program.model(inputs), labels)
                scaler.scale(loss).backward()
                scaler.unscale_(program.optimizer)
                nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
                scaler.step(program.optimizer)
                scaler.update()

    return program(mlp(20, 5, 64), CROSS_ENTROPY, loader(*blobs(1024)), 0.1, torch.optim.SGD, epochs=8, loop=loop)
