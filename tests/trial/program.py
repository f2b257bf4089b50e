"""A program of the trial, and the table of all programs."""

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "LABELS",
    "NO_LOSS",
    "PROGRAMS",
    "Program",
    "Training",
    "blobs",
    "mlp",
    "pictures",
    "program",
    "sentences",
    "standard",
]

Losses = Tensor | float | Sequence[Tensor | float] | None


class Training(NamedTuple):
    """A training that can begin.

    Parameters
    ----------
    model : nn.Module
        The model that is watched.
    step : callable
        Makes one iteration.  It returns the loss of each optimizer's step, or ``None`` if these are not compared.
    loss : nn.Module or callable, optional
        The loss that ``watch`` is given.
    """

    model: nn.Module
    step: Callable[[], Losses]
    loss: Any = None


@dataclass(frozen=True)
class Program:
    """A training program, and what is known of it.

    Parameters
    ----------
    make : callable
        Returns the training, or one for each watched model, of which the first makes the iterations.
    steps : tuple of int
        The number of steps of each watched model, counted by hand.
    iterations : int
        How often ``step`` is called.
    layers : bool
        Whether activations and gradients of layers are compared; otherwise those of parameters only.
    judged : mapping
        The findings that were looked at: ``true: reason`` or ``false: reason`` by the name of the rule.
    told : tuple of str
        Beginnings of the lines that ikkuna logs.
    needs : tuple of str
        The packages that it needs.
    unseen : frozenset of int
        The steps without a loss: the first ones of a model that is never called as a whole.
    """

    make: Callable[[], Training | tuple[Training, ...]]
    steps: tuple[int, ...]
    iterations: int
    layers: bool
    judged: Mapping[str, str]
    told: tuple[str, ...]
    needs: tuple[str, ...]
    unseen: frozenset[int]

    @property
    def title(self) -> str:
        """The first sentence of the docstring."""
        return (self.make.__doc__ or "").strip().splitlines()[0].removesuffix(".")

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


PROGRAMS: dict[str, Program] = {}

LABELS = ("the labels cannot be seen",)
"""The line that is logged for a loss that compares no outputs with labels."""

NO_LOSS = ("the loss cannot be seen",)
"""The line that is logged if ``backward()`` is never called."""


def program(
    steps: int | tuple[int, ...] = 1,
    iterations: int = 60,
    *,
    layers: bool = True,
    judged: Mapping[str, str] | None = None,
    told: Iterable[str] = (),
    needs: Iterable[str] = (),
    unseen: Iterable[int] = (),
) -> Callable[[Callable[[], Training | tuple[Training, ...]]], Callable[[], Training | tuple[Training, ...]]]:
    """Register a function that returns a training; `steps` is the number in one iteration, for each watched model."""
    counts = (steps,) if isinstance(steps, int) else steps

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        assert make.__name__ not in PROGRAMS, make.__name__
        totals = tuple(count * iterations for count in counts)
        PROGRAMS[make.__name__] = Program(
            make, totals, iterations, layers, judged or {}, tuple(told), tuple(needs), frozenset(unseen)
        )
        return make

    return register


def standard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss: Callable[[Any, Tensor], Tensor] | nn.Module,
    *,
    after: Callable[[], Any] | None = None,
    clip: Callable[[Iterable[nn.Parameter]], Any] | None = None,
    given: bool = False,
) -> Training:
    """Return a training by the usual loop; `after` is called after each step, `clip` before it."""

    def step() -> Tensor:
        x, y = batch()
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        if after is not None:
            after()
        return value

    return Training(model, step, loss if given else None)


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*layers[:-1])


def blobs(samples: int = 32, classes: int = 3, features: int = 8, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Draw points around one centre for each class, and their classes."""
    y = torch.randint(0, classes, (samples,))
    return 2 * nn.functional.one_hot(y, features).float() + noise * torch.randn(samples, features), y


def pictures(samples: int = 16, classes: int = 4, size: int = 8) -> tuple[Tensor, Tensor]:
    """Draw pictures of one channel with a bright row for each class, and their classes."""
    y = torch.randint(0, classes, (samples,))
    x = 0.3 * torch.randn(samples, 1, size, size)
    x[torch.arange(samples), 0, size // classes * y] += 1
    return x, y


def sentences(samples: int = 16, length: int = 12, words: int = 16) -> Tensor:
    """Draw sequences in which each word is followed by the next but one."""
    return (torch.randint(0, words, (samples, 1)) + 2 * torch.arange(length)) % words
