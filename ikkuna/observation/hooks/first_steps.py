"""Compares the gradients and the weights of successive steps at the beginning of a training."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.diagnosis.mistakes import (
    CHANGED_AFTER_STEP,
    PARAMETER_IN_TWO_GROUPS,
    STEP_REPEATED,
    WEIGHTS_RESTORED,
    Mistake,
)
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.modules import NamedParameter

_STEPS = 20
_NEEDED = 3
_RETURNS = 10
_MOST_PARAMETERS = 8
_MOST_ELEMENTS = 4096
_LARGEST_FACTOR = 0.99  # clipping to the norm that gradients have multiplies them by a little less than 1
_FEWEST_ELEMENTS = 8  # fewer may be multiples of others by chance


class _Used(NamedTuple):
    """A parameter and its gradient at the end of a step, with copies and the versions of both."""

    named: NamedParameter
    optimizer: int
    gradient: Tensor
    values: Tensor
    weights: Tensor
    versions: tuple[int, int]

    @property
    def is_kept(self) -> bool:
        """Whether the parameter still has this gradient."""
        return self.named.parameter.grad is self.gradient

    @property
    def is_unchanged(self) -> bool:
        """Whether the gradient and the parameter are as the step has left them, and the gradient is not zero."""
        gradient, parameter = self.gradient, self.named.parameter
        is_as_before = (gradient._version, parameter._version) == self.versions and torch.equal(gradient, self.values)
        return is_as_before and bool(gradient.any())


class FirstSteps:
    """Compares a few gradients and weights at the first steps of optimizers with what they were at the steps before.

    A step that finds the same gradient, with the values that an earlier step has used, repeats that step.
    A gradient that has been removed, and has become a multiple of itself below 0.99 or was limited by then, was clipped too late.
    Three steps must show these facts, and something else than optimizers must not have written to the parameters in between:
    a search along a line, and an update by hand, use a gradient again.
    Weights are put back if each of ten steps, from the third on, finds what the step before has found, and not what it has left.

    Only small gradients and weights of the host are copied, for 20 steps at most.
    Steps with a closure, which computes the gradients, and steps inside of another one are left out.

    Parameters
    ----------
    found : callable
        Receives the findings.
    """

    def __init__(self, found: Callable[[Finding], object]) -> None:
        self._found = found
        self._used: dict[int, _Used] = {}
        self._began: dict[int, Tensor] = {}
        self._counts = dict.fromkeys((CHANGED_AFTER_STEP.name, PARAMETER_IN_TWO_GROUPS.name, STEP_REPEATED.name), 0)
        self._steps = self._returns = 0

    def step_begins(self, optimizer: int, observed: Iterable[NamedParameter]) -> "FirstSteps | None":
        """Compare the gradients and weights that a step will use with those before; return ``None`` after the last step.

        Parameters
        ----------
        optimizer : int
            The number of the optimizer.
        observed : iterable of NamedParameter
            The parameters that it owns.
        """
        self._steps += 1
        used = {key: self._used[key] for named in observed if (key := id(named.parameter)) in self._used}
        again = [each for each in used.values() if each.is_kept and each.is_unchanged]
        removed = [each for each in used.values() if not each.is_kept]
        if others := [each for each in again if each.optimizer != optimizer]:
            self._count(PARAMETER_IN_TWO_GROUPS, others)
        elif again:
            self._count(STEP_REPEATED, again)
        elif _were_clipped(removed):
            self._count(CHANGED_AFTER_STEP, removed)
        self._returns += bool(used) and self._have_returned(optimizer, used)
        self._began |= {key: each.named.parameter.detach().clone() for key, each in used.items()}
        if self._returns == _RETURNS == self._steps - 2:  # the first two steps have nothing to compare with
            detail = f"Each of the {self._steps} steps that were read has begun with the same weights."
            self._found(WEIGHTS_RESTORED.found(0, detail=detail, at_most="warning"))
        return self if self._steps < _STEPS else None

    def _have_returned(self, optimizer: int, used: dict[int, _Used]) -> bool:
        """Return whether weights are what they were when the last step of this optimizer began, although that has changed some."""
        weights = {key: each.named.parameter.detach() for key, each in used.items()}
        are_as_before = all(key in self._began and torch.equal(weights[key], self._began[key]) for key in used)
        are_of_one = all(each.optimizer == optimizer for each in used.values())
        return are_of_one and are_as_before and not all(torch.equal(weights[key], used[key].weights) for key in used)

    def step_ended(self, optimizer: int, observed: Sequence[NamedParameter], shared: frozenset[int]) -> None:
        """Copy a few of the gradients that a step has used, first of all of parameters with the ids `shared`."""
        chosen = [named for named in observed if id(named.parameter) in shared] or observed
        small = (named for named in reversed(chosen) if _is_small(named.parameter.grad))
        for named in islice(small, _MOST_PARAMETERS):
            parameter = named.parameter
            if (gradient := parameter.grad) is not None:
                copies = gradient.clone(), parameter.detach().clone()
                versions = gradient._version, parameter._version
                self._used[id(parameter)] = _Used(named, optimizer, gradient, *copies, versions)

    def _count(self, mistake: Mistake, used: list[_Used]) -> None:
        self._counts[mistake.name] += 1
        if self._counts[mistake.name] == _NEEDED:
            modules = tuple(dict.fromkeys(each.named.module or each.named.name for each in used))
            detail = (
                f"This holds for {_NEEDED} of {self._steps} steps, and for {listed(modules)}, as far as they were read."
            )
            self._found(mistake.found(len(used), modules[0], detail=detail, modules=modules))


def _is_small(gradient: Tensor | None) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and gradient.is_floating_point()
        and gradient.numel() <= _MOST_ELEMENTS
        and not gradient.is_inference()
    )


def _were_clipped(used: list[_Used]) -> bool:
    """Return whether gradients were multiplied by one number below 0.99, or limited, and the parameters left as they were.

    Loops that update the parameters a second time by hand may use such gradients.

    Examples
    --------
    >>> parameter = torch.nn.Parameter(torch.ones(9))
    >>> parameter.grad = torch.arange(9.0)
    >>> def clipped(values):
    ...     return _were_clipped([_Used(NamedParameter("fc", "", False, parameter), 1, values, parameter.grad, parameter, (0, 0))])
    >>> clipped(parameter.grad / 3), clipped(parameter.grad.clamp(max=5)), clipped(parameter.grad + 1), clipped(parameter.grad)
    (True, True, False, False)
    """
    if any(each.named.parameter._version != each.versions[1] for each in used):
        return False
    values = [each.values.reshape(-1).double() for each in used]
    if not values or (before := torch.cat(values)).count_nonzero() < _FEWEST_ELEMENTS:
        return False
    after = torch.cat([each.gradient.reshape(-1).double() for each in used])
    if torch.equal(before, after) or not bool(after.any()) or not bool(after.isfinite().all()):
        return False
    limit = after.abs().max()
    factor = limit / before.abs().max()
    precision = max(torch.finfo(each.gradient.dtype).eps for each in used)
    is_multiple = factor < _LARGEST_FACTOR and torch.allclose(after, factor * before, rtol=8 * precision, atol=1e-30)
    return bool(is_multiple) or torch.equal(after, before.clamp(-limit, limit))
