"""What must hold before a subscriber may take part; each check raises and changes nothing."""

from collections.abc import Sequence
from difflib import get_close_matches

from ikkuna.errors import ConfigError, UnknownKindError
from ikkuna.export.message.kinds import BUILT_IN, EVENT_KINDS, is_built_in, is_of_module
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.export.subscriber.subscription import Subscription, SynchronizedSubscription

__all__ = ["check_registration", "known_kinds"]

Subscriptions = Sequence[Subscription]


def known_kinds(subscriptions: Subscriptions) -> tuple[str, ...]:
    """Return the built-in kinds and those that `subscriptions` announce."""
    announced = (kind for s in subscriptions for kind in s.subscriber.publishes)
    return tuple(dict.fromkeys((*BUILT_IN, *announced)))


def check_registration(subscriber: Subscriber, others: Subscriptions, modules: frozenset[str]) -> None:
    """Check that `subscriber` fits to `others` and to the names of `modules`.

    Raises
    ------
    UnknownKindError
        For a kind that nobody publishes.
    ConfigError
        For a kind it cannot take, a result that has a publisher already, a circle of results, a pattern that matches no module.
    """
    for kind in subscriber.kinds:
        _check_kind(subscriber, kind, others)
    _check_join(subscriber, others)
    if path := _circle(subscriber, others):
        raise ConfigError(f"publication cycle {' -> '.join(path)}")
    _check_publications(subscriber, others, modules)
    _check_modules(subscriber, modules)


def _check_kind(subscriber: Subscriber, kind: str, others: Subscriptions) -> None:
    if not is_built_in(kind) and kind not in (known := known_kinds(others)):
        near = get_close_matches(kind, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise UnknownKindError(f"unknown kind {kind!r}{hint} known: {', '.join(known)}")
    is_event, is_derived = kind in EVENT_KINDS, _is_announced(kind, others) or not is_built_in(kind)
    if is_derived and not subscriber.derived:
        raise ConfigError(
            f"{subscriber!r} measures tensors, but {kind!r} is a result and carries a float; "
            "a subscriber that can use one says so with `derived = True`"
        )
    if not (is_event or is_derived or subscriber.measures or subscriber.fields):
        raise ConfigError(f"{subscriber!r} needs a `measure` or `fields` to take {kind!r}, it has neither")


def _is_announced(kind: str, others: Subscriptions) -> bool:
    return any(kind in other.subscriber.publishes for other in others)


def _check_join(subscriber: Subscriber, others: Subscriptions) -> None:
    is_joining = isinstance(subscriber.subscription, SynchronizedSubscription)
    if is_joining and len({_is_of_module(kind, others) for kind in subscriber.kinds}) > 1:
        raise ConfigError(f"{subscriber!r} joins kinds of modules with kinds of the network, which never meet")


def _is_of_module(kind: str, others: Subscriptions) -> bool:
    if not _is_announced(kind, others):
        return is_of_module(kind)
    maker = next(s for s in others if kind in s.subscriber.publishes)
    return not maker.subscriber.of_network and _is_of_module(maker.kinds[0], others)


def _check_publications(subscriber: Subscriber, others: Subscriptions, modules: frozenset[str]) -> None:
    for kind in subscriber.publishes:
        # The name of a result of an optimizer's state begins as those states do, of which there is no list.
        is_result = kind not in BUILT_IN and any(kind.startswith(f"{source}_") for source in subscriber.kinds)
        if is_built_in(kind) and not is_result:
            raise ConfigError(
                f"{subscriber!r} cannot publish {kind!r}, which is a built-in kind; choose another with publishes="
            )
        for other in others:
            if kind in other.subscriber.publishes and _overlap(subscriber.subscription, other, modules):
                raise ConfigError(
                    f"{kind!r} is published already, by {other.subscriber!r}, for the same pass and modules; "
                    "close() its exporter, give other modules=, or another name with publishes="
                )


def _overlap(one: Subscription, other: Subscription, modules: frozenset[str]) -> bool:
    if one.tag != other.tag and None not in (one.tag, other.tag):
        return False
    if one.modules is None or other.modules is None or one.modules == other.modules:
        return True
    return any(one.matches(name) and other.matches(name) for name in modules)


def _circle(subscriber: Subscriber, others: Subscriptions) -> list[str]:
    leads: dict[str, set[str]] = {}
    for s in (*(other.subscriber for other in others), subscriber):
        for kind in s.kinds:
            leads.setdefault(kind, set()).update(s.publishes)

    def search(kind: str, path: list[str]) -> list[str]:
        if kind in path:
            return [*path[path.index(kind) :], kind]
        found = (search(after, [*path, kind]) for after in sorted(leads.get(kind, ())))
        return next((path for path in found if path), [])

    return next((path for kind in subscriber.publishes if (path := search(kind, []))), [])


def _check_modules(subscriber: Subscriber, modules: frozenset[str]) -> None:
    wants_modules = any(is_of_module(kind) for kind in subscriber.kinds)
    if modules and wants_modules and not any(map(subscriber.subscription.matches, modules)):
        some = ", ".join(sorted(modules)[:8])
        raise ConfigError(
            f"modules={subscriber.subscription.modules!r} matches none of the {len(modules)} modules ({some}, …)"
        )
