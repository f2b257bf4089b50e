"""Unmodified models with their usual batches, losses and optimizers: a check that finds a mistake in one is wrong."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

CASES = {}


def case(function):
    """Register a function that returns model, batch, loss and, if the checks need more, other arguments."""
    CASES[function.__name__] = function
    return function


def images(samples=16, channels=3, size=32, classes=10):
    return torch.randn(samples, channels, size, size), torch.randint(classes, (samples,))


def vectors(samples=32, features=20, classes=10):
    return torch.randn(samples, features), torch.randint(classes, (samples,))


def stack(widths, activation=nn.ReLU, norm=None, dropout=0.0):
    layers = []
    for before, after in pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), *([norm(after)] if norm else []), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


@case
def mlp():
    return stack([20, 64, 64, 10]), vectors(), nn.CrossEntropyLoss()


@case
def mlp_of_one_sample():
    return stack([20, 64, 10]), vectors(1), nn.CrossEntropyLoss()


@case
def deep_mlp_with_batch_norm_and_dropout():
    return stack([20, *[64] * 8, 10], norm=nn.BatchNorm1d, dropout=0.3), vectors(), nn.CrossEntropyLoss()


@case
def mlp_with_tanh_and_layer_norm():
    return stack([20, *[64] * 4, 10], nn.Tanh, nn.LayerNorm), vectors(), functional.cross_entropy


@case
def mlp_for_regression():
    return stack([20, 64, 1]), (torch.randn(32, 20), torch.randn(32, 1)), nn.MSELoss()


@case
def mlp_for_several_labels():
    return stack([20, 64, 5]), (torch.randn(32, 20), torch.rand(32, 5).round()), nn.BCEWithLogitsLoss()


@case
def mlp_with_sigmoid_and_bce():
    model = nn.Sequential(stack([20, 64, 5]), nn.Sigmoid())
    return model, (torch.randn(32, 20), torch.rand(32, 5).round()), nn.BCELoss()


@case
def mlp_with_log_softmax_and_nll():
    return nn.Sequential(stack([20, 64, 10]), nn.LogSoftmax(-1)), vectors(), nn.NLLLoss()


@case
def mlp_with_zero_head_and_label_smoothing():
    model = stack([20, 64, 10])
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model, vectors(), nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.rand(10) + 0.5)


@case
def autoencoder():
    x = torch.rand(32, 64)
    return nn.Sequential(stack([64, 32, 8]), stack([8, 32, 64]), nn.Sigmoid()), (x, x), nn.MSELoss()


def conv_block(inner, outer, stride=1):
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
    )


@case
def plain_conv_net():
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 36, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)),
    )
    return model, images(), nn.CrossEntropyLoss()


@case
def vgg_with_batch_norm():
    features = [conv_block(3, 16), conv_block(16, 16), nn.MaxPool2d(2), conv_block(16, 32), conv_block(32, 32)]
    return (
        nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        images(),
        nn.CrossEntropyLoss(),
    )


class Residual(nn.Module):
    """The basic block of a ResNet, optionally with a last scale of 0."""

    def __init__(self, inner, outer, stride=1, zero=False):
        super().__init__()
        self.body = nn.Sequential(
            conv_block(inner, outer, stride), nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        )
        self.shortcut = (
            nn.Identity()
            if inner == outer
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer))
        )
        if zero:
            nn.init.zeros_(self.body[-1].weight)

    def forward(self, x):
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet(zero, depth=2):
    blocks = [Residual(a, b, 1 + (a != b), zero) for a, b in [(16, 16), (16, 32), (32, 64)] for b in [b]]
    more = [Residual(64, 64, zero=zero) for _ in range(depth)]
    model = nn.Sequential(conv_block(3, 16), *blocks, *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


@case
def resnet_small():
    return resnet(False), images(), nn.CrossEntropyLoss()


@case
def resnet_deep_with_zero_scales():
    return resnet(True, 8), images(), nn.CrossEntropyLoss()


@case
def resnet_without_normalisation_of_inputs():
    x, y = images()
    return resnet(False), (x * 60 + 120, y), nn.CrossEntropyLoss()


@case
def frozen_backbone():
    backbone, head = resnet(False), nn.Linear(10, 4)
    backbone.requires_grad_(False).eval()
    model = nn.Sequential(backbone, head)
    return model, images(classes=4), nn.CrossEntropyLoss(), {"optimizer": torch.optim.Adam(head.parameters())}


class Inverted(nn.Module):
    """The block of a MobileNet with squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.BatchNorm2d(4 * width), nn.ReLU6(inplace=True))
        self.depthwise = nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width)
        self.squeeze = nn.Sequential(nn.Conv2d(4 * width, width, 1), nn.ReLU(), nn.Conv2d(width, 4 * width, 1))
        self.project = nn.Conv2d(4 * width, width, 1)

    def forward(self, x):
        h = functional.hardswish(self.depthwise(self.expand(x)))
        return x + self.project(h * functional.hardsigmoid(self.squeeze(h.mean((2, 3), keepdim=True))))


@case
def mobilenet():
    model = nn.Sequential(conv_block(3, 16, 2), Inverted(16), Inverted(16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(model, nn.Linear(16, 10)), images(), nn.CrossEntropyLoss()


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, normalisation, two linear layers, and a scale that begins near 0."""

    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x):
        h = self.norm(self.depthwise(x).movedim(1, -1))
        return x + (self.scale * self.down(functional.gelu(self.up(h)))).movedim(-1, 1)


@case
def convnext():
    model = nn.Sequential(nn.Conv2d(3, 24, 4, 4), *(ConvNeXtBlock(24) for _ in range(3)), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(model, nn.Flatten(), nn.Linear(24, 10)), images(), nn.CrossEntropyLoss()


@case
def unet():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.inner, self.up = conv_block(3, 16), conv_block(16, 32), conv_block(48, 16)
            self.head = nn.Conv2d(16, 5, 1)

        def forward(self, x):
            a = self.down(x)
            b = functional.interpolate(self.inner(functional.max_pool2d(a, 2)), scale_factor=2)
            return self.head(self.up(torch.cat([a, b], 1)))

    x, y = torch.randn(4, 3, 32, 32), torch.randint(5, (4, 32, 32))
    y[0, :8] = 255
    return UNet(), (x, y), nn.CrossEntropyLoss(ignore_index=255)


@case
def unet_with_another_ignored_label():
    model, batch, _ = unet()
    return model, batch, lambda output, labels: functional.cross_entropy(output, labels, ignore_index=255)


class Recurrent(nn.Module):
    """A classifier of sequences of tokens."""

    def __init__(self, cell, time_first=False, **options):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.time_first = time_first
        self.rnn = cell(16, 32, batch_first=not time_first, **options)
        self.head = nn.Linear(32 * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, x):
        output = self.rnn(self.embedding(x))[0]
        return self.head(output[-1] if self.time_first else output.mean(1))


def tokens(samples=16, length=12, classes=5):
    return torch.randint(50, (samples, length)), torch.randint(classes, (samples,))


@case
def lstm():
    return Recurrent(nn.LSTM), tokens(), nn.CrossEntropyLoss()


@case
def gru_bidirectional_with_dropout():
    return Recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.2), tokens(), nn.CrossEntropyLoss()


@case
def rnn_with_time_first():
    x, y = tokens()
    return Recurrent(nn.RNN, time_first=True), (x.T.contiguous(), y), nn.CrossEntropyLoss()


@case
def rnn_with_time_first_and_as_many_steps_as_samples():
    x, y = tokens(12, 12)
    return Recurrent(nn.RNN, time_first=True), (x.T.contiguous(), y), nn.CrossEntropyLoss()


class LanguageModel(nn.Module):
    """An LSTM that predicts the next token."""

    def __init__(self, flat=False, classes_second=False):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(50, 32), nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 50)
        self.flat, self.classes_second = flat, classes_second

    def forward(self, x):
        scores = self.head(self.rnn(self.embedding(x))[0])
        return scores.flatten(0, 1) if self.flat else scores.transpose(1, 2) if self.classes_second else scores


@case
def language_model_with_flat_output():
    x = torch.randint(50, (8, 13))
    return LanguageModel(flat=True), (x[:, :-1], x[:, 1:].flatten()), nn.CrossEntropyLoss()


@case
def residual_branches_and_scores_that_begin_at_zero():
    """As in Fixup and in diffusion transformers: first the scores move, then the branches."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.branch, self.head = nn.Linear(20, 32), stack([32, 32, 32]), nn.Linear(32, 10)
            self.scale = nn.Linear(20, 32)
            for layer in (self.branch[-1], self.scale, self.head):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, x):
            h = self.first(x)
            return self.head(h + self.branch(h) + self.scale(x) * h)

    return Model(), vectors(), nn.CrossEntropyLoss()


@case
def language_model_that_keeps_its_state():
    class Stateful(LanguageModel):
        state = None

        def forward(self, x):
            out, state = self.rnn(self.embedding(x), self.state)
            self.state = tuple(part.detach() for part in state)
            return self.head(out).flatten(0, 1)

    x = torch.randint(50, (8, 13))
    return Stateful(), (x[:, :-1], x[:, 1:].flatten()), nn.CrossEntropyLoss()


@case
def language_model_with_classes_second():
    x = torch.randint(50, (8, 13))
    return LanguageModel(classes_second=True), (x[:, :-1], x[:, 1:]), nn.CrossEntropyLoss()


class Transformer(nn.Module):
    """The encoder of torch as classifier or, with a causal mask, as language model."""

    def __init__(self, causal=False, batch_first=True, norm_first=False, tied=False):
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 32), nn.Parameter(0.02 * torch.randn(12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50 if causal else 5, bias=not tied)
        self.causal, self.batch_first = causal, batch_first
        if tied:
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.head.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x) + self.position[: x.shape[1]]
        h = h if self.batch_first else h.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        h = self.encoder(h, mask=mask)
        h = h if self.batch_first else h.transpose(0, 1)
        return self.head(h).flatten(0, 1) if self.causal else self.head(h.mean(1))


@case
def transformer_classifier():
    return Transformer(), tokens(), nn.CrossEntropyLoss()


@case
def transformer_with_time_first_inside():
    return Transformer(batch_first=False), tokens(12, 12), nn.CrossEntropyLoss()


@case
def transformer_language_model():
    x = torch.randint(50, (8, 13))
    model = Transformer(causal=True, norm_first=True, tied=True)
    return model, (x[:, :-1], x[:, 1:].flatten()), nn.CrossEntropyLoss()


class TimeFirstLanguageModel(nn.Module):
    """A language model of (time, sample), as in the examples of torch."""

    def __init__(self, recurrent):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64)
        self.core = (
            nn.LSTM(32, 32, 2, dropout=0.2)
            if recurrent
            else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        )
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        h = self.embedding(x)
        if isinstance(self.core, nn.LSTM):
            return self.head(self.core(h)[0]).flatten(0, 1)
        return self.head(self.core(h, nn.Transformer.generate_square_subsequent_mask(len(x)))).flatten(0, 1)


@case
def lstm_language_model_with_time_first():
    x = torch.randint(50, (13, 8))
    return TimeFirstLanguageModel(True), (x[:-1], x[1:].flatten()), nn.CrossEntropyLoss()


@case
def transformer_language_model_with_time_first():
    x = torch.randint(50, (13, 8))
    return TimeFirstLanguageModel(False), (x[:-1], x[1:].flatten()), nn.CrossEntropyLoss()


@case
def packed_sequences():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.rnn(x)[1][0][-1])

    lengths = torch.tensor([9, 7, 7, 4, 2, 1])
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(6, 9, 8), lengths, batch_first=True)
    return Packed(), (x, torch.randint(5, (6,))), nn.CrossEntropyLoss()


@case
def siamese_network():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack([20, 32, 16])

        def forward(self, a, b):
            return functional.cosine_similarity(self.net(a), self.net(b))

    return Siamese(), (torch.randn(16, 20), torch.randn(16, 20), torch.rand(16)), nn.MSELoss()


@case
def graph_network():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(20, 32), nn.Linear(32, 5)

        def forward(self, x, adjacency):
            return adjacency @ self.second(functional.relu(adjacency @ self.first(x)))

    adjacency = torch.softmax(torch.randn(30, 30), 1)
    return Graph(), (torch.randn(30, 20), adjacency, torch.randint(5, (30,))), nn.CrossEntropyLoss()


@case
def two_towers():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = stack([20, 32, 16]), stack([8, 32, 16])

        def forward(self, a, b):
            return functional.normalize(self.first(a), dim=-1) @ functional.normalize(self.second(b), dim=-1).T

    def symmetric(output, _):
        diagonal = torch.arange(len(output))
        return functional.cross_entropy(output, diagonal) + functional.cross_entropy(output.T, diagonal)

    return Towers(), (torch.randn(16, 20), torch.randn(16, 8), torch.zeros(16, 2)), symmetric


@case
def conv_net_whose_signal_needs_the_norms():
    layers = [part for _ in range(12) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    return model, images(), nn.CrossEntropyLoss()


@case
def contrastive_network():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = stack([20, 64, 16], norm=nn.BatchNorm1d)

        def forward(self, x):
            return functional.normalize(self.net(x), dim=-1)

    def info_nce(output, views):
        return functional.cross_entropy(output @ views.T / 0.1, torch.arange(len(output)))

    return Encoder(), (torch.randn(32, 20), functional.normalize(torch.randn(32, 16), dim=-1)), info_nce


@case
def warm_up_from_zero():
    model, batch, loss = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return model, batch, loss, {"optimizer": optimizer}


@case
def generator_and_discriminator_apart():
    model = nn.Sequential(stack([8, 32, 16]), nn.Tanh())
    discriminator = stack([16, 32, 1])
    for parameter in discriminator.parameters():
        parameter.requires_grad_(False)
    return model, torch.randn(32, 8), lambda fake: functional.softplus(-discriminator(fake)).mean()


@case
def low_rank_adapter():
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(20, 10).requires_grad_(False)
            self.down, self.up = nn.Linear(20, 4, bias=False), nn.Linear(4, 10, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = Adapter()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, vectors(), nn.CrossEntropyLoss(), {"optimizer": torch.optim.Adam(trained)}


@case
def bfloat16_network():
    x, y = vectors()
    return stack([20, 64, 64, 10]).bfloat16(), (x.bfloat16(), y), nn.CrossEntropyLoss()


@case
def mixture_of_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(20, 4), nn.ModuleList(stack([20, 32, 10]) for _ in range(4))

        def forward(self, x):
            weight, chosen = self.router(x).softmax(-1).max(-1)
            parts = [
                expert(x) * (weight * (chosen == number)).unsqueeze(-1) for number, expert in enumerate(self.experts)
            ]
            return sum(parts)

    return Experts(), vectors(), nn.CrossEntropyLoss()
