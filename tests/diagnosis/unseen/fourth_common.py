"""The data, networks and loops that the programs of the fourth set share."""

import torch
from torch import nn

from tests.diagnosis.unseen.programs import Program

# --- data -------------------------------------------------------------------------------------------------------------


def standardised(columns):
    return (columns - columns.mean(0)) / columns.std(0)


def houses(rows=1024):
    """Return area, rooms, age, distance and four more columns of houses in their units, and prices in thousands."""
    area, rooms = 40 + 200 * torch.rand(rows, 1), torch.randint(1, 7, (rows, 1)).float()
    age, distance = 80 * torch.rand(rows, 1), 30 * torch.rand(rows, 1)
    prices = 3 * area * (1 - 0.02 * distance) + 20 * rooms - age + 15 * torch.randn(rows, 1)
    return torch.cat([area, rooms, age, distance, torch.randn(rows, 4)], 1), prices


def patients(rows=1024, columns=12):
    """Return standard columns and whether a patient is ill, of shape ``(rows, 1)``; the rule is not linear."""
    inputs = torch.randn(rows, columns)
    score = 2 * inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3] - inputs[:, 3:4].abs() + 0.6
    return inputs, (score + 0.3 * torch.randn(rows, 1) > 0).float()


def handwriting(rows=768, classes=8):
    """Return bytes of shape ``(rows, 1, 16, 16)`` of a glyph for each class, moved by up to two pixels, and the classes."""
    glyphs = (torch.rand(classes, 4, 4) > 0.5).float().repeat_interleave(3, 1).repeat_interleave(3, 2)
    labels = torch.randint(classes, (rows,))
    pixels = 0.35 * torch.rand(rows, 1, 16, 16)
    for row, label in enumerate(labels.tolist()):
        top, left = torch.randint(1, 4, (2,)).tolist()
        pixels[row, 0, top : top + 12, left : left + 12] += 0.6 * glyphs[label]
    return (255 * pixels.clamp(0, 1)).byte(), labels


def glyphs(rows=768):
    pixels, labels = handwriting(rows)
    return pixels.float().div(255).sub(0.35).div(0.3), labels


def priced(rows=1024):
    inputs, prices = houses(rows)
    return standardised(inputs), standardised(prices)


def photos(rows=640):
    """Return bytes of shape ``(rows, 16, 16, 3)`` of a bar, and which of three colours and two directions it has."""
    labels = torch.randint(6, (rows,))
    pixels = 0.5 * torch.rand(rows, 16, 16, 3)
    for row, label in enumerate(labels.tolist()):
        top, left = torch.randint(1, 5, (2,)).tolist()
        high, wide = (10, 3) if label % 2 else (3, 10)
        pixels[row, top : top + high, left : left + wide, label // 2] += 0.35
    return (255 * pixels.clamp(0, 1)).byte(), labels


def reviews(rows=1024, length=24):
    """Return words padded by 0 on the right, the lengths and whether a review is good.

    The words 2 to 9 are more frequent in good reviews, and 10 to 17 in bad ones; 18 to 59 are neutral.
    """
    labels, lengths = torch.randint(2, (rows,)), torch.randint(6, length + 1, (rows,))
    draw = torch.rand(rows, length)
    side = torch.where(draw < 0.3, labels[:, None], 1 - labels[:, None])
    loaded = torch.where(side == 1, 2, 10) + torch.randint(8, (rows, length))
    words = torch.where(draw < 0.4, loaded, torch.randint(18, 60, (rows, length)))
    return words * (torch.arange(length) < lengths[:, None]), lengths, labels


def ring(rows):
    """Return points near a circle around (2, 0)."""
    angles = 6.2832 * torch.rand(rows)
    points = torch.stack([angles.cos() + 2, angles.sin()], 1)
    return points + 0.05 * torch.randn(rows, 2)


# --- networks ---------------------------------------------------------------------------------------------------------


class SmallNet(nn.Module):
    """Two stages of convolutions, an average over the places, and a head."""

    def __init__(self, channels=1, classes=8, width=16):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(2 * width * 16, classes)

    def forward(self, x):
        x = self.pool(self.bn1(self.conv1(x)).relu())
        x = self.pool(self.bn2(self.conv2(x)).relu())
        return self.fc(x.flatten(1))


# --- loops ------------------------------------------------------------------------------------------------------------


def train_epoch(program: Program) -> None:
    program.model.train()
    for inputs, labels in program.loader:
        program.optimizer.zero_grad()
        program.loss(program.model(inputs), labels).backward()
        program.optimizer.step()


def fit(program: Program) -> None:
    """Train in the common loop, with a step of the schedulers after each epoch."""
    for _ in range(program.epochs):
        train_epoch(program)
        for scheduler in program.schedulers:
            scheduler.step()


@torch.no_grad()
def mean_loss(program: Program, batches) -> float:
    losses = [program.loss(program.model(inputs), labels).item() for inputs, labels in batches]
    return sum(losses) / len(losses)


def fit_with(held_out):
    """Return the common loop with a validation after each epoch."""

    def loop(program):
        for _ in range(program.epochs):
            train_epoch(program)
            program.model.eval()
            mean_loss(program, held_out)
            for scheduler in program.schedulers:
                scheduler.step()

    return loop


def split(*tensors, held_out=128):
    """Return the rows for training, and those for validation in batches."""
    kept = [tensor[held_out:] for tensor in tensors]
    return kept, list(zip(*(tensor[:held_out].split(64) for tensor in tensors), strict=True))
