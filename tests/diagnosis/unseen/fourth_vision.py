"""Programs of the fourth set on images: bytes, axes, augmentation, pretrained parts and normalisation."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.fourth_common import (
    SmallNet,
    fit,
    fit_with,
    glyphs,
    handwriting,
    mean_loss,
    photos,
    split,
)
from tests.diagnosis.unseen.programs import Program, loader, masks, program

CROSS_ENTROPY = nn.CrossEntropyLoss()


def coloured(rows=640):
    pixels, labels = photos(rows)
    return pixels.permute(0, 3, 1, 2).float().div(255).sub(0.3).div(0.2), labels


# --- preparation ------------------------------------------------------------------------------------------------------


@fault(
    "preprocessing",
    "the bytes of the images were divided by 255 as integers, which leaves zeros",
    why="the inputs are 0 everywhere, or nearly, and the outputs are the same for all rows",
)
def bytes_divided_as_integers():
    pixels, labels = handwriting()
    data = loader((pixels // 255).float(), labels)
    return program(SmallNet(), CROSS_ENTROPY, data, 2e-3, epochs=5, loop=fit)


class Plain(nn.Module):
    """A network without normalisation."""

    def __init__(self, channels=1, classes=8):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, classes)

    def forward(self, x):
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


@fault(
    "preprocessing",
    "the images were divided by 255 when they were read and once more by a transform, so that they are almost black",
    why="the inputs are positive and below 0.004, and the outputs hardly differ between the rows",
)
def images_divided_twice():
    pixels, labels = handwriting()
    data = loader(pixels.float() / 255 / 255, labels)
    return program(Plain(), CROSS_ENTROPY, data, 1e-2, torch.optim.SGD, epochs=6, loop=fit)


@fault(
    "shapes",
    "images with the channels last were brought to channels first by view instead of permute",
    knowable=False,
    why="the network gets three channels of well scaled numbers; only a look at the images shows that they are scrambled",
)
def channels_first_by_view():
    pixels, labels = photos()
    pixels = pixels.float().div(255).sub(0.3).div(0.2)
    data = loader(pixels.view(-1, 3, 16, 16), labels)
    return program(SmallNet(3, 6), CROSS_ENTROPY, data, 2e-3, epochs=5, loop=fit)


def mapper():
    layers = [nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(12, 1, 1))


def flipped(rows):
    """Collate rows, half of them mirrored."""
    pixels, mask = (torch.stack(column) for column in zip(*rows, strict=True))
    mirror = torch.rand(len(pixels), 1, 1, 1) < 0.5
    return torch.where(mirror, pixels.flip(3), pixels), mask


@fault(
    "augmentation",
    "the augmentation mirrors the images and leaves their masks as they are",
    knowable=False,
    why="the masks of half of the rows are wrong, which looks like masks that are hard to predict",
)
def mirrored_without_its_mask():
    data = loader(*masks(512), batch=16, collate_fn=flipped)
    return program(mapper(), nn.BCEWithLogitsLoss(), data, 3e-3, epochs=5, loop=fit)


def arrows(rows):
    """Return noisy images of an arrow to the left, right, top or bottom, and its direction."""
    arrow = torch.zeros(8, 8)
    arrow[3:5, 1:7] = 1
    arrow[[1, 2, 5, 6], [5, 6, 6, 5]] = 1
    turned = torch.stack([arrow, arrow.flip(1), arrow.T, arrow.flip(1).T])
    labels = torch.randint(4, (rows,))
    canvas = F.pad(turned[labels], (4, 4, 4, 4))[:, None]
    return canvas + 0.4 * torch.randn(rows, 1, 16, 16), labels


@fault(
    "augmentation",
    "random mirroring turns arrows to the left into arrows to the right, with the label of the left",
    knowable=False,
    why="two of the classes cannot be told apart any more, as happens with classes that are alike in truth",
)
def mirrored_arrows():
    data = loader(*arrows(640), collate_fn=flipped)
    return program(SmallNet(1, 4), CROSS_ENTROPY, data, 2e-3, epochs=6, loop=fit)


# --- parts of the network ---------------------------------------------------------------------------------------------


@fault(
    "activation",
    "LeakyReLU(True), meant to be in place, sets the slope to 1, so that the network has no nonlinearity",
    "act1",
    why="the activation returns its input for negative values too, since its slope is 1",
)
def leaky_relu_of_true():
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    model.add_module("fc1", nn.Linear(256, 64))
    model.add_module("act1", nn.LeakyReLU(True))
    model.add_module("fc2", nn.Linear(64, 64))
    model.add_module("act2", nn.LeakyReLU(True))
    model.add_module("fc3", nn.Linear(64, 8))
    return program(model, CROSS_ENTROPY, loader(*glyphs()), 1e-3, epochs=6, loop=fit)


def pretrained(kind=SmallNet, steps=60, **options):
    """Return a network after a training on other classes of glyphs."""
    model = kind(**options)
    earlier = program(model, CROSS_ENTROPY, loader(*glyphs(640)), 3e-3, epochs=steps // 20, loop=fit)
    earlier.loop(earlier)
    return model


def brightened(rows):
    """Collate rows with random contrast and brightness."""
    pixels, labels = zip(*rows, strict=True)
    return (1 + torch.rand(len(rows), 1, 1, 1)) * torch.stack(pixels) + torch.rand(len(rows), 1, 1, 1), torch.stack(
        labels
    )


@fault(
    "fine-tuning",
    "the frozen backbone stays in training mode, so that its BatchNorm layers lose the pretrained statistics",
    "bn1",
    why="running statistics change in every step in layers of which no weight is trained",
)
def frozen_backbone_in_training_mode():
    model = pretrained()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.fc = nn.Linear(512, 8)
    (inputs, labels), held_out = split(*glyphs())
    optimizer = torch.optim.Adam(model.fc.parameters(), 2e-3)
    return Program(
        model, CROSS_ENTROPY, loader(inputs, labels, collate_fn=brightened), optimizer, 5, fit_with(held_out)
    )


@fault(
    "checkpoint",
    "no name in the checkpoint fits the model, which strict=False hides, so that a random backbone is frozen",
    knowable=False,
    why="the load came before the run, and a frozen backbone with random weights is like any other frozen one",
)
def checkpoint_with_other_names():
    saved = {f"module.{name}": value for name, value in pretrained().state_dict().items() if "fc" not in name}
    model = SmallNet()
    model.load_state_dict(saved, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fc"))

    def loop(program):
        for _ in range(program.epochs):
            program.model.eval()
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()

    return Program(model, CROSS_ENTROPY, loader(*glyphs()), torch.optim.Adam(model.fc.parameters(), 1e-3), 6, loop)


@fault(
    "loss",
    "ignore_index=0 was meant for unlabelled pixels, but 0 is the background, so that only the foreground is learned",
    why="most targets equal the ignored index; the loss goes to 0 while all pixels are called foreground",
)
def background_is_the_ignored_index():
    inputs, mask = masks(512)
    model = mapper()
    model[5] = nn.Conv2d(12, 2, 1)
    data = loader(inputs, mask[:, 0].long(), batch=16)
    return program(model, nn.CrossEntropyLoss(ignore_index=0), data, 3e-3, epochs=4, loop=fit)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("fine-tuning")
def new_head_of_zeros_and_two_rates():
    model = pretrained()
    model.fc = nn.Linear(512, 8)
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("fc")]
    groups = [{"params": body, "lr": 2e-4}, {"params": model.fc.parameters(), "lr": 4e-3}]
    (inputs, labels), held_out = split(*glyphs())
    return Program(model, CROSS_ENTROPY, loader(inputs, labels), torch.optim.AdamW(groups), 5, fit_with(held_out))


@healthy("fine-tuning")
def frozen_backbone_in_evaluation_mode():
    model = pretrained()
    model.requires_grad_(False)
    model.fc = nn.Linear(512, 8)
    (inputs, labels), held_out = split(*glyphs())

    def loop(program):
        for _ in range(program.epochs):
            program.model.eval()
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()
            mean_loss(program, held_out)

    data, optimizer = loader(inputs, labels), torch.optim.Adam(model.fc.parameters(), 2e-3)
    return Program(model, CROSS_ENTROPY, data, optimizer, 6, loop)


class StandardisedConv(nn.Conv2d):
    """A convolution with standardised weights."""

    def forward(self, x):
        deviation, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / (deviation * self.weight[0].numel() ** 0.5), self.bias, padding=1)


@healthy("normalisation")
def standardised_weights_and_two_images_in_a_batch():
    layers = [StandardisedConv(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [StandardisedConv(16, 32, 3), nn.GroupNorm(8, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 6))
    return program(model, CROSS_ENTROPY, loader(*coloured(), batch=2), 1e-2, torch.optim.SGD, epochs=2, loop=fit)


@healthy("augmentation")
def mixed_images_and_smooth_labels():
    model = SmallNet()
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loop(program):
        program.model.train()
        for _ in range(program.epochs):
            for inputs, labels in program.loader:
                share = torch.distributions.Beta(0.4, 0.4).sample()
                other = torch.randperm(len(inputs))
                targets = F.one_hot(labels, 8).float()
                mixed = share * inputs + (1 - share) * inputs[other]
                program.optimizer.zero_grad()
                program.loss(program.model(mixed), share * targets + (1 - share) * targets[other]).backward()
                program.optimizer.step()

    return program(model, loss, loader(*glyphs()), 2e-3, torch.optim.AdamW, epochs=6, loop=loop)
