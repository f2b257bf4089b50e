"""Faults in the loop: optimizers, mixed precision, accumulation, schedules, loading and evaluation."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.diagnosis.unseen import fault
from tests.diagnosis.unseen.programs import (
    blobs,
    classifier,
    image_classifier,
    images,
    loader,
    mlp,
    regression,
    regressor,
)


def steps(program):
    """Yield the number of the step with its batch."""
    number = 0
    for _ in range(program.epochs):
        for inputs, labels in program.loader:
            yield number, inputs, labels
            number += 1


# --- optimizers -------------------------------------------------------------------------------------------------------


@fault("optimizers", "an epsilon of 1 in Adam outweighs the gradients")
def epsilon_of_one():
    program = classifier()
    program.optimizer = torch.optim.Adam(program.model.parameters(), lr=3e-4, eps=1.0)
    return program


@fault("optimizers", "a momentum of 0.999 multiplies the learning rate by a thousand, the loss swings")
def momentum_too_high():
    program = classifier()
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1, momentum=0.999)
    return program


@fault("optimizers", "a filter by name keeps the biases only: no weight is in the optimizer")
def biases_only():
    program = classifier()
    kept = [p for name, p in program.model.named_parameters() if "weight" not in name]
    program.optimizer = torch.optim.Adam(kept, lr=3e-3)
    return program


@fault("optimizers", "gradients are clipped to a norm of 1e-5 with SGD: nothing moves")
def clipped_to_nothing():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(program.model.parameters(), 1e-5)
            program.optimizer.step()

    return classifier(rate=0.1, kind=torch.optim.SGD, loop=loop)


@fault("optimizers", "gradients are clipped after the step, when it has no effect")
def clipped_after_the_step():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            nn.utils.clip_grad_norm_(program.model.parameters(), 0.1)

    return regressor(data=loader(*regression()), loop=loop)


@fault("optimizers", "step() is called before backward(), when the gradients have just been cleared")
def step_before_backward():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            loss = program.loss(program.model(inputs), labels)
            program.optimizer.step()
            loss.backward()

    return classifier(loop=loop)


@fault("optimizers", "the optimizer is built anew at each step: its moments restart")
def optimizer_in_the_loop():
    def loop(program):
        for _, inputs, labels in steps(program):
            optimizer = torch.optim.Adam(program.model.parameters(), lr=3e-3)
            program.loss(program.model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    return classifier(loop=loop)


@fault("optimizers", "two optimizers hold the same parameters, each step is taken twice")
def two_optimizers_for_the_same():
    def loop(program):
        second = torch.optim.Adam(program.model.parameters(), lr=3e-3)
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            second.step()

    return classifier(loop=loop)


# --- mixed precision --------------------------------------------------------------------------------------------------


@fault("mixed precision", "optimizer.step() instead of scaler.step(): updates with scaled gradients")
def scaler_bypassed():
    def loop(program):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            scaler.scale(program.loss(program.model(inputs), labels)).backward()
            program.optimizer.step()

    return classifier(rate=0.05, kind=torch.optim.SGD, loop=loop)


@fault("mixed precision", "Adam's epsilon of 1e-8 is zero in float16: a division by zero gives NaN")
def half_precision_adam():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            F.cross_entropy(program.model(inputs.half()).float(), labels).backward()
            program.optimizer.step()

    return classifier(mlp(20, 5).half(), loop=loop)


@fault("mixed precision", "weights in bfloat16 with small steps: most updates are rounded away")
def updates_rounded_away():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            F.cross_entropy(program.model(inputs.bfloat16()).float(), labels).backward()
            program.optimizer.step()

    return classifier(mlp(20, 5).bfloat16(), rate=1e-5, loop=loop)


@fault("mixed precision", "a sum of squares overflows in float16, and the loss is infinite", module="0")
def overflow_in_half():
    class Squares(nn.Sequential):
        def forward(self, x):
            hidden = self[0](x).half()
            return self[1](((hidden * 200) ** 2).float() / 1e4)

    return classifier(Squares(nn.Linear(20, 48), nn.Linear(48, 5)))


# --- accumulation -----------------------------------------------------------------------------------------------------


@fault("accumulation", "gradients are never cleared")
def never_cleared():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()

    return classifier(rate=0.02, kind=torch.optim.SGD, loop=loop)


@fault("accumulation", "gradients are cleared between backward and step")
def cleared_before_the_step():
    def loop(program):
        for _, inputs, labels in steps(program):
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.zero_grad()
            program.optimizer.step()

    return classifier(loop=loop)


@fault("accumulation", "a step after each batch, but gradients are cleared after every fourth")
def step_at_each_part():
    def loop(program):
        for number, inputs, labels in steps(program):
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()
            if number % 4 == 3:
                program.optimizer.zero_grad()

    return classifier(loop=loop)


@fault("accumulation", "the loop clears the gradients at each part, so that only the last part of four counts")
def parts_cleared():
    def loop(program):
        for number, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            (program.loss(program.model(inputs), labels) / 4).backward()
            if number % 4 == 3:
                program.optimizer.step()

    return classifier(data=loader(*blobs(), batch=16), loop=loop)


# --- schedules --------------------------------------------------------------------------------------------------------


@fault("schedules", "a warm-up over a million steps never ends")
def endless_warm_up():
    program = classifier()
    program.schedulers = [lr_scheduler.LambdaLR(program.optimizer, lambda step: min(1.0, (step + 1) / 1e6))]
    return program


@fault("schedules", "the schedule belongs to another optimizer and changes nothing", knowable=False)
def schedule_of_another_optimizer():
    program = classifier()
    other = torch.optim.Adam(program.model.parameters(), lr=3e-3)
    program.schedulers = [lr_scheduler.ExponentialLR(other, 0.99)]
    return program


@fault("schedules", "ReduceLROnPlateau with mode='max' watches a loss and lowers the rate although it falls")
def plateau_of_a_maximum():
    def loop(program):
        scheduler = lr_scheduler.ReduceLROnPlateau(program.optimizer, mode="max", patience=1)
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            loss = program.loss(program.model(inputs), labels)
            loss.backward()
            program.optimizer.step()
            scheduler.step(loss.item())

    return classifier(loop=loop)


@fault("schedules", "a cosine schedule for 5 epochs is stepped at each batch, and the rate goes up and down")
def cosine_per_batch():
    program = classifier()
    program.schedulers = [lr_scheduler.CosineAnnealingLR(program.optimizer, T_max=5)]
    return program


# --- loading ----------------------------------------------------------------------------------------------------------


@fault("loading", "two workers with equal seeds: each batch of generated rows comes twice in a row")
def workers_with_equal_seeds():
    def loop(program):
        centres = torch.randn(5, 20)
        for _ in range(90):
            labels = torch.randint(5, (32,))
            inputs = centres[labels] + torch.randn(32, 20)
            for _ in range(2):
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()

    return classifier(loop=loop)


@fault("loading", "the labels of a batch come with the next one", knowable=False)
def labels_one_batch_late():
    inputs, labels = blobs()
    return classifier(data=loader(inputs, labels.roll(32), shuffle=False))


@fault("loading", "the generator is seeded in each epoch: the order is always the same", knowable=True)
def same_order_each_epoch():
    def loop(program):
        for _ in range(8):
            torch.manual_seed(0)
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()

    return classifier(loop=loop)


@fault("loading", "a normalization by the statistics of each batch mixes its rows", knowable=False)
def normalized_by_batch():
    def collate(rows):
        inputs, labels = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
        return (inputs - inputs.mean(0)) / inputs.std(0), labels

    return classifier(data=loader(*blobs(), collate_fn=collate))


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluating(change=None, train_again=True, validation=None, evaluate=True):
    """Return a loop with a pass over *validation* after each epoch, for which *change* gets the inputs."""

    def loop(program):
        for _ in range(8):
            if train_again:
                program.model.train()
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()
            if evaluate:
                program.model.eval()
            with torch.no_grad():
                for inputs, labels in validation or program.loader:
                    program.loss(program.model(change(inputs) if change else inputs), labels)

    return loop


@fault("evaluation", "the rows of the validation are among those of the training")
def validation_rows_in_training():
    inputs, labels = blobs()
    return classifier(
        data=loader(inputs, labels), loop=evaluating(validation=loader(inputs[:200], labels[:200], shuffle=False))
    )


@fault("evaluation", "the inputs of the validation are not scaled as those of the training")
def validation_in_other_units():
    pixels, labels = images(768)
    program = image_classifier(data=loader(pixels[:512], labels[:512]))
    program.loop = evaluating(validation=loader(255 * pixels[512:] + 100, labels[512:], shuffle=False))
    return program


@fault("evaluation", "after the first validation the model is never set back to training mode")
def never_back_to_training():
    pixels, labels = images(768)
    program = image_classifier(data=loader(pixels[:512], labels[:512]))
    program.loop = evaluating(train_again=False, validation=loader(pixels[512:], labels[512:], shuffle=False))
    return program


class AlwaysDropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(20, 48), nn.Linear(48, 5)

    def forward(self, x):
        return self.head(F.dropout(self.hidden(x).relu(), 0.5))


@fault("evaluation", "F.dropout without training=self.training is also active in evaluation", module="hidden")
def dropout_in_evaluation():
    inputs, labels = blobs(1024)
    data = loader(inputs[:768], labels[:768])
    return classifier(
        AlwaysDropped(), data, loop=evaluating(validation=loader(inputs[768:], labels[768:], shuffle=False))
    )


@fault("evaluation", "averaged weights are swapped in for the validation and never swapped back")
def average_not_swapped_back():
    def loop(program):
        average = copy.deepcopy(program.model)
        for _ in range(8):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()
                with torch.no_grad():
                    for mean, p in zip(average.parameters(), program.model.parameters(), strict=True):
                        mean.lerp_(p, 0.02)
            program.model.load_state_dict(average.state_dict())

    return classifier(loop=loop)


@fault("evaluation", "the validation also calls backward() and step()")
def trained_on_the_validation():
    inputs, labels = blobs(1024)
    validation = loader(inputs[768:], labels[768:], shuffle=False)

    def loop(program):
        for _ in range(8):
            program.model.train()
            plain_epoch(program, program.loader)
            program.model.eval()
            plain_epoch(program, validation)

    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 5))
    return classifier(model, loader(inputs[:768], labels[:768]), loop=loop)


def plain_epoch(program, data):
    for inputs, labels in data:
        program.optimizer.zero_grad()
        program.loss(program.model(inputs), labels).backward()
        program.optimizer.step()
