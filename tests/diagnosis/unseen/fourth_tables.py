"""Programs of the fourth set on tables: the rows, columns and labels that reach the network."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import fit, fit_with, houses, patients, priced, split, standardised
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp, program
from tests.diagnosis.unseen.third_common import training

# --- columns and targets in units of their own ------------------------------------------------------------------------


@fault(
    "preprocessing",
    "the prices are targets in whole euros, hundreds of thousands, and were not scaled for the usual learning rate",
    why="the targets are in the hundred thousands, while the outputs stay near 0 and the loss hardly falls",
)
def prices_in_whole_euros():
    inputs, prices = houses()
    data = loader(standardised(inputs), 1000 * prices)
    return program(mlp(8, 1, 64), nn.MSELoss(), data, 1e-3, epochs=8, loop=fit)


@fault(
    "preprocessing",
    "the yearly income in euros stands beside columns of size one, since only the other columns were standardised",
    why="one column of the inputs has values ten thousands of times as large as the others",
)
def income_beside_standard_columns():
    inputs, labels = patients()
    income = 20_000 + 60_000 * torch.rand(len(inputs), 1)
    data = loader(torch.cat([inputs, income], 1), labels)
    return program(mlp(13, 1, 64), nn.BCEWithLogitsLoss(), data, 1e-3, epochs=8, loop=fit)


@fault(
    "data",
    "empty cells of the table were read as nan and reached the network",
    why="some inputs are nan, and the loss and all weights are nan from that batch on",
)
def empty_cells_of_the_table():
    inputs, prices = priced()
    inputs[torch.randperm(len(inputs))[:6], 2] = float("nan")
    data = loader(inputs, prices)
    return program(mlp(8, 1, 64), nn.MSELoss(), data, 1e-3, epochs=6, loop=fit)


@fault(
    "data",
    "missing measurements are coded as -999 in the table, and were taken for values",
    why="the same number -999 comes again and again among inputs of size one",
)
def minus_999_for_missing_measurements():
    inputs, labels = patients()
    inputs[torch.rand(inputs.shape) < 0.08] = -999.0
    data = loader(inputs, labels)
    return program(mlp(12, 1, 64), nn.BCEWithLogitsLoss(), data, 1e-3, epochs=8, loop=fit)


@fault(
    "data",
    "the column to predict was not dropped from the inputs",
    why="one column of the inputs equals the target in every row",
)
def target_column_not_dropped():
    inputs, prices = priced()
    (inputs, prices), held_out = split(torch.cat([inputs, prices], 1), prices)
    return program(mlp(9, 1, 64), nn.MSELoss(), loader(inputs, prices), 2e-3, epochs=6, loop=fit_with(held_out))


@fault(
    "labels",
    "the labels are one row further down than the inputs, because the heading was skipped in one of two files only",
    knowable=False,
    why="each row has one wrong label in all epochs, which looks as if the labels did not depend on the inputs",
)
def heading_skipped_in_one_file():
    inputs, labels = blobs(1024)
    (inputs, labels), held_out = split(inputs[:-1], labels[1:])
    return program(
        mlp(20, 5, 64), nn.CrossEntropyLoss(), loader(inputs, labels), 2e-3, epochs=6, loop=fit_with(held_out)
    )


@fault(
    "data",
    "the table is sorted by class, and the loader does not shuffle",
    why="each batch has rows of one class only, or two; the loss jumps where the class changes",
)
def table_sorted_by_class():
    inputs, labels = blobs(1024, classes=6)
    order = labels.argsort(stable=True)
    data = loader(inputs[order], labels[order], shuffle=False)
    return program(mlp(20, 6, 64), nn.CrossEntropyLoss(), data, 3e-3, epochs=6, loop=fit)


@fault(
    "loss",
    "the weights of the classes are their counts instead of the inverse, so that the rare classes count next to nothing",
    why="the weights of the loss are largest for the classes that are most frequent among the targets",
)
def weights_by_count():
    inputs, labels = blobs(2048)
    keep = (labels < 2) | (torch.rand(2048) < 0.12)
    inputs, labels = inputs[keep], labels[keep]
    loss = nn.CrossEntropyLoss(weight=torch.bincount(labels).float() / len(labels))
    return program(mlp(20, 5, 64), loss, loader(inputs, labels), 2e-3, epochs=6, loop=fit)


@fault(
    "data",
    "each step takes the first batch of a new iterator over the loader, which does not shuffle",
    why="every step is taken on the same rows",
)
def first_batch_of_a_new_iterator():
    data = loader(*blobs(1024), shuffle=False)

    def loop(program):
        program.model.train()
        for _ in range(150):
            inputs, labels = next(iter(program.loader))
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()

    return program(mlp(20, 5, 64), nn.CrossEntropyLoss(), data, 1e-3, loop=loop)


@fault(
    "labels",
    "scores from 0 to 1 were cast to integers for the loss, which makes nearly all of them class 0",
    why="all targets of the run are 0, although the network has two outputs, and the loss falls to 0",
)
def scores_cast_to_integers():
    inputs, _ = patients()
    scores = (inputs[:, 0] - inputs[:, 1]).sigmoid()
    data = loader(inputs, scores.long())
    return program(mlp(12, 2, 64), nn.CrossEntropyLoss(), data, 1e-3, epochs=6, loop=fit)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("rate")
def rate_of_one_and_normalised_layers():
    layers = [nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5)]
    (inputs, labels), held_out = split(*blobs(1024))
    model, data = nn.Sequential(*layers), loader(inputs, labels)
    return program(model, nn.CrossEntropyLoss(), data, 1.0, torch.optim.SGD, epochs=8, loop=fit_with(held_out))


@healthy("loss")
def three_quantiles_of_the_price():
    inputs, prices = houses()
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def pinball(outputs, targets):
        error = targets - outputs
        return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    data = loader(standardised(inputs), standardised(prices))
    return program(mlp(8, 3, 64), pinball, data, 3e-3, epochs=8, loop=fit)


@healthy("loss")
def counts_of_claims():
    inputs = torch.randn(1024, 8)
    counts = torch.poisson((0.8 * inputs[:, :1] - 0.5 * inputs[:, 1:2].abs() - 0.5).exp())
    return program(mlp(8, 1), nn.PoissonNLLLoss(), loader(inputs, counts), 3e-3, epochs=8, loop=fit)


@healthy("imbalance")
def focal_loss_for_a_rare_illness():
    inputs, _ = patients(1536)
    labels = (inputs[:, :1] + inputs[:, 1:2] > 2.2).float()

    def focal(outputs, targets):
        each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        return (0.9 * targets + 0.1 * (1 - targets)).mul((1 - (-each).exp()) ** 2).mul(each).mean()

    return program(mlp(12, 1, 64), focal, loader(inputs, labels, batch=64), 3e-3, epochs=8, loop=fit)


@healthy("optimizer")
def lbfgs_on_the_whole_table():
    inputs, prices = priced()
    model = mlp(8, 1, 24, nn.Tanh)

    def loop(program):
        for _ in range(60):

            def closure():
                program.optimizer.zero_grad()
                loss = program.loss(program.model(inputs), prices)
                loss.backward()
                return loss

            program.optimizer.step(closure)

    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    return Program(model, nn.MSELoss(), [(inputs, prices)], optimizer, loop=loop)


@healthy("data")
def one_row_in_a_batch():
    inputs, prices = houses(300)
    layers = [nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1)]
    data = loader(standardised(inputs), standardised(prices), batch=1)
    return program(nn.Sequential(*layers), nn.HuberLoss(), data, 3e-3, torch.optim.SGD, epochs=2, loop=fit)


@healthy("loss")
def equation_as_the_loss():
    """A network that learns the solution of y' = -2 y with y(0) = 1 from the equation itself."""
    model = mlp(1, 1, 32, nn.Tanh)
    times = 2 * torch.rand(1024, 1)

    def objective(program, times):
        times = times.requires_grad_()
        values = program.model(times)
        (slopes,) = torch.autograd.grad(values.sum(), times, create_graph=True)
        start = program.model(torch.zeros(1, 1))
        return (slopes + 2 * values).square().mean() + (start - 1).square().mean()

    return training(model, loader(times, batch=64), objective, 5e-3, epochs=15)
