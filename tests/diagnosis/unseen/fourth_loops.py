"""Programs of the fourth set: the training loop, modes, gradients that are added up, and checkpoints."""

import torch
from torch import nn

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import SmallNet, glyphs, mean_loss, patients, priced, split, train_epoch
from tests.diagnosis.unseen.programs import Program, blobs, loader, mlp, program

CROSS_ENTROPY = nn.CrossEntropyLoss()


def dropped(features=20, classes=5):
    layers = [nn.Linear(features, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(96, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, classes))


# --- gradients and steps ----------------------------------------------------------------------------------------------


@fault(
    "loop",
    "zero_grad is never called, so that each step follows the sum of all gradients so far",
    why="the gradients grow from step to step, and each is the last one plus that of the batch",
)
def no_clearing_of_gradients():
    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, prices in program.loader:
                loss = program.loss(program.model(inputs), prices)
                loss.backward()
                program.optimizer.step()

    return program(mlp(8, 1, 64), nn.MSELoss(), loader(*priced()), 0.02, torch.optim.SGD, epochs=8, loop=loop)


@fault(
    "loop",
    "zero_grad stands between backward and step, so that no step has a gradient",
    why="backward gives gradients, but there are none at the step, and the weights never change",
)
def gradients_cleared_before_the_step():
    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                loss = program.loss(program.model(inputs), labels)
                loss.backward()
                program.optimizer.zero_grad()
                program.optimizer.step()

    return program(dropped(), CROSS_ENTROPY, loader(*blobs(1024)), 1e-3, epochs=5, loop=loop)


@fault(
    "loop",
    "the step is indented outside the loop over the batches, so that there is one step in an epoch, from its last batch",
    why="of each epoch's gradients all but those of the last batch are cleared without a step",
)
def one_step_in_an_epoch():
    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                loss = program.loss(program.model(inputs), labels)
                loss.backward()
            program.optimizer.step()

    data = loader(*patients(512), batch=128)
    return program(mlp(12, 1, 64), nn.BCEWithLogitsLoss(), data, 1e-3, epochs=80, loop=loop)


@fault(
    "accumulation",
    "the gradients of 16 batches add up, and the loss is not divided by 16, with a rate chosen for one batch",
    why="each step follows the sum of 16 gradients, and the loss jumps up and down or diverges",
)
def sixteen_batches_undivided():
    def loop(program):
        program.model.train()
        program.optimizer.zero_grad()
        for _ in range(program.epochs):
            for number, (inputs, prices) in enumerate(program.loader):
                program.loss(program.model(inputs), prices).backward()
                if (number + 1) % 16 == 0:
                    program.optimizer.step()
                    program.optimizer.zero_grad()

    data = loader(*priced(2048), batch=16)
    return program(mlp(8, 1, 64), nn.MSELoss(), data, 0.15, torch.optim.SGD, epochs=10, loop=loop)


# --- modes ------------------------------------------------------------------------------------------------------------


@fault(
    "mode",
    "the validation sets evaluation mode, and train() is called before the first epoch only",
    why="from the second epoch on the network trains in evaluation mode, without dropout and with fixed statistics",
)
def training_mode_only_once():
    (inputs, labels), held_out = split(*blobs(1280))

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()
            program.model.eval()
            mean_loss(program, held_out)

    return program(dropped(), CROSS_ENTROPY, loader(inputs, labels), 1e-3, epochs=6, loop=loop)


@fault(
    "mode",
    "the validation runs in training mode, with dropout, and BatchNorm learns the statistics of the held-out rows",
    why="rows pass without gradients in training mode, and change the running statistics",
)
def held_out_rows_in_training_mode():
    (inputs, labels), held_out = split(*blobs(1280))

    def loop(program):
        for _ in range(program.epochs):
            train_epoch(program)
            mean_loss(program, held_out)

    return program(dropped(), CROSS_ENTROPY, loader(inputs, labels), 1e-3, epochs=6, loop=loop)


# --- the weights that are kept ----------------------------------------------------------------------------------------


@fault(
    "checkpoint",
    "the best weights are kept as state_dict() without a copy, so that they change with the training",
    knowable=False,
    why="the dictionary is a variable of the script, and to load it at the end changes nothing",
)
def best_weights_without_a_copy():
    (inputs, labels), held_out = split(*blobs(384))
    labels = torch.where(torch.rand(len(labels)) < 0.1, labels.roll(1), labels)

    def loop(program):
        lowest, best = float("inf"), None
        for _ in range(program.epochs):
            train_epoch(program)
            program.model.eval()
            value = mean_loss(program, held_out)
            if value < lowest:
                lowest, best = value, program.model.state_dict()
        program.model.load_state_dict(best)

    return program(mlp(20, 5, 256), CROSS_ENTROPY, loader(inputs, labels), 3e-3, epochs=20, loop=loop)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("accumulation")
def added_up_with_a_remainder():
    inputs, labels = glyphs(700)

    def loop(program):
        batches = len(program.loader)
        for _ in range(program.epochs):
            program.model.train()
            for number, (inputs, labels) in enumerate(program.loader):
                begun = number // 4 * 4
                loss = program.loss(program.model(inputs), labels) / min(4, batches - begun)
                loss.backward()
                if (number + 1) % 4 == 0 or number + 1 == batches:
                    program.optimizer.step()
                    program.optimizer.zero_grad()

    return program(SmallNet(), CROSS_ENTROPY, loader(inputs, labels, batch=16), 2e-3, epochs=6, loop=loop)


@healthy("averaging")
def average_of_the_weights_for_the_validation():
    (inputs, labels), held_out = split(*blobs(1280))
    model = dropped()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))

    def loop(program):
        for _ in range(program.epochs):
            program.model.train()
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()
                average.update_parameters(program.model)
            average.eval()
            with torch.no_grad():
                for inputs, _ in held_out:
                    average(inputs).argmax(1)

    return program(model, CROSS_ENTROPY, loader(inputs, labels), 3e-3, epochs=6, loop=loop)


@healthy("optimizer")
def steps_from_the_worst_point_nearby():
    """Each step climbs to the worst point nearby, and takes the gradient from there (SAM)."""

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                weights = [weight for weight in program.model.parameters() if weight.grad is not None]
                norm = torch.stack([weight.grad.norm() for weight in weights]).norm() + 1e-12
                moves = [0.05 * weight.grad / norm for weight in weights]
                torch._foreach_add_([weight.data for weight in weights], moves)
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                torch._foreach_sub_([weight.data for weight in weights], moves)
                program.optimizer.step()

    model = mlp(20, 5, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Program(model, CROSS_ENTROPY, loader(*blobs(1024)), optimizer, 6, loop)


@healthy("regularisation")
def two_outputs_of_dropout_agree():
    """Each batch passes twice, and the two outputs should agree (R-Drop); validated in evaluation mode."""
    (inputs, labels), held_out = split(*blobs(1280))

    def loop(program):
        for _ in range(program.epochs):
            program.model.train()
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                first, second = program.model(inputs), program.model(inputs)
                both = program.loss(first, labels) + program.loss(second, labels)
                apart = (first.softmax(1) - second.softmax(1)).square().sum(1).mean()
                (both + 0.5 * apart).backward()
                program.optimizer.step()
            program.model.eval()
            mean_loss(program, held_out)

    return program(dropped(), CROSS_ENTROPY, loader(inputs, labels), 2e-3, epochs=6, loop=loop)
