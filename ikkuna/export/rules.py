"""Applies rules while a model trains."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.diagnosis import Finding, Findings, Judge, Network, Rule, get_rules
from ikkuna.diagnosis.finding import SEVERITIES
from ikkuna.errors import ConfigError, ConfigTypeError, StopTraining, unknown_name
from ikkuna.export.bus.bus import Handle, MessageBus
from ikkuna.export.messages.batch import MessageBatch
from ikkuna.export.messages.kinds import MICRO_KINDS
from ikkuna.export.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.rule_statistics import StatisticsReader, shared_kinds
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.logger import log
from ikkuna.modules import NamedParameter
from ikkuna.signal_handlers import raise_users_exception
from ikkuna.visualization.backend import Backend

__all__ = ["RuleSelection", "RuleSubscriber", "register_rules"]

_OF_LOSS = frozenset(("loss", "network_output", "input_labels"))
_OWN = ("learning_rate", "step_skipped", "unowned_parameters")

OnFinding = Callable[[Finding], object]

RuleSelection = str | Rule | Iterable[str | Rule]
"""Names of rules and `Rule` objects, see `ikkuna.diagnosis.get_rules`."""


class RuleSubscriber(Subscriber):
    """Applies rules after each step, and acts on new findings.

    A new finding is logged in one line, shown as a text and as a mark at its step, and passed to a function.
    A further text, ``findings``, is a table of all findings so far.
    Use `register_rules`, which also registers what the rules need.

    Takes ``batch_finished``, the loss and the results of other subscribers; publishes nothing.

    Parameters
    ----------
    kinds : list of str
        The kinds to take.
    judge : Judge
        Applies the rules.
    on_finding : callable, optional
        Called with each new finding; its exceptions are logged.
    stop : {'info', 'warning', 'error'}, optional
        The least severity of a finding that raises `StopTraining` at the end of the step.
    every : int
        The number of steps between two samples of facts that rarely change.
    **options : Any
        See `Subscriber`.

    Attributes
    ----------
    actions : list of callable
        Functions of ikkuna that are called with each new finding, as the flight recorder's.
    """

    fields = ("mean",)
    derived = True
    sees_skipped = True

    def __init__(
        self,
        kinds: list[str],
        judge: Judge,
        *,
        on_finding: OnFinding | None = None,
        stop: str | None = None,
        every: int = 10,
        **options: Any,
    ) -> None:
        super().__init__(kinds, tag=None, **options)
        self.judge = judge
        self._on_finding = on_finding
        self._stopping = SEVERITIES[SEVERITIES.index(stop) :] if stop else ()
        self._every = every
        self.actions: list[OnFinding] = []

    @property
    def findings(self) -> Findings:
        """The findings so far."""
        return self.judge.findings

    def is_internal(self, kind: str) -> bool:
        """Return whether values of a kind are no findings and no learning rates."""
        return kind == "unowned_parameters"

    def receive(self, message: Any, kind: str, value: float) -> None:
        """Add a value to the history of the rules."""
        stamp = message.stamp
        self.judge.add(kind, message.series_name, stamp.global_step, value, stamp.pass_name)

    def receive_all(self, batch: MessageBatch, kind: str, values: NDArray[np.float64]) -> None:
        """Add a value of each message of a batch to the history of the rules."""
        stamp = batch.stamp
        self.judge.add_all(kind, batch.names.names, stamp.global_step, values.tolist(), stamp.pass_name)

    def is_shown(self, kind: str) -> bool:
        """Return whether no other subscriber publishes a kind, so that it is shown for a later check of the run."""
        host: Any = self._host
        if host is None:
            return False
        if self._registered is not host.registered:
            self._registered = host.registered
            self._published = frozenset(name for r in host.registered for name in r.subscriber.publishes)
        return kind not in self._published

    _registered: Any = None
    _published: frozenset[str] = frozenset()

    def compute(self, message: Message) -> None:
        """Add the values of a message to the history of the rules."""
        if message.kind == "batch_finished":
            self._add_event(message)
        elif message.record is not None:
            value = message.data if isinstance(message.data, float) else message.record.mean
            self.receive(message, message.kind, value)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Add the values of the messages of one kind to the history of the rules."""
        self.receive_all(batch, batch.kind, batch.records.mean if batch.data is None else batch.data)

    def _add_event(self, message: Message) -> None:
        assert isinstance(message, NetworkMessage)
        if not self.judge.history.network.modules:
            self.judge.history.network = Network(self.network)
        self.receive(message, "step_skipped", float(message.skipped))
        if message.skipped or message.global_step % self._every:
            return
        data = message.data or {}
        rates = data.get("learning_rates", {})
        self._add_rates(message, rates)
        if rates:  # without rates the user's loop makes the steps
            trainable = [named for named in data.get("unowned", ()) if named.parameter.requires_grad]
            self._add_unowned(message, trainable)

    def _add_unowned(self, message: NetworkMessage, unowned: Sequence[NamedParameter]) -> None:
        """Add the number of parameters that no optimizer owns, and 1 for each of them."""
        kind = "unowned_parameters"
        self._add_and_show(message, kind, float(len(unowned)))
        for named in unowned:
            name = f"{named.name}.bias" if named.is_bias and not named.path else named.name
            self._add_and_show(ModuleMessage(message.stamp, kind, module=named.module, name=name), kind, 1.0)

    def _add_and_show(self, message: Message, kind: str, value: float) -> None:
        self.receive(message, kind, value)
        if self.is_shown(kind):
            self._show(message, value, kind)

    def _add_rates(self, message: NetworkMessage, rates: dict[str, Any]) -> None:
        names = {name: f"group {name}" if name.isdigit() else name for name in rates}
        is_shown = self.is_shown("learning_rate")
        for name, rate in rates.items():
            if rate is None:
                continue
            group = NetworkMessage(message.stamp, message.kind, path="" if list(rates) == ["0"] else names[name])
            self.receive(group, "learning_rate", float(rate))
            if is_shown:
                self._show(group, float(rate), "learning_rate")

    def finish(self, stamp: Stamp) -> None:
        """Judge the step, and act on the new findings.

        Raises
        ------
        StopTraining
            If `stop` asks for it.
        """
        found = self.judge.finish_step(stamp.global_step)
        for finding in found:
            self._act(finding, stamp)
        if found:
            self._show(NetworkMessage(stamp, "findings"), self.findings.as_markdown(), "findings")
        for finding in found:
            if finding.severity in self._stopping:
                raise StopTraining(finding)

    def _act(self, finding: Finding, stamp: Stamp) -> None:
        log.warning("%s", finding)
        self._show(NetworkMessage(stamp, "findings", path=finding.rule), finding, "findings")
        for action in self.actions:
            action(finding)
        if self._on_finding is not None:
            try:
                self._on_finding(finding)
            except Exception as error:
                raise_users_exception(error)
                log.exception("on_finding failed (training is not affected)")


def register_rules(
    bus: MessageBus,
    rules: RuleSelection = "default",
    *,
    every: int = 10,
    later: int | None = None,
    loss_every: int = 1,
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
        The number of steps between two samples from step ``30 * every`` on, a multiple of `every`; by default ``4 * every``.
        It concerns what no other subscriber measures: most mistakes show in the first steps, and these statistics are most of the cost.
    loss_every : int
        The number of steps between two samples of the loss and of skipped steps; `every` is a multiple of it.
        Rules are judged at these steps.
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
    thinning = 30 * every, _factor(every, later)
    if isinstance(loss_every, bool) or not isinstance(loss_every, int) or loss_every < 1 or every % loss_every:
        raise ConfigError(f"loss_every needs a divisor of every={every}, got {loss_every!r}")
    judge = Judge(get_rules(rules), Network(bus.network))
    used = list(
        {(b if isinstance(b, str) else id(b)): b for r in bus.registered for b in r.subscriber.backends}.values()
    )
    options: dict[str, Any] = {"backend": backend if backend is not None else used or ["tb"]}
    handles: list[Handle] = []
    try:
        for rule in judge.rules:
            handles += _register_needs(bus, rule, judge.history.network, every, thinning, sees_loss, options)
        published = {kind for r in bus.registered for kind in r.subscriber.publishes}
        kinds = ["batch_finished", *(("loss",) if sees_loss else ()), *sorted((judge.kinds & published) - set(_OWN))]
        subscriber = RuleSubscriber(kinds, judge, on_finding=on_finding, stop=stop, every=every, **options)
        subscriber.subscription = subscriber.subscription.sampled(subsample=loss_every)
        for kind, statistics in shared_kinds(sorted(judge.kinds - published)).items():
            reader = StatisticsReader(
                kind,
                statistics,
                subscriber,
                subsample=every,
                modules=_few(judge.history.network) if kind in MICRO_KINDS else None,
                **options,
            )
            reader.subscription = reader.subscription.thinned(*thinning)
            reader.serves_rules = True
            handles.append(bus.register_subscriber(reader))
        bus.register_subscriber(subscriber)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return subscriber


def _factor(every: int, later: int | None) -> int:
    """Return how many times fewer steps are sampled later."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every must be an int >= 1, got {every!r}")
    later = 4 * every if later is None else later
    if isinstance(later, bool) or not isinstance(later, int) or later < every or later % every:
        raise ConfigError(f"later needs a multiple of every={every}, got {later!r}")
    return later // every


def _register_needs(
    bus: MessageBus,
    rule: Rule,
    network: Network,
    every: int,
    thinning: tuple[int, int],
    sees_loss: bool,
    options: dict[str, Any],
) -> list[Handle]:
    """Register the subscribers that a rule brings along; one that cannot work with this model is left out."""
    handles = []
    published = {kind for r in bus.registered for kind in r.subscriber.publishes}
    for subscriber in rule.subscribers(network, every):
        if not published.isdisjoint(subscriber.publishes) or (
            _OF_LOSS.intersection(subscriber.kinds) and not sees_loss
        ):
            continue
        subscriber.serves_rules = True
        subscriber.backends = tuple(_as_list(options["backend"]))
        subscriber.subscription = subscriber.subscription.thinned(*thinning)
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
