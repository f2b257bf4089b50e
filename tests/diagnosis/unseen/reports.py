"""Faults rebuilt from published bug reports, from their text alone; they were chosen before any was run."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.diagnosis.unseen import fault
from tests.diagnosis.unseen.generative import towards
from tests.diagnosis.unseen.loops import evaluating, steps
from tests.diagnosis.unseen.programs import (
    Program,
    RecurrentClassifier,
    Transformer,
    blobs,
    classifier,
    convolutional,
    image_classifier,
    images,
    language_model,
    loader,
    mlp,
    recurrent,
    regression,
    regressor,
    signals,
    text,
)


@fault(
    "tables",
    "the model ends in a softmax, and CrossEntropyLoss applies another",
    module="5",
    report="https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814/16",
)
def softmax_before_cross_entropy():
    return classifier(mlp(20, 5).append(nn.Softmax(1)))


@fault(
    "regression",
    "outputs (N, 1) and targets (N,) are broadcast to (N, N)",
    report="https://discuss.pytorch.org/t/output-of-the-model-depends-on-the-shape-of-the-weights-tensor/148155",
)
def broadcast_targets():
    inputs = torch.rand(1024, 3)
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    return regressor(model, loader(inputs, inputs.sum(1), batch=128), rate=0.1, kind=torch.optim.SGD, epochs=25)


@fault(
    "recurrent networks",
    "batch_first=True for rows of shape (time, batch, features): the recurrence runs over the batch",
    module="rnn",
    report="https://discuss.pytorch.org/t/lstm-change-batch-first-true-loss-does-not-decrease/62364",
)
def recurrence_over_the_batch():
    class Labeller(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 24, batch_first=True), nn.Linear(24, 3)

        def forward(self, x):
            return self.head(self.rnn(x.transpose(0, 1))[0].transpose(0, 1)).mean(1)

    return recurrent(Labeller())


@fault(
    "language models",
    "the labels are shifted twice: position t is trained to predict token t + 2",
    report="https://github.com/huggingface/transformers/pull/47395",
    knowable=False,
)
def labels_shifted_twice():
    tokens = text(length=17)
    return language_model(Transformer(length=17), loader(tokens[:, :-2], tokens[:, 2:], batch=24))


@fault(
    "schedules",
    "a schedule that was meant for epochs is stepped at each batch: the rate is soon zero",
    report="https://github.com/Lornatang/SRGAN-PyTorch/issues/1",
)
def schedule_per_batch():
    program = classifier()
    program.schedulers = [lr_scheduler.StepLR(program.optimizer, step_size=8 // 2, gamma=0.1)]
    return program


@fault(
    "mixed precision",
    "gradients are clipped before they are unscaled, so that almost nothing is left of them",
    report="https://github.com/catalyst-team/catalyst/issues/1319",
)
def clipped_before_unscaling():
    def loop(program):
        scaler = torch.amp.GradScaler("cpu")
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            scaler.scale(program.loss(program.model(inputs), labels)).backward()
            nn.utils.clip_grad_norm_(program.model.parameters(), 1.0)
            scaler.step(program.optimizer)
            scaler.update()

    return classifier(rate=0.1, kind=torch.optim.SGD, loop=loop)


@fault(
    "optimizers",
    "the model is instantiated a second time, and the optimizer holds the parameters of the first",
    report="https://github.com/spro/practical-pytorch/issues/9",
)
def optimizer_of_another_instance():
    program = recurrent()
    program.optimizer = torch.optim.SGD(RecurrentClassifier().parameters(), lr=0.005)
    return program


@fault(
    "recurrent networks",
    "the hidden state is detached at each step, so that the module before it gets no gradient",
    module="change",
    report="https://github.com/rtqichen/torchdiffeq/issues/79",
)
def hidden_state_detached():
    class Evolving(nn.Module):
        def __init__(self):
            super().__init__()
            self.change, self.cell, self.head = (
                nn.Sequential(nn.Linear(24, 24), nn.Tanh()),
                nn.GRUCell(3, 24),
                nn.Linear(24, 3),
            )

        def forward(self, x):
            hidden = torch.zeros(len(x), 24)
            for time in range(x.shape[1]):
                hidden = hidden + 0.1 * self.change(hidden)
                hidden = self.cell(x[:, time], hidden.detach())
            return self.head(hidden)

    return recurrent(Evolving())


@fault(
    "evaluation",
    "validation runs in training mode: batch norm takes its statistics from the validation rows",
    report="https://github.com/wolny/pytorch-3dunet/issues/53",
)
def validation_in_training_mode():
    pixels, labels = images(768)
    program = image_classifier(data=loader(pixels[:512], labels[:512]))
    program.loop = evaluating(validation=loader(pixels[512:], labels[512:], shuffle=False), evaluate=False)
    return program


@fault(
    "accumulation",
    "the loss is not divided by the number of accumulated parts",
    report="https://github.com/hirofumi0810/neural_sp/issues/168",
    knowable=False,
)
def accumulation_not_divided():
    def loop(program):
        for number, inputs, labels in steps(program):
            program.loss(program.model(inputs), labels).backward()
            if number % 8 == 7:
                program.optimizer.step()
                program.optimizer.zero_grad()

    return classifier(data=loader(*blobs(), batch=8), loop=loop, rate=0.1, kind=torch.optim.SGD, epochs=3)


@fault(
    "language models",
    "the labels are the inputs: the model copies its input, and the loss is almost zero",
    report="https://github.com/ayaka14732/bart-base-jax/pull/6",
)
def labels_are_the_inputs():
    tokens = text()[:, :-1]
    return language_model(data=loader(tokens, tokens, batch=24))


@fault(
    "regression",
    "the loss subtracts a multiple of the spread of the predictions and has no lower bound",
    report="https://discuss.pytorch.org/t/loss-function-finding-extreme-local-minimum/188664",
)
def loss_with_negative_spread():
    return regressor(loss=lambda o, t: ((t - o) ** 2).sum() - 100 * o.std(), data=loader(*regression(), batch=16))


@fault(
    "adversarial networks",
    "the adversarial loss is detached and added as a number: it has no effect on the generator",
    report="https://github.com/guopengf/FL-MRCM/issues/10",
    knowable=False,
)
def detached_adversarial_loss():
    model, critic = mlp(12, 1), mlp(1, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, critic)]

    def loop(program):
        for _, inputs, targets in steps(program):
            outputs = program.model(inputs)
            optimizers[0].zero_grad()
            (F.mse_loss(outputs, targets) + 0.01 * towards(critic(outputs), 1.0).item()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (towards(critic(targets), 1.0) + towards(critic(outputs.detach()), 0.0)).backward()
            optimizers[1].step()

    return Program(model, nn.MSELoss(), loader(*regression()), optimizers[0], loop=loop, others=[critic])


@fault(
    "images",
    "layers are created in forward() and have new random weights at each call",
    module="head",
)
def layers_created_in_forward():
    class Fresh(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = convolutional()

        def forward(self, x):
            self.head = nn.Linear(144, 4)
            return self.head(self.features(x).flatten(1))

    return image_classifier(Fresh())


@fault(
    "tables",
    "a copy of the model is trained, and the model that is evaluated never changes",
    knowable=True,
)
def a_copy_is_trained():
    program = classifier()
    copied = copy.deepcopy(program.model)
    program.optimizer = torch.optim.Adam(copied.parameters(), lr=3e-3)
    return program


@fault("recurrent networks", "the batch is reshaped and not transposed, which mixes time and rows", module="rnn")
def reshaped_to_time_first():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 24), nn.Linear(24, 3)

        def forward(self, x):
            return self.head(self.rnn(x.reshape(x.shape[1], len(x), 3))[0][-1])

    return recurrent(Mixed(), loader(*signals()))
