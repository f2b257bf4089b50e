"""Faults of the later set: tables, regression, several labels, images, segmentation and precision."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.loops import evaluating, steps
from tests.diagnosis.unseen.programs import (
    blobs,
    classifier,
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


def two_classes(outputs=1, after=None, loss=None, signs=False):
    inputs, labels = blobs(classes=2)
    labels = labels[:, None].float()
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, outputs), *([after] if after else []))
    return classifier(model, loader(inputs, 2 * labels - 1 if signs else labels), loss=loss)


@fault(
    "tables",
    "a softmax over a single output is always one",
    "3",
    why="the outputs are constant and the layer before the softmax gets gradients of zero",
)
def softmax_of_one_output():
    return two_classes(after=nn.Softmax(dim=1), loss=nn.BCELoss())


def hinge(outputs, labels):
    return (1 - labels * outputs).clamp(min=0).mean()


@fault(
    "tables",
    "a hinge loss wants labels of -1 and 1 and gets 0 and 1, so that rows with the label 0 teach nothing",
    why="rows with label 0 have a constant loss and no gradient",
)
def hinge_with_labels_of_zero():
    return two_classes(loss=hinge)


@healthy("tables")
def hinge_with_signs():
    return two_classes(loss=hinge, signs=True)


@fault("tables", "the loss wants log-probabilities and gets logits", why="the loss is negative and falls without end")
def likelihood_of_logits():
    return classifier(loss=nn.NLLLoss())


@fault(
    "tables",
    "the loss wants log-probabilities and gets probabilities",
    why="the loss is negative, which no negative logarithm of a probability is, and the outputs sum to one",
)
def likelihood_of_probabilities():
    return classifier(nn.Sequential(mlp(20, 5), nn.Softmax(dim=1)), loss=nn.NLLLoss())


@healthy("tables")
def likelihood_of_log_probabilities():
    return classifier(nn.Sequential(mlp(20, 5), nn.LogSoftmax(dim=1)), loss=nn.NLLLoss())


class WithCategories(nn.Module):
    def __init__(self):
        super().__init__()
        self.categories, self.body = nn.Embedding(40, 8), mlp(8 + 10, 4)

    def forward(self, rows):
        return self.body(torch.cat([self.categories(rows[:, 0].long()), rows[:, 1:]], 1))


def categories(scaled):
    codes = torch.randint(40, (768, 1)).float()
    rows = torch.cat([codes / 40 if scaled else codes, torch.randn(768, 10)], 1)
    labels = torch.randint(4, (40,))[codes[:, 0].long()]
    return classifier(WithCategories(), loader(rows, labels))


@fault(
    "tables",
    "the codes of the categories are scaled to [0, 1) before they are converted to integers, so that all of them are 0",
    "categories",
    why="the embedding gets the same index for every row",
)
def codes_truncated_to_zero():
    return categories(scaled=True)


@healthy("tables")
def codes_of_categories():
    return categories(scaled=False)


@fault(
    "tables",
    "there is no activation between the linear layers, so that the network is linear",
    why="linear layers follow each other, and the labels are no linear function of the inputs",
)
def layers_without_activations():
    inputs = torch.randn(768, 8)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 48), nn.Linear(48, 48), nn.Linear(48, 2))
    return classifier(model, loader(inputs, labels))


@fault("tables", "the labels are smoothed until they are nearly uniform", why="the loss states a smoothing of 0.9")
def smoothing_of_nearly_one():
    return classifier(loss=nn.CrossEntropyLoss(label_smoothing=0.9))


@fault(
    "tables",
    "a join found no partner for nearly all rows and filled their columns with zeros",
    why="nine rows in ten are all zeros while their labels differ",
)
def join_that_found_nothing():
    inputs, labels = blobs()
    inputs[torch.rand(len(inputs)) < 0.9] = 0
    return classifier(data=loader(inputs, labels))


@fault(
    "tables",
    "the sampler has a weight for each class where it wants one for each row, so that only the first rows are drawn",
    why="all batches consist of the same five rows",
)
def sampler_with_weights_of_classes():
    inputs, labels = blobs()
    sampler = WeightedRandomSampler(1 / labels.bincount(minlength=5).float(), num_samples=len(labels))
    return classifier(data=DataLoader(TensorDataset(inputs, labels), batch_size=32, sampler=sampler))


@healthy("tables")
def sampler_with_weights_of_rows():
    inputs, labels = blobs()
    sampler = WeightedRandomSampler((1 / labels.bincount(minlength=5).float())[labels], num_samples=len(labels))
    return classifier(data=DataLoader(TensorDataset(inputs, labels), batch_size=32, sampler=sampler))


@fault(
    "tables",
    "the batch is larger than the data and incomplete batches are dropped, so that there is no batch",
    why="the training ends without one step",
)
def no_batch_at_all():
    return classifier(data=loader(*blobs(200), batch=256, drop_last=True))


@fault(
    "tables",
    "the transformation works in place on the stored rows, which shrink further in each epoch",
    why="the scale of the inputs falls from epoch to epoch",
)
def rows_changed_in_place():
    inputs, labels = blobs()

    def collate(chosen):
        rows = [x.sub_(inputs.mean()).mul_(0.25) for x, _ in chosen]
        return torch.stack(rows), torch.stack([y for _, y in chosen])

    return classifier(data=loader(inputs, labels, collate_fn=collate))


@fault(
    "tables",
    "dropout acts on the outputs, so that half of the logits are zero in each step",
    "3",
    why="a dropout is the last module and zeros logits that enter the loss",
)
def dropout_on_the_outputs():
    return classifier(nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 5), nn.Dropout(0.5)))


@fault(
    "tables",
    "dropout in front of a batch normalization shifts the variance that evaluation then divides by",
    "3",
    why="on the same rows the normalization gets another variance in evaluation than it recorded in training",
)
def dropout_before_the_norm():
    inputs, labels = blobs(1024)
    parts = [nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.8), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU()]
    model = nn.Sequential(*parts, nn.Dropout(0.8), nn.BatchNorm1d(64), nn.Linear(64, 5))
    validation = loader(inputs[768:], labels[768:], shuffle=False)
    return classifier(model, loader(inputs[:768], labels[:768]), loop=evaluating(validation=validation))


# --- regression -------------------------------------------------------------------------------------------------------


@fault(
    "regression",
    "the numbers of unordered classes are learned as quantities by a squared error",
    why="the labels are small integers of classes and the network has one output with a squared error",
)
def class_numbers_as_quantities():
    inputs, labels = blobs()
    return regressor(mlp(20, 1), loader(inputs, labels[:, None].float()))


def spread(loss):
    return regressor(mlp(12, 2), loss=loss)


@fault(
    "regression",
    "the network returns the logarithm of the variance and the loss takes it as the variance",
    why="the variance that the loss gets is negative for many rows, where it is clamped",
)
def logarithm_given_as_variance():
    return spread(lambda o, t: F.gaussian_nll_loss(o[:, :1], t, o[:, 1:].clamp(min=1e-6)))


@healthy("regression")
def exponential_of_the_logarithm():
    return spread(lambda o, t: F.gaussian_nll_loss(o[:, :1], t, o[:, 1:].exp()))


class Exponential(nn.Module):
    def forward(self, x):
        return x.exp()


@fault(
    "regression",
    "the network returns rates and the Poisson loss takes them as logarithms of rates",
    why="outputs are all positive after an exponential and the loss applies another one",
)
def exponential_applied_twice():
    inputs = torch.randn(768, 12)
    rates = (inputs @ torch.randn(12, 1) / 4 - 1.5).exp()
    model = nn.Sequential(mlp(12, 1), Exponential())
    return regressor(model, loader(inputs, torch.poisson(rates)), loss=nn.PoissonNLLLoss())


@fault(
    "regression",
    "batch normalization of the output fixes its mean and variance in each batch",
    "5",
    why="the last module is a normalization over the batch",
)
def norm_of_the_output():
    inputs, targets = regression()
    return regressor(nn.Sequential(*mlp(12, 1), nn.BatchNorm1d(1, affine=False)), loader(inputs, 5 * targets + 20))


@fault(
    "regression",
    "the penalty on the weights in the loss outweighs the error",
    why="all weights shrink to zero and the output is constant, while the loss consists of the penalty",
)
def penalty_outweighs_the_error():
    model = mlp(12, 1)
    return regressor(model, loss=lambda o, t: F.mse_loss(o, t) + 0.3 * sum(p.abs().sum() for p in model.parameters()))


@fault(
    "regression",
    "the mean error is divided by the number of elements once more",
    why="the gradients are some thousand times smaller than the errors",
)
def divided_by_the_number_twice():
    inputs, targets = regression()
    targets = targets.expand(-1, 64) + 0.1 * torch.randn(len(targets), 64)
    return regressor(
        mlp(12, 64), loader(inputs, targets), 0.05, lambda o, t: F.mse_loss(o, t) / t.numel(), kind=torch.optim.SGD
    )


class Tasks(nn.Module):
    """Two tasks whose weights are learned."""

    def __init__(self, penalized):
        super().__init__()
        self.body, self.logs, self.penalized = mlp(12, 2), nn.Parameter(torch.zeros(2)), penalized

    def forward(self, x):
        return self.body(x)

    def loss(self, outputs, targets):
        errors = (outputs - targets).square().mean(0)
        return (errors * (-self.logs).exp()).sum() + self.penalized * self.logs.sum()


def tasks(penalized):
    inputs, targets = regression()
    model = Tasks(penalized)
    data = loader(inputs, torch.cat([targets, inputs[:, :1]], 1))
    return regressor(model, data, rate=1e-2, loss=model.loss, epochs=12)


@fault(
    "regression",
    "the learned weights of the tasks have no penalty, so that the loss falls by weights that go to zero",
    "logs",
    why="a parameter of the loss grows in each step and scales the loss towards zero",
)
def task_weights_without_penalty():
    return tasks(0.0)


@healthy("regression")
def task_weights_with_penalty():
    return tasks(1.0)


@fault(
    "regression",
    "only the loss of the first row of a batch is used",
    why="the other rows of the batch get no gradient",
)
def loss_of_the_first_row():
    return regressor(loss=lambda o, t: F.mse_loss(o, t, reduction="none")[0].mean())


@fault(
    "regression",
    "the loss is copied to a new tensor, from which no gradient reaches the network",
    why="there is a backward pass and no parameter gets a gradient",
)
def loss_in_a_new_tensor():
    return regressor(loss=lambda o, t: torch.tensor(F.mse_loss(o, t).item(), requires_grad=True))


# --- several labels ---------------------------------------------------------------------------------------------------


@fault(
    "many labels",
    "the margin loss wants the numbers of the labels, filled up with -1, and gets a column of 0 or 1 for each label",
    why="the labels are zeros and ones, in a loss whose labels are class numbers ended by -1",
)
def columns_for_a_margin_loss():
    inputs, labels = many_labels()
    return classifier(mlp(20, 6), loader(inputs, labels.long()), loss=nn.MultiLabelMarginLoss())


@fault(
    "many labels",
    "several labels of a row are given to a cross entropy as a distribution that does not sum to one",
    why="the sums of the soft labels differ from one",
)
def soft_labels_with_any_sum():
    inputs, labels = many_labels()
    return classifier(mlp(20, 6), loader(inputs, 8 * labels + 4), loss=nn.CrossEntropyLoss())


# --- images -----------------------------------------------------------------------------------------------------------


def flat(*layers, size):
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 4))


@fault(
    "images",
    "the stride of the first convolution is larger than its kernel, so that most pixels are never read",
    "0",
    why="the stride exceeds the kernel and the gradient of most pixels is zero",
)
def stride_beyond_the_kernel():
    return image_classifier(flat(nn.Conv2d(1, 16, 1, stride=4), nn.ReLU(), size=144))


@fault(
    "images",
    "the dilation is larger than the image, so that all but the middle of each kernel reads padding",
    "2",
    why="the outer weights of the kernel get gradients of exactly zero",
)
def dilation_beyond_the_image():
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=12, dilation=12), nn.ReLU()
    return image_classifier(flat(*layers, nn.MaxPool2d(3), size=128))


@fault(
    "images",
    "a group norm with one channel in each group normalizes single values to zero",
    "4",
    why="the outputs of the norm are constant and nothing before it gets a gradient",
)
def groups_of_single_values():
    pooled = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.GroupNorm(16, 16)
    return image_classifier(nn.Sequential(*pooled, nn.Linear(16, 4)))


@fault(
    "images",
    "the signal dies in thirty layers with torch's default initial weights, without norm or shortcut",
    why="activations and gradients shrink from layer to layer at the first step",
)
def thirty_layers():
    layers = [layer for _ in range(30) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    return image_classifier(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(1152, 4)),
        loader(*images(192)),
        epochs=6,
    )


class Residual(nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.first, self.head = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 4)
        parts = [
            nn.Sequential(nn.GroupNorm(4, 16) if normed else nn.Identity(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
            for _ in range(12)
        ]
        for part in parts:
            nn.init.kaiming_normal_(part[1].weight)
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            x = x + part(x)
        return self.head(x.amax((2, 3)))


@fault(
    "images",
    "residual branches without a norm or a scale add up, so that the activations grow in each block",
    "parts",
    why="the size of the activations grows by a factor in each block; the first loss is far above the logarithm of the classes",
)
def branches_add_up():
    return image_classifier(Residual(normed=False), loader(*images(256)), epochs=4)


@healthy("images")
def branches_with_norms():
    return image_classifier(Residual(normed=True), loader(*images(256)), epochs=4)


@fault(
    "images",
    "the momentum of the batch norms is that of Keras, so that the running statistics are those of the last batch",
    "features.1",
    why="the momentum is 0.99 and the running statistics jump from batch to batch",
)
def momentum_of_keras():
    program = image_classifier(data=loader(*images(512), batch=8), loop=evaluating(validation=loader(*images(128))))
    for module in program.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.99
    return program


@fault(
    "images",
    "batch norm has two images in a batch, whose statistics are noise",
    "1",
    why="a norm over the batch gets two rows of one value for each channel",
)
def norm_over_two_images():
    body = nn.Conv2d(1, 16, 12), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16, 32), nn.BatchNorm1d(32)
    model = nn.Sequential(*body, nn.ReLU(), nn.Linear(32, 4))
    return image_classifier(model, loader(*images(384), batch=2), epochs=1)


@fault(
    "images",
    "the head has a thousand outputs for four classes",
    "head",
    why="the labels use four of a thousand outputs",
)
def thousand_outputs_for_four_classes():
    program = image_classifier()
    program.model.head = nn.Linear(144, 1000)
    program.optimizer = torch.optim.Adam(program.model.parameters(), lr=3e-3)
    return program


@fault(
    "images",
    "pixels between 0 and 1 are normalized with the mean and spread of 0 to 255, so that all images look the same",
    why="the inputs have a mean of -1 and almost no variance",
)
def normalized_in_other_units():
    pixels, labels = images()
    pixels = ((pixels / 4 + 0.5).clamp(0, 1) - 127.5) / 127.5
    model = flat(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3), size=192)
    return image_classifier(model, loader(pixels, labels))


# --- segmentation -----------------------------------------------------------------------------------------------------


def one_channel(loss, pixels=None, mask=None):
    if pixels is None:
        pixels, mask = masks()
    return segmentation(data=loader(pixels, mask, batch=16), loss=loss)


@fault(
    "segmentation",
    "a cross entropy over a single channel is zero for every output",
    why="the loss is exactly zero in each step and all gradients are zero",
)
def cross_entropy_of_one_channel():
    return one_channel(nn.CrossEntropyLoss())


def dice_with(smoothing):
    def loss(outputs, mask):
        shares = outputs.sigmoid()
        overlap = (shares * mask).sum((1, 2, 3))
        return 1 - ((2 * overlap + smoothing) / (shares.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + smoothing)).mean()

    return loss


@fault(
    "segmentation",
    "the smoothing term of the Dice loss is larger than the masks, so that the loss is near zero for every output",
    why="the loss is near its minimum from the first step while the outputs are wrong, and the gradients are tiny",
)
def smoothing_beyond_the_masks():
    return one_channel(dice_with(1e6))


@healthy("segmentation")
def dice_with_a_smoothing_of_one():
    return one_channel(dice_with(1.0))


@fault(
    "segmentation",
    "the objects are two pixels of an image, and the unweighted loss is lowest where nothing is found",
    why="one label in a hundred is positive and all outputs stay below zero",
)
def objects_of_two_pixels():
    mask = torch.zeros(256, 1, 16, 16)
    for row in range(256):
        top, left = torch.randint(1, 14, (2,)).tolist()
        mask[row, :, top, left : left + 2] = 1
    return one_channel(nn.BCEWithLogitsLoss(), 0.5 * mask + torch.randn(256, 1, 16, 16), mask)


@fault(
    "segmentation",
    "the masks of another image are read, as images and masks are sorted differently",
    knowable=False,
    why="every pair is legal; only a mean agreement over the data set could show it",
)
def masks_in_another_order():
    pixels, mask = masks()
    return one_channel(nn.BCEWithLogitsLoss(), pixels, mask.roll(1, 0))


# --- precision --------------------------------------------------------------------------------------------------------


def autocast_loop(dtype, scaler=None):
    def loop(program):
        for _, inputs, labels in steps(program):
            program.optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                outputs = program.model(inputs)
                loss = program.loss(outputs.float(), labels)
            if scaler is None:
                loss.backward()
                program.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(program.optimizer)
                scaler.update(2.0**24)

    return loop


@fault(
    "mixed precision",
    "the scale of the loss is set to the same value after each step, so that the gradients overflow and no step is made",
    why="the scaled gradients overflow in each step, no weight ever changes, and the scale does not fall",
)
def scale_set_again_after_each_step():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    return classifier(mlp(20, 5, 128), loop=autocast_loop(torch.float16, scaler))


@fault(
    "mixed precision",
    "outputs around a thousand are computed in bfloat16, whose values lie 4 to 8 apart there",
    why="the outputs are multiples of 4 while the targets vary by less than one",
)
def outputs_too_coarse():
    inputs, targets = regression()
    program = regressor(mlp(12, 1), loader(inputs, targets + 1000), loop=autocast_loop(torch.bfloat16))
    nn.init.constant_(program.model[4].bias, 1000.0)
    return program
