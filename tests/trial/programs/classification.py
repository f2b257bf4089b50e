"""Classification and regression by one network, with the usual variations of the loss, the data and the loop."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

from tests.trial.program import LABELS, Training, blobs, mlp, pictures, program, standard


def adam(model, rate=3e-3):
    return torch.optim.Adam(model.parameters(), rate)


class Pictures(nn.Module):
    """A convolutional network."""

    def __init__(self, classes=4, width=8, dropout=0.2):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(inplace=True)),
        )
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(2 * width * 16, classes)

    def forward(self, x):
        return self.head(self.dropout(self.features(x).flatten(1)))


@program()
def convolutional_network():
    """A convolutional network with batch norm and dropout, and a loss module."""
    model = Pictures()
    return standard(model, adam(model), pictures, nn.CrossEntropyLoss(), given=True)


@program()
def label_smoothing():
    """Label smoothing."""
    model = Pictures()
    return standard(model, adam(model), pictures, nn.CrossEntropyLoss(label_smoothing=0.1), given=True)


@program()
def focal_loss():
    """Focal loss for many labels."""
    model = mlp(8, 32, 3)

    def batch():
        x, y = blobs()
        return x, F.one_hot(y, 3).float()

    def loss(output, y):
        error = F.binary_cross_entropy_with_logits(output, y, reduction="none")
        return ((1 - (-error).exp()) ** 2 * error).mean()

    return standard(model, adam(model), batch, loss)


@program()
def class_weights():
    """Unbalanced classes with weights."""
    model = mlp(8, 32, 3)

    def batch():
        y = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), 32, replacement=True)
        return 2 * F.one_hot(y, 8).float() + 0.3 * torch.randn(32, 8), y

    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 4.0, 12.0]))
    return standard(model, adam(model), batch, loss, given=True)


@program()
def mixup():
    """Mixup of pairs of samples."""
    model = mlp(8, 32, 3)

    def batch():
        (x, y), share = blobs(), torch.distributions.Beta(0.4, 0.4).sample()
        order, one_hot = torch.randperm(32), F.one_hot(y, 3).float()
        return share * x + (1 - share) * x[order], share * one_hot + (1 - share) * one_hot[order]

    return standard(model, adam(model), batch, F.cross_entropy)


@program()
def curriculum():
    """A curriculum: the noise grows."""
    model, drawn = mlp(8, 32, 3), iter(range(10**9))
    return standard(model, adam(model), lambda: blobs(noise=0.1 + 0.01 * next(drawn)), F.cross_entropy)


@program()
def batches_of_one():
    """Batches of one sample."""
    model = mlp(8, 16, 3)
    return standard(model, torch.optim.SGD(model.parameters(), 0.02), lambda: blobs(1), F.cross_entropy)


@program(judged={"repeated_batch": "true: each step has all data"})
def full_batch():
    """The same batch in each step."""
    model, data = mlp(8, 16, 3), blobs(64)
    return standard(model, adam(model), lambda: data, F.cross_entropy)


@program()
def unshuffled_epochs():
    """Ten batches in a fixed order, epoch by epoch."""
    model, batches, drawn = mlp(8, 16, 3), [blobs() for _ in range(10)], iter(range(10**9))
    return standard(model, adam(model), lambda: batches[next(drawn) % 10], F.cross_entropy)


@program()
def data_loader():
    """A data loader with shuffling, epoch by epoch."""
    model = mlp(8, 16, 3)
    data = torch.utils.data.TensorDataset(*blobs(320))
    loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
    batches = (batch for _ in iter(int, 1) for batch in loader)
    return standard(model, adam(model), lambda: next(batches), F.cross_entropy)


@program()
def linear_regression():
    """Linear regression with Adam at a large rate."""
    model = nn.Linear(1, 1)

    def batch():
        x = torch.rand(32, 1)
        return x, 3 * x + 1

    return standard(model, adam(model, 0.1), batch, nn.MSELoss(), given=True)


@program()
def polynomial_regression():
    """pytorch/examples' regression of a polynomial."""
    model, weight, bias = nn.Linear(4, 1), 5 * torch.randn(4, 1), 5 * torch.randn(1)

    def batch():
        x = torch.randn(32)
        x = torch.stack([x**k for k in range(1, 5)], 1)
        return x, x @ weight + bias

    return standard(model, torch.optim.SGD(model.parameters(), 0.1), batch, F.smooth_l1_loss)


@program()
def poisson_regression():
    """Poisson regression of counts."""
    model = mlp(4, 16, 1)

    def batch():
        x = torch.randn(32, 4)
        return x, torch.poisson((0.5 * x.sum(1, keepdim=True)).clamp(max=3).exp())

    return standard(model, adam(model), batch, nn.PoissonNLLLoss(), given=True)


@program(told=LABELS)
def quantile_regression():
    """Regression of three quantiles."""
    model, levels = mlp(1, 32, 3), torch.tensor([0.1, 0.5, 0.9])

    def batch():
        x = 2 * torch.rand(64, 1) - 1
        return x, x.sin() + 0.3 * torch.randn(64, 1)

    def loss(output, y):
        error = y - output
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    return standard(model, adam(model), batch, loss)


@program(told=LABELS)
def gaussian_likelihood():
    """A network of mean and variance."""
    model = mlp(1, 32, 2)

    def batch():
        x = 2 * torch.rand(64, 1) - 1
        return x, x.sin() + 0.3 * torch.randn(64, 1)

    return standard(model, adam(model), batch, lambda out, y: F.gaussian_nll_loss(out[:, :1], y, out[:, 1:].exp()))


@program()
def clipped_by_norm():
    """Gradients clipped by their norm."""
    model = mlp(8, 32, 3)
    return standard(model, adam(model), blobs, F.cross_entropy, clip=lambda p: clip_grad_norm_(p, 0.5))


@program()
def clipped_by_value():
    """Gradients clipped by value."""
    model = mlp(8, 32, 3)
    return standard(model, adam(model), blobs, F.cross_entropy, clip=lambda p: clip_grad_value_(p, 0.1))


def scheduled(model, optimizer, make):
    return standard(model, optimizer, blobs, F.cross_entropy, after=make(optimizer).step)


@program()
def cosine_schedule():
    """A cosine schedule."""
    model = mlp(8, 32, 3)
    return scheduled(model, adam(model, 1e-2), lambda o: lr_scheduler.CosineAnnealingLR(o, 60))


@program()
def one_cycle():
    """The one-cycle policy with momentum."""
    model = mlp(8, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return scheduled(model, optimizer, lambda o: lr_scheduler.OneCycleLR(o, 0.2, 60))


@program()
def warm_restarts():
    """A cosine schedule with warm restarts."""
    model = mlp(8, 32, 3)
    return scheduled(model, adam(model, 1e-2), lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20))


@program()
def layer_wise_rates():
    """A rate for each layer."""
    model = mlp(8, 32, 32, 3)
    groups = [{"params": layer.parameters(), "lr": 3e-3 * 0.5**depth} for depth, layer in enumerate(reversed(model))]
    optimizer = torch.optim.AdamW(groups, 1e-3)
    return standard(model, optimizer, blobs, F.cross_entropy)


@program()
def gradual_unfreezing():
    """A frozen body that is trained from the middle on."""
    model, drawn = mlp(8, 32, 3), iter(range(10**9))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), 3e-3)

    def after():
        if next(drawn) == 30:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})

    return standard(model, optimizer, blobs, F.cross_entropy, after=after)


@program()
def probe_of_a_pretrained_body():
    """A linear probe on a frozen body in evaluation mode."""

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Pictures().requires_grad_(False), nn.Linear(256, 4)

        def train(self, mode=True):
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, x):
            return self.head(self.body.features(x).flatten(1))

    model = Probe().train()
    return standard(model, torch.optim.Adam(model.head.parameters(), 3e-3), pictures, nn.CrossEntropyLoss(), given=True)


@program()
def two_tasks():
    """Two heads whose losses are summed with learned weights."""

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classes, self.size = mlp(8, 32), nn.Linear(32, 3), nn.Linear(32, 1)
            self.log_variance = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            hidden = self.body(x).relu()
            return self.classes(hidden), self.size(hidden)[:, 0]

    model = Tasks()

    def loss(output, y):
        errors = torch.stack([F.cross_entropy(output[0], y), F.mse_loss(output[1], y.float())])
        return ((-model.log_variance).exp() * errors + 0.5 * model.log_variance).sum()

    return standard(model, adam(model), blobs, loss)


@program()
def loss_module_called_thrice():
    """A loss module that is called for each of three outputs, and summed."""
    model, loss = mlp(8, 32, 9), nn.CrossEntropyLoss()
    return standard(model, adam(model), blobs, lambda out, y: sum(loss(part, y) for part in out.split(3, 1)))


@program(told=LABELS)
def distillation():
    """Distillation from a teacher outside the model."""
    model, teacher = mlp(8, 16, 3), mlp(8, 64, 3).requires_grad_(False)

    def batch():
        x, _ = blobs()
        with torch.no_grad():
            return x, (teacher(x) / 2).softmax(1)

    return standard(
        model, adam(model), batch, lambda out, y: F.kl_div((out / 2).log_softmax(1), y, reduction="batchmean")
    )


@program()
def evaluation_between_steps():
    """An evaluation after every tenth step."""
    model, drawn = Pictures(), iter(range(10**9))

    def after():
        if next(drawn) % 10 == 9:
            model.eval()
            with torch.no_grad():
                x, y = pictures()
                F.cross_entropy(model(x), y)
            model.train()

    return standard(model, adam(model), pictures, F.cross_entropy, after=after)


@program()
def best_weights_are_kept():
    """The state is copied and loaded again, as with early stopping."""
    model, drawn, best = mlp(8, 16, 3), iter(range(10**9)), {}

    def after():
        number = next(drawn)
        if number == 20:
            best.update(copy.deepcopy(model.state_dict()))
        if number == 40:
            model.load_state_dict(best)

    return standard(model, adam(model), blobs, F.cross_entropy, after=after)


@program()
def accumulation():
    """Four micro-batches in a step."""
    model = mlp(8, 32, 3)
    optimizer = adam(model)

    def step():
        optimizer.zero_grad()
        losses = []
        for _ in range(4):
            x, y = blobs()
            losses.append(F.cross_entropy(model(x), y) / 4)
            losses[-1].backward()
        optimizer.step()
        return sum(losses)

    return Training(model, step)
