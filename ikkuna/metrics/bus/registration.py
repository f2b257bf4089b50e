"""The checks that a subscriber passes before it is registered, the interface of exporters, and states in a checkpoint."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from ikkuna.errors import ConfigError, UnknownKindError, unknown_name
from ikkuna.metrics.messages.kinds import BUILT_IN, EVENT_KINDS, OBSERVED, is_built_in, is_of_module
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.metrics.subscriber.subscription import Subscription
from ikkuna.store.quantity import LOGGED
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.modules import NamedModule


class Source(Protocol):
    """A publisher on a bus: an exporter."""

    @property
    def modules(self) -> Sequence[NamedModule]:
        """The modules it observes, in the order of the network."""

    @property
    def module_names(self) -> frozenset[str]:
        """The names of these modules."""

    @property
    def model(self) -> nn.Module | None:
        """The whole network; ``None`` if it is unknown."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that own parameters of the network."""

    def demand_changed(self) -> None:
        """Prepare for subscribers that were added or removed."""

    @property
    def evaluate(self) -> Callable[..., None]:
        """The function that runs the model over data without an effect on training."""

    @property
    def is_forgotten(self) -> bool:
        """Whether the user has no reference to the exporter any more."""

    def close(self) -> None:
        """Stop publishing."""


def known_kinds(subscribers: Sequence[Subscriber]) -> tuple[str, ...]:
    """Return the built-in kinds and those that `subscribers` publish."""
    return tuple(dict.fromkeys((*BUILT_IN, *(kind for s in subscribers for kind in s.publishes))))


def check_registration(subscriber: Subscriber, others: Sequence[Subscriber], modules: frozenset[str]) -> None:
    """Check that a subscriber can be registered.

    Parameters
    ----------
    subscriber : Subscriber
        The new subscriber.
    others : sequence of Subscriber
        The registered subscribers.
    modules : frozenset of str
        The names of the observed modules.

    Raises
    ------
    UnknownKindError
        If a kind is neither built-in nor published.
    ConfigError
        If the subscriber cannot take a kind, if another one publishes the same result, if results form a cycle,
        or if the pattern matches no module.
    """
    for kind in subscriber.kinds:
        _check_kind(subscriber, kind, others)
    _check_join(subscriber, others)
    if cycle := _cycle(subscriber, others):
        raise ConfigError(f"{subscriber!r} would close a cycle of results: {' -> '.join(cycle)}")
    for kind in subscriber.publishes:
        _check_result(subscriber, kind, others, modules)
    _check_modules(subscriber, modules)


def _check_kind(subscriber: Subscriber, kind: str, others: Sequence[Subscriber]) -> None:
    is_result = kind == LOGGED or _is_published(kind, others)
    if not is_built_in(kind) and not is_result:
        raise UnknownKindError(unknown_name("kind", kind, known_kinds(others)))
    if is_result and not subscriber.derived:
        raise ConfigError(
            f"{subscriber!r} measures tensors, but {kind!r} is a result and carries a float; "
            "set `derived = True` in the class if it can use floats"
        )
    if not (kind in EVENT_KINDS or is_result or subscriber.measures or subscriber.fields):
        raise ConfigError(f"{subscriber!r} needs a `measure` or `fields` to take {kind!r}, it has neither")


def _is_published(kind: str, others: Sequence[Subscriber]) -> bool:
    return any(kind in other.publishes for other in others)


def _check_join(subscriber: Subscriber, others: Sequence[Subscriber]) -> None:
    if not subscriber.subscription.is_joined:
        return
    of_modules = [kind for kind in subscriber.kinds if _belongs_to_modules(kind, others)]
    of_network = [kind for kind in subscriber.kinds if kind not in of_modules]
    if of_modules and of_network:
        raise ConfigError(
            f"{subscriber!r} joins kinds of modules with kinds of the network, whose messages have no module in common: "
            f"{', '.join(of_modules)} and {', '.join(of_network)}"
        )


def _belongs_to_modules(kind: str, others: Sequence[Subscriber]) -> bool:
    publisher = next((other for other in others if kind in other.publishes), None)
    if publisher is None:
        return is_of_module(kind)
    return not publisher.of_network and _belongs_to_modules(publisher.kinds[0], others)


def _check_result(subscriber: Subscriber, kind: str, others: Sequence[Subscriber], modules: frozenset[str]) -> None:
    # Results of optimizer states begin with a prefix of built-in kinds, of which there is no complete list.
    is_result = kind not in BUILT_IN and any(kind.startswith(f"{source}_") for source in subscriber.kinds)
    if is_built_in(kind) and not is_result:
        raise ConfigError(
            f"{subscriber!r} cannot publish {kind!r}, which is a built-in kind; choose another name with publishes="
        )
    for other in others:
        if kind in other.publishes and _overlap(subscriber.subscription, other.subscription, modules):
            raise ConfigError(
                f"{kind!r} is published already, by {other!r}, for the same pass and modules; "
                "close() its exporter, pass other modules=, or choose another name with publishes="
            )


def _overlap(one: Subscription, other: Subscription, modules: frozenset[str]) -> bool:
    """Return whether two subscriptions can produce results for the same pass and module."""
    if one.tag != other.tag and None not in (one.tag, other.tag):
        return False
    if one.modules is None or other.modules is None or one.modules == other.modules:
        return True
    return any(one.matches(name) and other.matches(name) for name in modules)


def _cycle(subscriber: Subscriber, others: Sequence[Subscriber]) -> list[str]:
    """Return the kinds of a cycle that `subscriber` closes, the first one again at the end; empty if there is none."""
    if not any(_is_published(kind, (*others, subscriber)) for kind in subscriber.kinds):
        return []  # it takes no result
    results: dict[str, set[str]] = {}
    for s in (*others, subscriber):
        for kind in s.kinds:
            results.setdefault(kind, set()).update(s.publishes)

    def search(kind: str, path: list[str]) -> list[str]:
        if kind in path:
            return [*path[path.index(kind) :], kind]
        found = (search(after, [*path, kind]) for after in sorted(results.get(kind, ())))
        return next((path for path in found if path), [])

    return next((path for kind in subscriber.publishes if (path := search(kind, []))), [])


def _check_modules(subscriber: Subscriber, modules: frozenset[str]) -> None:
    # the names of observed tensors are known when the model passes them
    wants_modules = any(map(is_of_module, subscriber.kinds)) and OBSERVED not in subscriber.kinds
    if modules and wants_modules and not any(map(subscriber.subscription.matches, modules)):
        names = ", ".join(sorted(modules)[:8]) + (", …" if len(modules) > 8 else "")
        raise ConfigError(
            f"modules={subscriber.subscription.modules!r} matches none of the {len(modules)} modules ({names})"
        )


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
