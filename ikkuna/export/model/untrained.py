"""Finds trainable parameters that are not trained: no optimizer has them, or no backward reaches them."""

from collections.abc import Iterable

from ikkuna.logger import log
from ikkuna.modules import NamedParameter

__all__ = ["UntrainedParameters"]

_PATIENCE = 100  # steps in which a layer that is used now and then has time to be used
_FEW = 20  # a run that ends before that many steps says little about its layers
_NAMED = 5


class UntrainedParameters:
    """Logs once which trainable parameters get gradients and belong to no optimizer, and which never get a gradient.

    Attributes
    ----------
    names_unowned : bool
        Whether parameters that no optimizer owns are logged; ``False`` if a rule names them.
    settled : tuple of NamedParameter, optional
        The observed parameters if each of them has had a gradient; then nothing has to be noted for them.
    """

    def __init__(self) -> None:
        self.names_unowned = True
        self.settled: tuple[NamedParameter, ...] | None = None
        self._all: tuple[NamedParameter, ...] = ()
        self._waiting: dict[int, NamedParameter] = {}  # trainable ones that had no gradient so far
        self._frozen: dict[int, NamedParameter] = {}
        self._unowned: set[int] = set()
        self._steps = 0

    def note_gradients(self, observed: tuple[NamedParameter, ...], unowned: Iterable[NamedParameter]) -> None:
        """Find out which parameters have gradients while an optimizer steps.

        Parameters
        ----------
        observed : tuple of NamedParameter
            All observed parameters.
        unowned : iterable of NamedParameter
            Those of them that no optimizer owns.
        """
        if observed is not self._all:
            self._track(observed)
        if self._waiting:
            self._waiting = {key: named for key, named in self._waiting.items() if named.parameter.grad is None}
        self.settled = None if self._waiting or self._frozen else observed
        found = {
            id(named.parameter): named
            for named in unowned
            if id(named.parameter) not in self._unowned and named.parameter.grad is not None
        }
        if found and self.names_unowned:
            self._unowned |= found.keys()
            log.warning(
                "no optimizer has these parameters, which get gradients: %s; they are not trained, and optimizer.zero_grad() does not "
                "clear their gradients, which add up; give them to an optimizer, or call requires_grad_(False)",
                _names(found.values()),
            )

    def _track(self, observed: tuple[NamedParameter, ...]) -> None:
        known = {id(named.parameter) for named in self._all}
        ids = {id(named.parameter): named for named in observed}
        self._all = observed
        self._frozen = {key: named for key, named in ids.items() if key not in known or key in self._frozen}
        self._waiting = {key: named for key, named in ids.items() if key in self._waiting}
        self._unowned &= ids.keys()
        self._begin_window()

    def _begin_window(self) -> None:
        """Begin to wait for gradients of everything that can be trained now."""
        self._steps = 0
        everything = self._frozen | self._waiting
        self._waiting = {key: named for key, named in everything.items() if named.parameter.requires_grad}
        self._frozen = {key: named for key, named in everything.items() if key not in self._waiting}

    def step_ended(self) -> None:
        """Count a step, and log which parameters have had no gradient for many steps."""
        self._steps += 1
        if self._steps >= _PATIENCE:
            self._warn_of_waiting()
            self._begin_window()

    def finish(self) -> None:
        """Log which parameters have had no gradient in the whole run."""
        if self._steps >= _FEW:
            self._warn_of_waiting()

    def _warn_of_waiting(self) -> None:
        """Log and forget the parameters that could be trained all the time and had no gradient."""
        found = {key: named for key, named in self._waiting.items() if named.parameter.requires_grad}
        self._waiting = {key: named for key, named in self._waiting.items() if key not in found}
        if found:
            log.warning(
                "these trainable parameters had no gradient in %d steps: %s; the loss does not depend on them, because their module "
                "is not called, or its output is not used or is detached",
                self._steps,
                _names(found.values()),
            )


def _names(parameters: Iterable[NamedParameter]) -> str:
    """Return the names of a few parameters, and the number of the others."""
    names = [f"{named.name} ({'bias' if named.is_bias else 'weight'})" for named in parameters]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
