"""Programs of the third set: images, augmentation, detection, segmentation, transfer, and what is measured."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import Program, classifier, loader
from tests.diagnosis.unseen.third_common import training


def shapes(rows=640, size=12, classes=4):
    """Images of one channel, with one of four small patterns at a random place."""
    patterns = (torch.rand(classes, 4, 4) > 0.5).float()
    labels, places = torch.randint(0, classes, (rows,)), torch.randint(0, size - 3, (rows, 2))
    images = 0.2 * torch.randn(rows, 1, size, size)
    for i in range(rows):
        y, x = places[i]
        images[i, 0, y : y + 4, x : x + 4] += patterns[labels[i]]
    return images, labels, (places + 2).float()


def convolutions(classes=4, channels=1):
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 4),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(24, classes),
    )


def regions(rows=480, size=12):
    """Images with a bright square, and its mask."""
    images, masks = 0.3 * torch.randn(rows, 1, size, size), torch.zeros(rows, 1, size, size)
    for i, (y, x) in enumerate(torch.randint(0, size - 4, (rows, 2)).tolist()):
        masks[i, 0, y : y + 4, x : x + 3] = 1
    return images + masks, masks


def masking():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )


def altered(change):
    """An objective that changes the images before the network sees them."""

    def objective(program, images, labels):
        return F.cross_entropy(program.model(change(images)), labels)

    return objective


# --- images and augmentation ------------------------------------------------------------------------------------------


@fault(
    "images",
    "images of height x width x channel were brought to channel x height x width by `reshape` and not by `permute`",
    knowable=False,
    why="the shape is right and the values are those of the image; only a person who looks at it sees that it is torn",
)
def channels_by_reshape():
    images, labels, _ = shapes()
    colours = torch.cat([images, 0.2 * torch.randn_like(images), 0.2 * torch.randn_like(images)], 1)
    stored = colours.permute(0, 2, 3, 1).contiguous()
    return classifier(convolutions(channels=3), loader(stored.reshape(-1, 3, 12, 12), labels), epochs=6)


@fault(
    "augmentation",
    "the images are mirrored at random, while the label says whether the pattern is on the left or on the right",
    knowable=False,
    why="a mirror image is a sound augmentation for other labels; what the labels mean is not in the run",
)
def mirrored_left_and_right():
    images, _, places = shapes()

    def mirror(batch):
        return torch.where(torch.rand(len(batch), 1, 1, 1) < 0.5, batch.flip(3), batch)

    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 48), nn.ReLU(), nn.Linear(48, 2))
    return training(model, loader(images, (places[:, 1] > 6).long()), altered(mirror))


@fault(
    "augmentation",
    "pairs of images are mixed half and half, but the labels are those of the first image alone",
    why="the input of the network is the mean of two images of the batch, while each target is one whole label",
)
def images_mixed_and_labels_not():
    images, labels, _ = shapes()

    def mix(batch):
        return 0.5 * batch + 0.5 * batch[torch.randperm(len(batch))]

    return training(convolutions(), loader(images, labels), altered(mix))


@fault(
    "images",
    "the first convolution has a kernel of 1 and a stride of 4, so that fifteen of sixteen pixels are never read",
    "0",
    why="the gradient with respect to the image is zero but for every fourth row and column",
)
def most_pixels_are_never_read():
    images, labels, _ = shapes()
    model = convolutions()
    model[0], model[3] = nn.Conv2d(1, 16, 1, stride=4), nn.Conv2d(16, 24, 2)
    return classifier(model, loader(images, labels), epochs=5)


# --- segmentation and detection ---------------------------------------------------------------------------------------


@fault(
    "segmentation",
    "the images are turned at random, and their masks are not",
    knowable=False,
    why="the images reach the run turned already; that a mask lies elsewhere than its square, only a person can see",
)
def images_turned_and_masks_not():
    images, masks = regions()
    turned = torch.stack([image.rot90(int(torch.randint(0, 4, ())), (1, 2)) for image in images])
    return classifier(masking(), loader(turned, masks), loss=nn.BCEWithLogitsLoss(), epochs=6)


def overlap(outputs, masks):
    shares = outputs.sigmoid()
    return 2 * (shares * masks).sum() / (shares.sum() + masks.sum() + 1e-6)


@fault(
    "segmentation",
    "the overlap itself is minimised instead of one minus the overlap, and the network learns to mark all but the object",
    why="the loss is largest for outputs equal to the targets; outputs fall where the mask is 1",
)
def overlap_minimised():
    return classifier(masking(), loader(*regions()), loss=overlap, epochs=5)


@fault(
    "detection",
    "the centres are to be predicted in pixels, 2 to 11, by a network that ends in a sigmoid",
    "6",
    why="all targets are above 1, all outputs come to 1, and the gradient of the sigmoid vanishes",
)
def pixels_from_a_sigmoid():
    images, _, places = shapes()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(648, 32), nn.ReLU(), nn.Linear(32, 2), nn.Sigmoid()
    )
    return classifier(model, loader(images, places), loss=nn.SmoothL1Loss(), epochs=5)


# --- transfer and measurement -----------------------------------------------------------------------------------------


@fault(
    "transfer",
    "`model.fc.out_features = 4` was set for the new task, which changes a number and leaves the layer with 100 outputs",
    "7",
    why="the layer says 4 outputs and gives 100; 96 of them are never a target",
)
def number_of_outputs_renamed():
    images, labels, _ = shapes()
    model = convolutions(classes=100)
    model[7].out_features = 4
    return classifier(model, loader(images, labels), epochs=5)


@fault(
    "train and eval",
    "the accuracy is measured in training mode, so that the held rows go into the statistics of the batch norm",
    "1",
    why="the running statistics change in batches without gradients, whose module is set to training",
)
def measured_in_training_mode():
    images, labels, _ = shapes(704)

    def loop(program):
        for _ in range(program.epochs):
            for batch, goals in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(batch), goals).backward()
                program.optimizer.step()
            with torch.no_grad():
                program.loss(program.model(images[640:]), labels[640:])

    return classifier(convolutions(), loader(images[:640], labels[:640]), epochs=5, loop=loop)


@fault(
    "measurement",
    "the accuracy divides by the nominal size of the batch, although the last batch has four rows",
    knowable=False,
    why="the training is sound, and the number is made in Python, which no tensor, gradient or call shows",
)
def accuracy_by_the_nominal_batch():
    images, labels, _ = shapes(644)

    def loop(program):
        program.accuracy = []
        for _ in range(program.epochs):
            for batch, goals in program.loader:
                program.optimizer.zero_grad()
                outputs = program.model(batch)
                program.loss(outputs, goals).backward()
                program.optimizer.step()
                program.accuracy.append(
                    sum(a == b for a, b in zip(outputs.argmax(1).tolist(), goals.tolist(), strict=True)) / 32
                )

    return classifier(convolutions(), loader(images, labels), epochs=5, loop=loop)


# --- healthy ----------------------------------------------------------------------------------------------------------


@healthy("segmentation")
def squares_by_overlap():
    """One minus the overlap as the loss, with no other; it falls to less than a half."""
    return classifier(masking(), loader(*regions()), loss=lambda o, t: 1 - overlap(o, t), epochs=8, rate=0.01)


@healthy("transfer")
def head_of_the_right_size():
    """A frozen batch norm in evaluation mode and a new head; the loss falls to less than a half."""
    images, labels, _ = shapes()
    model = convolutions(classes=100)
    model[7] = nn.Linear(24, 4)
    model[1].requires_grad_(False).eval()
    return training(model, loader(images, labels), altered(lambda batch: batch), rate=0.01)


@healthy("images")
def two_images_at_a_time():
    """Batches of two with a group norm, which does not mind; the loss falls to less than a half."""
    images, labels, _ = shapes(280)
    model = convolutions()
    model[1] = nn.GroupNorm(4, 16)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return Program(model, nn.CrossEntropyLoss(), loader(images, labels, batch=2), optimizer, 1)
