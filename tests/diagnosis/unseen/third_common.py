"""The loop and the program of an objective of its own, for the programs of the third set."""

import torch

from tests.diagnosis.unseen.programs import Program


def descend(objective):
    """Return a loop that takes one step of the optimizer per batch down `objective(program, *batch)`."""

    def loop(program):
        for _ in range(program.epochs):
            for batch in program.loader:
                program.optimizer.zero_grad()
                objective(program, *batch).backward()
                program.optimizer.step()

    return loop


def training(model, data, objective, rate=3e-3, epochs=5, optimizer=None, others=()):
    """Return the program that trains `model` by Adam, or by `optimizer`, on an objective of its own."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), rate)
    loop = descend(objective)
    return Program(model, None, data, optimizer, epochs, loop=loop, others=list(others), objective=objective)
