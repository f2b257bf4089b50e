"""The states of subscribers in a checkpoint."""

from collections.abc import Iterable, Sequence
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.support.failures import log, raise_users_exception

__all__ = ["StoredStates"]


class StoredStates:
    """Returns and loads what subscribers keep over several steps.

    A state belongs to the subscriber with the same label, such as ``CosineSubscriber(weight_gradients)``;
    of several with one label, they are matched in the order of registration.
    A state whose subscriber is not registered yet waits for it.
    """

    def __init__(self) -> None:
        self._waiting: list[dict[str, Any]] = []

    def of(self, registered: Iterable[Registered]) -> list[dict[str, Any]]:
        """Return the states of all subscribers that have one, and those that still wait."""
        states = []
        for each in registered:
            try:
                state = each.subscriber.state_dict()
            except Exception as error:
                raise_users_exception(error)
                log.exception("%s.state_dict() failed; the checkpoint lacks it", each.label)
                continue
            if state:
                states.append({"label": each.label, "state": state})
        return states + self._waiting

    def load(self, registered: Iterable[Registered], states: Sequence[dict[str, Any]]) -> None:
        """Load states into the subscribers that are registered; the others wait."""
        self._waiting = list(states)
        for each in registered:
            self.apply(each)
        if self._waiting:
            names = ", ".join(dict.fromkeys(state["label"] for state in self._waiting))
            log.info("load_state_dict(): states wait for subscribers that are not registered yet: %s", names)

    def apply(self, registered: Registered) -> None:
        """Load the first waiting state of a subscriber, if there is one.

        Raises
        ------
        ConfigError
            If the subscriber cannot load it.
        """
        for position, each in enumerate(self._waiting):
            if each["label"] == registered.label and registered.subscriber.state_dict():
                try:
                    registered.subscriber.load_state_dict(each["state"])
                except Exception as error:
                    raise_users_exception(error)
                    raise ConfigError(f"the state of {registered.label} cannot be loaded: {error}") from error
                del self._waiting[position]
                return
