"""Finds gradients that steps use twice, and gradients that are changed when no step uses them any more."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.diagnosis.mistakes import CHANGED_AFTER_STEP, PARAMETER_IN_TWO_GROUPS, STEP_REPEATED, Mistake
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.modules import NamedParameter

_STEPS = 20
_NEEDED = 3
_MOST_PARAMETERS = 8
_MOST_ELEMENTS = 4096
_LARGEST_FACTOR = 0.99  # clipping to the norm that gradients have multiplies them by a little less than 1
_FEWEST_ELEMENTS = 8  # fewer may be multiples of others by chance


class _Used(NamedTuple):
    """The gradient of a parameter at the end of the step that has used it, with the versions of both."""

    named: NamedParameter
    optimizer: int
    gradient: Tensor
    values: Tensor
    versions: tuple[int, int]

    @property
    def is_kept(self) -> bool:
        """Whether the parameter still has this gradient."""
        return self.named.parameter.grad is self.gradient


class UsedGradients:
    """Compares a few gradients at the first steps of optimizers with what they were at the end of the steps before.

    A step that finds the same gradient, with the values that an earlier step has used, repeats that step.
    A gradient that has been removed, and has become a multiple of itself below 0.99 or was limited by then, was clipped too late.
    These are facts; three steps must show them.  Only small gradients of the host are kept, for 20 steps at most.
    Steps with a closure, which computes the gradients, and steps inside of another one are left out.

    Parameters
    ----------
    found : callable
        Receives the findings.
    """

    def __init__(self, found: Callable[[Finding], object]) -> None:
        self._found = found
        self._used: dict[int, _Used] = {}
        self._counts = dict.fromkeys((CHANGED_AFTER_STEP.name, PARAMETER_IN_TWO_GROUPS.name, STEP_REPEATED.name), 0)
        self._steps = 0

    def step_begins(self, optimizer: int, observed: Iterable[NamedParameter]) -> "UsedGradients | None":
        """Compare the gradients that a step will use with those that were used before; return ``None`` after the last step.

        Parameters
        ----------
        optimizer : int
            The number of the optimizer.
        observed : iterable of NamedParameter
            The parameters that it owns.
        """
        self._steps += 1
        used = [known for named in observed if (known := self._used.get(id(named.parameter))) is not None]
        again = [each for each in used if each.is_kept and _is_unchanged(each)]
        if others := [each for each in again if each.optimizer != optimizer]:
            self._count(PARAMETER_IN_TWO_GROUPS, others)
        elif again:
            self._count(STEP_REPEATED, again)
        elif _were_clipped([each for each in used if not each.is_kept]):
            self._count(CHANGED_AFTER_STEP, used)
        return self if self._steps < _STEPS else None

    def step_ended(self, optimizer: int, observed: Sequence[NamedParameter], shared: frozenset[int]) -> None:
        """Remember a few of the gradients that a step has used, first of all of parameters with the ids `shared`."""
        chosen = [named for named in observed if id(named.parameter) in shared] or observed
        small = (named for named in reversed(chosen) if _is_small(named.parameter.grad))
        for named in islice(small, _MOST_PARAMETERS):
            if (gradient := named.parameter.grad) is not None:
                versions = gradient._version, named.parameter._version
                self._used[id(named.parameter)] = _Used(named, optimizer, gradient, gradient.clone(), versions)

    def _count(self, mistake: Mistake, used: list[_Used]) -> None:
        self._counts[mistake.name] += 1
        if self._counts[mistake.name] == _NEEDED:
            modules = tuple(dict.fromkeys(each.named.module or each.named.name for each in used))
            detail = f"This holds for {_NEEDED} of the first {self._steps} steps, and for {listed(modules)}, as far as it was read."
            self._found(mistake.found(len(used), modules[0], detail=detail, modules=modules))


def _is_small(gradient: Tensor | None) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and gradient.numel() <= _MOST_ELEMENTS
        and not gradient.is_inference()
    )


def _is_unchanged(used: _Used) -> bool:
    gradient = used.gradient
    return gradient._version == used.versions[0] and torch.equal(gradient, used.values) and bool(gradient.any())


def _were_clipped(used: list[_Used]) -> bool:
    """Return whether gradients were multiplied by one number below 0.99, or limited, and the parameters left as they were.

    Loops that update the parameters a second time by hand may use such gradients.

    Examples
    --------
    >>> parameter = torch.nn.Parameter(torch.ones(9))
    >>> parameter.grad = torch.arange(9.0)
    >>> def clipped(values):
    ...     return _were_clipped([_Used(NamedParameter("fc", "", False, parameter), 1, values, parameter.grad, (0, 0))])
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
