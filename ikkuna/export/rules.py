"""Registers rules, and the statistics and subscribers that they need."""

from collections.abc import Iterable
from typing import Any

from ikkuna.diagnosis import Judge, Network, Rule, get_rules
from ikkuna.diagnosis.finding import SEVERITIES
from ikkuna.errors import ConfigError, ConfigTypeError, unknown_name
from ikkuna.export.bus.bus import Handle, MessageBus
from ikkuna.export.messages.kinds import MICRO_KINDS
from ikkuna.export.rule_statistics import StatisticsReader, shared_kinds
from ikkuna.export.rule_subscriber import OnFinding, RuleSubscriber
from ikkuna.export.subscriber.subscription import Subscription
from ikkuna.logger import log
from ikkuna.visualization.backend import Backend

__all__ = ["RuleSelection", "register_rules"]

_OF_LOSS = frozenset(("loss", "network_output", "input_labels"))
_OWN = ("learning_rate", "optimizer_closure", "step_skipped", "unowned_parameters")

RuleSelection = str | Rule | Iterable[str | Rule]
"""Names of rules and `Rule` objects, see `ikkuna.diagnosis.get_rules`."""


def register_rules(
    bus: MessageBus,
    rules: RuleSelection = "default",
    *,
    every: int = 10,
    later: int | None = None,
    loss_every: int | None = None,
    sees_loss: bool = True,
    on_finding: OnFinding | None = None,
    stop: str | None = None,
    backend: str | Backend | list[str | Backend] | None = None,
) -> RuleSubscriber:
    """Register rules on a bus, with the statistics and subscribers that they need.

    Register other subscribers before: their results are read, and nothing is measured twice.

    Parameters
    ----------
    bus : MessageBus
        The bus of an exporter to which the model has been added.
    rules : str, Rule, or iterable of them
        See `ikkuna.diagnosis.get_rules`.
    every : int
        The number of steps between two samples of modules.
    later : int, optional
        The largest number of steps between two samples from step ``30 * every`` on, a multiple of `every`; by default ``4 * every``.
        It concerns what no other subscriber measures: most mistakes show in the first steps, and these statistics are most of the cost.
    loss_every : int, optional
        The number of steps between two samples of the loss and of skipped steps; `every` is a multiple of it.
        Rules are judged at these steps.  By default 2 if `every` is even, otherwise 1: for a small model a sample of the loss alone
        costs about as much as everything else in a step without samples.
    sees_loss : bool
        Whether the module that computes the loss is known.
    on_finding : callable, optional
        Called with each new `Finding`.
    stop : {'info', 'warning', 'error'}, optional
        The least severity of a finding that raises `StopTraining` at the end of the step; by default nothing is raised.
    backend : str, Backend or list of these, optional
        Where findings and the values that rules read are shown; by default the backends of the registered subscribers, or ``"tb"``.

    Raises
    ------
    ConfigError, PluginError
        If a rule is unknown or an argument is invalid.  The bus is unchanged then.
    """
    if stop is not None and stop not in SEVERITIES:
        raise ConfigError(unknown_name("severity", stop, SEVERITIES))
    if on_finding is not None and not callable(on_finding):
        raise ConfigTypeError(f"on_finding needs a function of a Finding, got {type(on_finding).__name__}")
    later = _checked_later(every, later)
    loss_every = _checked_loss_every(every, loss_every)
    judge = Judge(get_rules(rules), Network(bus.network))
    used = list(
        {(b if isinstance(b, str) else id(b)): b for r in bus.registered for b in r.subscriber.backends}.values()
    )
    options: dict[str, Any] = {"backend": backend if backend is not None else used or ["tb"]}
    handles: list[Handle] = []
    try:
        for rule in judge.rules:
            handles += _register_needs(bus, rule, judge.history.network, (every, later), sees_loss, options)
        published = {kind for r in bus.registered for kind in r.subscriber.publishes}
        kinds = ["batch_finished", *(("loss",) if sees_loss else ()), *sorted((judge.kinds & published) - set(_OWN))]
        subscriber = RuleSubscriber(kinds, judge, on_finding=on_finding, stop=stop, every=every, **options)
        subscriber.subscription = subscriber.subscription.sampled(subsample=loss_every)
        shared = shared_kinds(sorted(judge.kinds - published))
        for kind, statistics in shared.items():
            reader = StatisticsReader(
                kind,
                statistics,
                subscriber,
                subsample=every,
                modules=_few(judge.history.network) if kind in MICRO_KINDS else None,
                **options,
            )
            reader.subscription = _thinned(reader.subscription, every, later)
            reader.serves_rules = True
            handles.append(bus.register_subscriber(reader))
        judge.measured = frozenset((*kinds, *_OWN, *(f"{kind}_{end}" for kind, ends in shared.items() for end in ends)))
        bus.register_subscriber(subscriber)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return subscriber


def _checked_later(every: int, later: int | None) -> int:
    """Return the number of steps between two samples from step ``30 * every`` on."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every must be an int >= 1, got {every!r}")
    later = 4 * every if later is None else later
    if isinstance(later, bool) or not isinstance(later, int) or later < every or later % every:
        raise ConfigError(f"later needs a multiple of every={every}, got {later!r}")
    return later


def _checked_loss_every(every: int, loss_every: int | None) -> int:
    """Return the number of steps between two samples of the loss."""
    if loss_every is None:
        return 1 if every % 2 else 2
    if isinstance(loss_every, bool) or not isinstance(loss_every, int) or loss_every < 1 or every % loss_every:
        raise ConfigError(f"loss_every needs a divisor of every={every}, got {loss_every!r}")
    return loss_every


def _thinned(subscription: Subscription, every: int, later: int) -> Subscription:
    """Return a subscription whose samples are at most `later` steps apart from step ``30 * every`` on.

    A rule that needs several samples in a row is late by a multiple of this distance,
    so what is sampled more rarely than `every` from the beginning is thinned less.
    """
    return subscription.thinned(30 * every, max(later // subscription.subsample, 1))


def _register_needs(
    bus: MessageBus,
    rule: Rule,
    network: Network,
    distances: tuple[int, int],
    sees_loss: bool,
    options: dict[str, Any],
) -> list[Handle]:
    """Register the subscribers that a rule brings along; one that cannot work with this model is left out."""
    handles = []
    published = {kind for r in bus.registered for kind in r.subscriber.publishes}
    for subscriber in rule.subscribers(network, distances[0]):
        if not published.isdisjoint(subscriber.publishes) or (
            _OF_LOSS.intersection(subscriber.kinds) and not sees_loss
        ):
            continue
        subscriber.serves_rules = True
        subscriber.backends = tuple(_as_list(options["backend"]))
        subscriber.subscription = _thinned(subscriber.subscription, *distances)
        try:
            handles.append(bus.register_subscriber(subscriber))
        except ConfigError as error:
            log.warning("the rule %s lacks %s: %s", rule.name, ", ".join(subscriber.publishes), error)
    return handles


def _few(network: Network, share: float = 0.05, number: int = 4) -> list[str] | None:
    """Return the modules with the smallest weight matrices: the gradients of a few show whether they are carried over.

    Together they have at most a `share` of all parameters or 65,536 elements, whichever is more, unless it is a single one.
    """
    entries = [entry for entry in network.modules if any(len(shape or ()) > 1 for _, shape in entry.parameters)]
    entries.sort(key=lambda entry: entry.count)
    limit, found, total = share * sum(entry.count for entry in network.modules), list[str](), 0
    for entry in entries[:number]:
        total += entry.count
        if found and total > max(limit, 65_536):
            break
        found.append(entry.name)
    return found or None


def _as_list(backend: Any) -> list[Any]:
    return list(backend) if isinstance(backend, list | tuple) else [backend]
