"""Models for the simulated accelerator, with inputs and labels."""

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "train"]


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out(weights @ v)
        return x + self.down(self.act(self.up(self.norm2(x))))


def _gpt():
    model = nn.Sequential(nn.Embedding(50, 32), *(Block(32) for _ in range(4)), nn.LayerNorm(32), nn.Linear(32, 50))
    tokens = torch.randint(0, 50, (4, 9), device="cpu")
    return model, tokens[:, :-1], tokens[:, 1:]


def _mlp():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    return model, torch.randn(16, 20, device="cpu"), torch.randint(0, 5, (16,), device="cpu")


def _convnet():
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 5))
    return model, torch.randn(16, 1, 8, 8, device="cpu"), torch.randint(0, 5, (16,), device="cpu")


def _attention():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0].mean(1))

    return Attending(), torch.randn(8, 6, 16, device="cpu"), torch.randint(0, 5, (8,), device="cpu")


MODELS = {"mlp": _mlp, "gpt": _gpt, "convnet": _convnet, "attention": _attention}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    """Make one step with clipping."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
