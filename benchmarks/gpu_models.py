"""The models of ``benchmarks/gpu.py``: GPT-2 small, ResNet-50 and a small MLP, with random weights and data."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Workload"]


class Workload:
    """A model on a device, its data, its loss and its optimizer; bfloat16 under autocast if `amp` is set."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, device: torch.device, amp: bool) -> None:
        self.model, self.device, self.amp = model.to(device), device, amp
        self.inputs, self.labels = inputs.to(device), labels.to(device)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self.before: list[Tensor] = []

    def step(self) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            outputs = self.model(self.inputs)
            loss = self.loss(outputs.flatten(0, -2), self.labels.flatten())
        loss.backward()
        self.optimizer.step()


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs ``(batch, time, width)``."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """GPT-2 small: 12 blocks of width 768, 50,257 tokens, 1,024 positions, tied embeddings; 124 million weights."""

    def __init__(
        self, tokens: int = 50_257, positions: int = 1024, width: int = 768, blocks: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``(batch, time, tokens)``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.convs = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        is_same = stride == 1 and before == after
        shortcut = (nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*shortcut)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of the block."""
        return self.act(self.convs(x) + self.shortcut(x))


def _resnet(depths: tuple[int, ...], width: int, classes: int) -> nn.Module:
    blocks: list[nn.Module] = []
    before = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            blocks.append(Bottleneck(before, width << stage, 2 if stage and not i else 1))
            before = 4 * (width << stage)
    stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def gpt2(device: torch.device, tiny: bool) -> Workload:
    """GPT-2 small on 8 sequences of 1,024 tokens, under autocast."""
    batch, time, tokens = (2, 16, 100) if tiny else (8, 1024, 50_257)
    model = GPT2(tokens, 32, 32, 2, 4) if tiny else GPT2()
    data = torch.randint(tokens, (batch, time + 1))
    return Workload(model, data[:, :-1], data[:, 1:], device, amp=not tiny)


def resnet50(device: torch.device, tiny: bool) -> Workload:
    """ResNet-50 on 64 images of 224 x 224, channels last, under autocast."""
    batch, size = (4, 32) if tiny else (64, 224)
    model = _resnet((1, 1), 8, 10) if tiny else _resnet((3, 4, 6, 3), 64, 1000)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(10 if tiny else 1000, (batch,))
    return Workload(model.to(memory_format=torch.channels_last), images, labels, device, amp=not tiny)


def mlp(device: torch.device, tiny: bool) -> Workload:
    """Four layers of width 1,024 on batches of 128: a step of a fraction of a millisecond, so that the host limits it."""
    width = 32 if tiny else 1024
    widths = (784, width, width, width)
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return Workload(model, torch.randn(128, 784), torch.randint(10, (128,)), device, amp=False)


MODELS: dict[str, Callable[[torch.device, bool], Workload]] = {"gpt2": gpt2, "resnet50": resnet50, "mlp": mlp}
