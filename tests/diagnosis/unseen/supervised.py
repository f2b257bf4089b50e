"""Faults in tables, regression, many labels, images and segmentation."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault
from tests.diagnosis.unseen.programs import (
    Classifier,
    blobs,
    classifier,
    convolutional,
    image_classifier,
    images,
    loader,
    many_labels,
    masks,
    mlp,
    regression,
    regressor,
    segmentation,
)

# --- tables -----------------------------------------------------------------------------------------------------------


@fault("tables", "a ReLU after the last layer cuts the negative logits", module="5")
def relu_on_logits():
    return classifier(mlp(20, 5).append(nn.ReLU()))


@fault("tables", "one column of the inputs has values about a million times larger than the others")
def one_column_in_other_units():
    inputs, labels = blobs()
    inputs[:, 3] = 1e6 * inputs[:, 3].abs()
    return classifier(data=loader(inputs, labels))


@fault("tables", "some rows of the inputs hold NaN for missing values")
def missing_values():
    inputs, labels = blobs()
    inputs[500, 4] = float("nan")
    return classifier(data=loader(inputs, labels))


@fault("tables", "a column of the inputs is the label")
def label_among_the_inputs():
    inputs, labels = blobs()
    inputs[:, 7] = labels.float()
    return classifier(data=loader(inputs, labels))


@fault("tables", "the rows of the labels were permuted against those of the inputs", knowable=False)
def permuted_labels():
    inputs, labels = blobs()
    return classifier(data=loader(inputs, labels[torch.randperm(len(labels))]))


@fault("tables", "the rows are sorted by class and not shuffled")
def sorted_by_class():
    inputs, labels = blobs()
    order = labels.argsort()
    return classifier(data=loader(inputs[order], labels[order], shuffle=False))


@fault("tables", "the share to keep was given to a dropout as the share to drop (0.95)", module="2")
def keep_rate_as_dropout():
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.95), nn.Linear(48, 5))
    return classifier(model)


@fault("tables", "all weights of a layer start with the same value, so that its units stay equal", module="0")
def constant_start():
    model = mlp(20, 5)
    nn.init.constant_(model[0].weight, 0.1)
    nn.init.constant_(model[0].bias, 0.0)
    return classifier(model)


@fault("tables", "ten sigmoid layers: gradients vanish before the first layers", module="0")
def many_sigmoids():
    layers = [nn.Linear(20, 24), nn.Sigmoid()]
    for _ in range(9):
        layers += [nn.Linear(24, 24), nn.Sigmoid()]
    return classifier(nn.Sequential(*layers, nn.Linear(24, 5)))


@fault("tables", "a weight decay of 1 pulls all weights to zero")
def weight_decay_of_one():
    program = classifier()
    program.optimizer = torch.optim.Adam(program.model.parameters(), lr=3e-3, weight_decay=1.0)
    return program


@fault("tables", "class weights are the frequencies of the classes and not their inverses")
def weights_by_frequency():
    inputs, labels = blobs(classes=3)
    keep = (labels == 0) | (torch.rand(len(labels)) < 0.12)
    counts = labels[keep].bincount(minlength=3).float()
    loss = nn.CrossEntropyLoss(weight=counts / counts.sum())
    return classifier(mlp(20, 3), loader(inputs[keep], labels[keep], batch=16), loss=loss)


@fault("tables", "every step takes the first batch of the loader again")
def first_batch_again():
    def loop(program):
        for _ in range(150):
            inputs, labels = next(iter(program.loader))
            program.optimizer.zero_grad()
            program.loss(program.model(inputs), labels).backward()
            program.optimizer.step()

    return classifier(data=loader(*blobs(), shuffle=False), loop=loop)


@fault("tables", "an index divided by two: each row is twice in its batch")
def each_row_twice():
    inputs, labels = blobs()
    order = torch.randperm(len(labels))[torch.arange(len(labels)) // 2]
    return classifier(data=loader(inputs[order], labels[order], shuffle=False))


@fault("tables", "equal rows bear different labels, after a join of two tables")
def contradicting_labels():
    inputs, labels = blobs()
    return classifier(data=loader(inputs.repeat(2, 1), torch.cat([labels, (labels + 1) % 5])), epochs=4)


# --- regression -------------------------------------------------------------------------------------------------------


@fault("regression", "the targets are around 50000 and not scaled")
def targets_in_cents():
    inputs, targets = regression()
    return regressor(data=loader(inputs, 50_000 + 20_000 * targets))


@fault("regression", "a sigmoid at the end cannot reach the targets, which lie between -10 and 10", module="5")
def sigmoid_cannot_reach():
    inputs, targets = regression()
    return regressor(mlp(12, 1).append(nn.Sigmoid()), loader(inputs, 5 * targets))


@fault("regression", "the loss has the wrong sign and is maximized")
def negated_loss():
    return regressor(loss=lambda outputs, targets: -F.mse_loss(outputs, targets), rate=1e-3)


@fault("regression", "the gradient of a square root at zero is NaN although the loss is finite")
def root_of_zero():
    inputs, targets = regression()
    model = mlp(12, 1).append(nn.ReLU())
    return regressor(model, loader(inputs, targets.clamp_min(0)), loss=lambda o, t: ((o - t) ** 2).sqrt().mean())


@fault("regression", "the logarithm of negative targets is NaN")
def logarithm_of_targets():
    inputs, targets = regression()
    return regressor(data=loader(inputs, (targets + 1).log()))


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(12, 32), nn.Tanh()), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.encoder(x).detach())


@fault("regression", "the encoder's output is detached, so that the encoder never learns", module="encoder")
def detached_encoder():
    return regressor(Detached())


@fault("regression", "the learning rate is far too high, the loss explodes")
def rate_of_two():
    return regressor(rate=2.0, kind=torch.optim.SGD)


@fault("regression", "the learning rate is far too low, nothing is learned")
def rate_of_a_billionth():
    return regressor(rate=1e-9)


@fault("regression", "the loss sums over the batch with a learning rate that was meant for the mean")
def sum_for_mean():
    return regressor(
        data=loader(*regression(), batch=128), loss=nn.MSELoss(reduction="sum"), rate=0.1, kind=torch.optim.SGD
    )


# --- many labels ------------------------------------------------------------------------------------------------------


@fault("many labels", "a softmax over labels that do not exclude each other", module="5")
def softmax_for_many_labels():
    return classifier(mlp(20, 6).append(nn.Softmax(1)), loader(*many_labels()), loss=nn.BCELoss())


@fault("many labels", "cross entropy with rows of several ones: the labels are no distribution")
def cross_entropy_for_many_labels():
    return classifier(mlp(20, 6), loader(*many_labels()))


@fault("many labels", "a sigmoid before a loss that applies a sigmoid itself", module="5")
def two_sigmoids():
    return classifier(mlp(20, 6).append(nn.Sigmoid()), loader(*many_labels()), loss=nn.BCEWithLogitsLoss())


@fault("many labels", "pos_weight is the count of zeros instead of the ratio of zeros and ones")
def positives_weighted_by_a_count():
    inputs, labels = many_labels()
    return classifier(mlp(20, 6), loader(inputs, labels), loss=nn.BCEWithLogitsLoss(pos_weight=(1 - labels).sum(0)))


@fault("many labels", "labels of -1 and 1 for a loss that wants 0 and 1")
def labels_of_minus_one():
    inputs, labels = many_labels()
    return classifier(mlp(20, 6), loader(inputs, 2 * labels - 1), loss=nn.BCEWithLogitsLoss())


# --- images -----------------------------------------------------------------------------------------------------------


@fault("images", "pixels between 0 and 255 are not scaled")
def raw_pixels():
    pixels, labels = images()
    model = nn.Sequential(nn.Flatten(), *mlp(144, 4))
    return image_classifier(model, loader((pixels * 40 + 100).clamp(0, 255), labels))


@fault("images", "view instead of permute mixes up the pixels of (N, H, W, C)", knowable=False)
def view_for_permute():
    pixels, labels = images(channels=3)
    return image_classifier(Classifier(3), loader(pixels.permute(0, 2, 3, 1).reshape(-1, 3, 12, 12), labels))


@fault("images", "model.eval() was never undone: the model trains in evaluation mode")
def trained_in_eval_mode():
    program = image_classifier()
    program.model.eval()
    return program


@fault("images", "momentum 0 keeps the running statistics of a batch norm where they started", module="features.1")
def running_statistics_stand_still():
    def loop(program):
        for _ in range(6):
            for inputs, labels in program.loader:
                program.optimizer.zero_grad()
                program.loss(program.model(inputs), labels).backward()
                program.optimizer.step()
            program.model.eval()
            with torch.no_grad():
                for inputs, labels in program.loader:
                    program.loss(program.model(inputs), labels)
            program.model.train()

    pixels, labels = images()
    program = image_classifier(data=loader(5 + 3 * pixels, labels), loop=loop)
    program.model.features[1].momentum = 0.0
    return program


class BatchSoftmax(Classifier):
    def forward(self, pixels):
        maps = self.features(pixels)
        return self.head((maps * maps.flatten(1).mean(1).softmax(0)[:, None, None, None] * len(maps)).flatten(1))


@fault("images", "a softmax over the batch axis: each output depends on the other rows")
def softmax_over_the_batch():
    return image_classifier(BatchSoftmax())


@fault("images", "a bias of -10 makes every unit of a ReLU layer dead", module="head.1")
def dead_layer():
    model = Classifier()
    model.head = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 4))
    nn.init.constant_(model.head[0].bias, -10)
    return image_classifier(model)


class NoGradient(Classifier):
    def forward(self, pixels):
        with torch.no_grad():
            maps = self.features(pixels)
        return self.head(maps.flatten(1))


@fault("images", "torch.no_grad() around the features, which are to be trained", module="features")
def features_without_gradient():
    return image_classifier(NoGradient())


class InList(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(144, 32), nn.Linear(32, 32)]
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu()
        return self.head(x)


@fault("images", "layers in a plain list are not registered and never trained", module="hidden")
def layers_in_a_list():
    return image_classifier(InList())


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = convolutional(), nn.Linear(144, 144), nn.Linear(144, 4)

    def forward(self, x):
        x = self.first(x).flatten(1)
        return self.head(x + 0 * self.block(x).relu())


@fault("images", "a residual branch is multiplied by zero", module="block")
def branch_times_zero():
    return image_classifier(Gated())


@fault("images", "a third of the images could not be read and are black, with various labels")
def black_images():
    pixels, labels = images()
    pixels[torch.rand(len(pixels)) < 0.33] = 0
    return image_classifier(data=loader(pixels, labels))


# --- segmentation -----------------------------------------------------------------------------------------------------


def two_channels():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))


@fault("segmentation", "ignore_index is the number of the background, so that most labels are ignored")
def background_ignored():
    pixels, mask = masks()
    data = loader(pixels, mask[:, 0].long(), batch=16)
    return segmentation(two_channels(), data, loss=nn.CrossEntropyLoss(ignore_index=0))


def dice(probabilities, mask):
    overlap = (probabilities * mask).sum((1, 2, 3))
    return 1 - ((2 * overlap + 1) / (probabilities.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


@fault("segmentation", "the Dice loss takes logits instead of probabilities and has no lower bound")
def dice_of_logits():
    return segmentation(loss=dice)


@fault("segmentation", "masks resized with interpolation have values between 0 and 1", knowable=False)
def interpolated_masks():
    pixels, mask = masks()
    soft = F.interpolate(F.interpolate(mask, scale_factor=0.25, mode="bilinear"), scale_factor=4.0, mode="bilinear")
    return segmentation(data=loader(pixels, soft, batch=16))


@fault("segmentation", "the masks lie four pixels beside the images", knowable=False)
def shifted_masks():
    pixels, mask = masks()
    return segmentation(data=loader(pixels, mask.roll(4, -1), batch=16))


@fault("segmentation", "requires_grad_() on a loss of thresholded outputs: no parameter receives a gradient")
def loss_of_thresholded_outputs():
    def loss(outputs, mask):
        return ((outputs > 0).float() - mask).abs().mean().requires_grad_()

    return segmentation(loss=loss)


@fault("segmentation", "masks of 0 and 255 for a loss that wants 0 and 1")
def masks_of_255():
    pixels, mask = masks()
    return segmentation(data=loader(pixels, 255 * mask, batch=16))
