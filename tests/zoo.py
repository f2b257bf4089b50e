"""Models and loops of the kinds people train, small: each is built afresh from a seed and run for some steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Case:
    """One way to train.

    `model` makes a module that maps `batch(step)`'s inputs to (N, 5) logits; `optimizer` takes parameters; `step` runs one optimizer step.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
    step: Callable[["Loop"], torch.Tensor] = field(default=lambda loop: plain_step(loop))


class Loop:
    """A training run of a case: model, loss, optimizer and data from one seed."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.model = case.model()
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = case.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.generator = torch.Generator().manual_seed(seed + 1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self.case.batch(self.generator)
        return inputs, torch.randint(0, 5, (inputs.shape[0],), generator=self.generator)

    def run(self, steps: int = 4) -> list[torch.Tensor]:
        return [self.case.step(self).detach().clone() for _ in range(steps)]

    def evaluate(self) -> None:
        was = self.model.training
        self.model.eval()
        with torch.no_grad():
            inputs, labels = self.batch()
            self.loss(self.model(inputs), labels)
        self.model.train(was)

    def state(self) -> dict[str, Any]:
        """Everything training consists of; a step may have made optimizers of its own."""
        grads = {n: p.grad for n, p in self.model.named_parameters()}
        optimizers = {name: o.state_dict() for name, o in vars(self).items() if isinstance(o, torch.optim.Optimizer)}
        return {
            "model": self.model.state_dict(),
            **optimizers,
            "grads": grads,
            "rng": torch.get_rng_state(),
        }


def plain_step(loop: Loop) -> torch.Tensor:
    inputs, labels = loop.batch()
    loop.optimizer.zero_grad()
    loss = loop.loss(loop.model(inputs), labels)
    loss.backward()
    loop.optimizer.step()
    return loss


def accumulated_step(loop: Loop) -> torch.Tensor:
    loop.optimizer.zero_grad()
    total = torch.zeros(())
    for _ in range(3):
        inputs, labels = loop.batch()
        loss = loop.loss(loop.model(inputs), labels) / 3
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.optimizer.step()
    return total


def autocast_step(loop: Loop) -> torch.Tensor:
    inputs, labels = loop.batch()
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loop.loss(loop.model(inputs), labels)
    loss.backward()
    loop.optimizer.step()
    return loss


def closure_step(loop: Loop) -> torch.Tensor:
    inputs, labels = loop.batch()

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(loop.model(inputs), labels)
        loss.backward()
        return loss

    return torch.as_tensor(loop.optimizer.step(closure))


def evaluating_step(loop: Loop) -> torch.Tensor:
    loss = plain_step(loop)
    loop.evaluate()
    return loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.dropout = nn.Dropout(0.3)
        self.classifier = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.dropout(self.features(x).flatten(1)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.rnn = kind(6, 7, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(14, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(self.embedding(tokens))
        return self.head(out[:, -1])


class Attention(nn.Module):
    """Attention, 3-D linear layers with an in-place activation, a residual, a norm: what a view and an in-place op can break."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        attended, _ = self.attention(query=x, key=x, value=x, need_weights=False)
        x = self.norm(x + attended)
        x = x + self.down(self.act(self.up(x)))
        return self.head(x.mean(1))


class Tied(nn.Module):
    """One module called three times, and a weight shared by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.first(x))
        return self.head(self.second(x))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=self.use_reentrant))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


class SpectralNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


@dataclass
class Result:
    logits: torch.Tensor
    extras: dict[str, torch.Tensor]


class Structured(nn.Module):
    """Modules that return tuples, dicts and dataclasses, and take keyword arguments."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, *, x: torch.Tensor) -> Result:
            h = self.linear(x)
            return Result(h, {"double": h * 2})

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.inner(x=x)
        return self.head(result.logits + result.extras["double"])


def vectors(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(6, 8, generator=generator)


def pictures(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(6, 1, 8, 8, generator=generator)


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 10, (6, 9), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


CASES: dict[str, Case] = {
    "mlp": Case(mlp, vectors),
    "mlp-sgd": Case(mlp, vectors, sgd),
    "mlp-evaluated": Case(mlp, vectors, step=evaluating_step),
    "mlp-closure": Case(mlp, vectors, sgd, closure_step),
    "mlp-lbfgs": Case(mlp, vectors, lbfgs, closure_step),
    "mlp-accumulated": Case(mlp, vectors, step=accumulated_step),
    "mlp-bf16": Case(mlp, vectors, step=autocast_step),
    "conv-bn-dropout": Case(ConvNet, pictures),
    "conv-evaluated": Case(ConvNet, pictures, step=evaluating_step),
    "conv-bf16": Case(ConvNet, pictures, step=autocast_step),
    "lstm": Case(lambda: Recurrent(nn.LSTM), tokens),
    "gru": Case(lambda: Recurrent(nn.GRU), tokens),
    "attention": Case(Attention, tokens),
    "attention-accumulated": Case(Attention, tokens, step=accumulated_step),
    "tied": Case(Tied, vectors),
    "checkpointed": Case(lambda: Checkpointed(False), vectors),
    "checkpointed-reentrant": Case(lambda: Checkpointed(True), vectors),
    "frozen": Case(Frozen, vectors),
    "spectral-norm": Case(SpectralNormed, vectors),
    "structured": Case(Structured, vectors),
}
