"""Applies rules while a model trains, and provides the statistics that they read."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.backend import Backend, get_backend
from ikkuna.backends.loggers import adapted
from ikkuna.diagnosis import Finding, Findings, Judge, Network, Rule, get_rules
from ikkuna.diagnosis.findings import STYLES, is_muted
from ikkuna.diagnosis.history import GRADIENTS
from ikkuna.diagnosis.judge import LOSS_BETWEEN
from ikkuna.diagnosis.mistakes import ENDED_BY_EXCEPTION, EXPLAINS
from ikkuna.diagnosis.recorded_preflight import RecordedPreflight
from ikkuna.diagnosis.stored_findings import event_text
from ikkuna.diagnosis.stored_judgement import JudgedStep, JudgementBackend
from ikkuna.diagnosis.stored_values import ReadValues
from ikkuna.distributed.rendezvous import World
from ikkuna.errors import ConfigError, ConfigTypeError, StopTraining, is_integer, unknown_name
from ikkuna.metrics.bus.bus import Handle, MessageBus
from ikkuna.metrics.messages.batch import MessageBatch, StepLosses
from ikkuna.metrics.messages.kinds import FACT_KINDS, MICRO_KINDS, OBJECTIVE
from ikkuna.metrics.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.bases import StatisticsReader, shared_kinds
from ikkuna.metrics.subscriber.subscription import Subscription
from ikkuna.store.finding import SEVERITIES
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.support.console import announce
from ikkuna.support.failures import error_text, log, raise_users_exception
from ikkuna.support.modules import NamedParameter
from ikkuna.support.process_hooks import raised_in

OnFinding = Callable[[Finding], object]
_JUDGED = Series("judged")
_LOSS = SeriesGroup("loss", (None,))
_LOSS_BETWEEN = SeriesGroup(LOSS_BETWEEN, (None,))
_GRADIENTS = SeriesGroup(GRADIENTS, (None,))
_OF_OBJECTIVE = SeriesGroup("loss", (OBJECTIVE,))
_SKIPPED = SeriesGroup("step_skipped", (None,))


class RuleSubscriber(Subscriber):
    """Applies rules after each step, and acts on new findings.

    A new finding is logged in one line, shown as a text, and passed to a function.
    A further text, ``findings``, is a table of all findings so far.
    If a backend writes files, findings and the values that rules have read are stored beside them, see `JudgementBackend`.
    Use `register_rules`, which also registers what the rules need.

    Takes ``batch_finished``, the loss and the results of other subscribers; publishes nothing.

    Parameters
    ----------
    kinds : list of str
        The kinds to take.
    judge : Judge
        Applies the rules.
    on_finding : callable, optional
        Called with each new finding on rank 0; its exceptions are logged.
    stop : {'info', 'warning', 'error'}, optional
        The least severity of a finding that raises `StopTraining` at the end of the step.
    facts : Subscription, optional
        The steps at which facts that rarely change are read; by default every tenth.
    loss_every : int
        The number of steps between two values of the series that have one in every step.
        It sets the thresholds of rules apart from what is sampled: a loss between two of them is only judged as a spike.
    mute : frozenset of str
        What is left out, as ``"rule"`` or ``"rule:module"``.
    **options : Any
        See `Subscriber`.

    Attributes
    ----------
    actions : list of callable
        Functions of ikkuna that are called with each new finding, as the flight recorder's.
    preflight : RecordedPreflight, optional
        Finds mistakes in the first call of the loss.
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
        facts: Subscription | None = None,
        loss_every: int = 1,
        mute: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        super().__init__(kinds, tag=None, **options)
        self.judge = judge
        self._on_finding = on_finding
        self._told: dict[tuple[str, str | None], str] = {}
        self._stopping = SEVERITIES[SEVERITIES.index(stop) :] if stop else ()
        self.stops = bool(stop)
        self._facts = facts = facts or Subscription("batch_finished", subsample=10)
        # training stops at the end of the judged step
        self.needs_steps = facts.sampled(subsample=loss_every) if stop else facts
        self._loss_every = loss_every
        self._samples = self.subscription.sampled(subsample=loss_every).samples
        self._asked: tuple[Stamp | None, bool] = None, False
        self._mute = self._muted_first = mute
        self._lacks_network = not judge.history.network.modules
        self.actions: list[OnFinding] = []
        self.preflight: RecordedPreflight | None = None
        self._store = JudgementBackend() if any(map(_writes_files, self.backends)) else None
        self._kept: list[ReadValues] = []  # in the open step
        self._judged: list[JudgedStep] = []  # steps that are not stored yet

    def _reads(self, stamp: Stamp) -> bool:
        """Return whether series with a value in every step are read at a step; at one that is measured itself they are."""
        if self._asked[0] is not stamp:
            extra = () if self._host is None else self._host.sampling.extra
            self._asked = stamp, stamp.global_step in extra or self._samples(stamp)
        return self._asked[1]

    @property
    def findings(self) -> Findings:
        """The findings so far, without muted ones."""
        found = self.judge.findings
        heard = (finding for finding in found if not is_muted(finding, self._mute))
        note = "" if self.preflight is None else self.preflight.note
        return Findings(heard, found.judged, found.skipped, found.needed, note)

    def quantity_of(self, kind: str) -> Quantity:
        """Return no declaration: who publishes a kind declares it."""
        return NEUTRAL

    def receive(self, message: Any, kind: str, value: float) -> None:
        """Add a value to the history of the rules."""
        stamp = message.stamp
        self.judge.add(kind, message.series_name, stamp.global_step, value, stamp.pass_name)
        self._keep_one(kind, message.series_name, stamp.global_step, value, stamp.pass_name)

    def _receive_later(self, kind: str, name: str, step: int, value: float) -> None:
        """Add a value of a parameter group, which is judged with the next value of the training."""
        self.judge.defer(kind, name or None, step, value)
        self._keep_one(kind, name or None, step, value)

    def receive_all(self, batch: MessageBatch, kind: str, values: NDArray[np.float64]) -> None:
        """Add a value of each message of a batch to the history of the rules."""
        stamp = batch.stamp
        self.judge.add_all(kind, batch.names.names, stamp.global_step, values.tolist(), stamp.pass_name)
        self._keep(self._curve_group(batch.names, kind, stamp.pass_name), values, stamp.global_step)

    def _keep_one(self, kind: str, name: str | None, step: int, value: float, pass_name: str = TRAINING) -> None:
        self._keep(self._group(kind, name, pass_name), np.array([value]), step)

    def _group(self, kind: str, name: str | None, pass_name: str = TRAINING) -> SeriesGroup:
        return self._curve_group(self._batch_names(((None, "", name),)), kind, pass_name)

    def _keep(self, group: SeriesGroup, values: NDArray[np.float64], step: int) -> None:
        """Keep values that a rule reads, which are stored at the end of the step, so that they can be judged again."""
        if self._store is not None and group.kind in self.judge.kinds:
            self._kept.append((group, values, step))

    def compute_batch(self, batch: MessageBatch) -> None:
        """Add the values of the messages of one kind to the history of the rules."""
        if batch.kind == "batch_finished":
            self._add_event(batch[0])
            return
        stamp, names = batch.stamp, batch.names.names
        is_read = self._asked[1] if self._asked[0] is stamp else self._reads(stamp)
        if not is_read and (batch.kind != "loss" or names[0] is not None):
            return
        values = batch.data if isinstance(batch.data, np.ndarray) else batch.records.mean
        if not is_read:
            self.judge.defer(LOSS_BETWEEN, None, stamp.global_step, float(values[0]))
            self._keep(_LOSS_BETWEEN, values, stamp.global_step)
        elif len(names) == 1 and stamp.pass_name == TRAINING:  # as the loss, which has a value in every step
            self.judge.defer(batch.kind, names[0], stamp.global_step, float(values[0]))
            self._keep(self._curve_group(batch.names, batch.kind, TRAINING), values, stamp.global_step)
        else:
            self.receive_all(batch, batch.kind, values)

    def compute_losses(self, block: StepLosses) -> None:
        """Add the losses, norms of gradients and learning rates of steps in a row, and judge each of the steps."""
        assert block.first is not None
        first, every, done = block.first.global_step, self._loss_every, 0
        known = [rate for row in {id(row): row for row in block.rates}.values() for rate in row if rate is not None]
        size = len(block.losses) if all(map(math.isfinite, known)) else 1  # else each step is judged at once
        while done < len(block.losses):
            begin, until = first + done, min((i for i in block.gradients if i >= done), default=done + size)
            count = self.judge.defer_losses(begin, block.losses[done : min(done + size, until + 1)], every)
            read = range(begin + -begin % every, begin + count, every)
            if block.objectives:
                objectives = [
                    (step, block.objectives[step - first]) for step in read if step - first in block.objectives
                ]
                self.judge.defer_all("loss", OBJECTIVE, objectives)
            rates = [(step, block.rates[step - first]) for step in read]
            for column, key in enumerate(block.names):
                self.judge.defer_all(
                    "learning_rate",
                    _group_name(key, block.names) or None,
                    [(step, float(row[column])) for step, row in rates if row[column] is not None],
                )
            done += count
            if (norm := block.gradients.get(done - 1)) is not None:
                self.judge.defer(GRADIENTS, None, first + done - 1, norm)
            self._keep_losses(block, done - count, done)
            if self.judge.is_urgent or not (first + done - 1) % every:
                self._end_step(block.stamp(done - 1), is_stored=False)
        self._store_steps(block.last)

    def _keep_losses(self, block: StepLosses, begin: int, end: int) -> None:
        """Keep what is known of some steps of a block, the learning rates of those that rules read, but judge none of them."""
        if self._store is None or block.first is None:
            return
        values, first, known = np.array(block.losses), block.first.global_step, None
        has_rates, kept = "learning_rate" in self.judge.kinds, list[tuple[SeriesGroup, NDArray[np.float64]]]()
        for i in range(begin, end):
            is_read = (step := first + i) % self._loss_every == 0
            self._kept.append((_LOSS if is_read else _LOSS_BETWEEN, values[i : i + 1], step))
            if i in block.gradients:
                self._kept.append((_GRADIENTS, np.array([block.gradients[i]]), step))
            if not is_read:
                continue
            if i in block.objectives:
                self._kept.append((_OF_OBJECTIVE, np.array([block.objectives[i]]), step))
            if has_rates and block.rates[i] is not known:
                known = block.rates[i]
                pairs = zip(block.names, known, strict=True)
                named = [(_group_name(key, block.names), rate) for key, rate in pairs if rate is not None]
                kept = [(self._group("learning_rate", name or None), np.array([float(rate)])) for name, rate in named]
            for group, value in kept:
                self._kept.append((group, value, step))
            self._judged.append((step, self._kept))
            self._kept = []

    def loss_threshold(self) -> float:
        """Return the loss above which a step is measured itself, see `ikkuna.numerics.spike_score`."""
        return cast(float, self.judge.threshold_of("loss"))

    def gradient_threshold(self) -> float | None:
        """Return the norm of the gradients above which a step is measured itself, if a rule reads such norms."""
        return self.judge.threshold_of(GRADIENTS)

    def _add_event(self, message: Message) -> None:
        assert isinstance(message, NetworkMessage)
        if self._lacks_network:
            self.judge.history.network = Network(self.network)
            self._lacks_network = not self.network
        if not self._reads(message.stamp):
            return
        data = message.data or {}
        if data.get("has_scaler"):  # without one, a backward without a step belongs to another optimizer
            skipped = float(message.skipped)
            self.judge.defer("step_skipped", None, message.global_step, skipped)
            self._keep(_SKIPPED, np.array([skipped]), message.global_step)
        if message.skipped:
            return
        is_due = self._facts.is_candidate(message.stamp)
        self._add_groups(
            message.global_step, data.get("learning_rates", {}), data.get("settings", {}) if is_due else {}
        )
        if not is_due:
            return
        if data.get("has_closure"):
            self.receive(message, "optimizer_closure", 1.0)
        for kind, value in data.get("facts", {}).items():
            self.receive(message, kind, float(value))
        if data.get("learning_rates"):  # without rates the user's loop makes the steps
            trainable = [named for named in data.get("unowned", ()) if named.parameter.requires_grad]
            self._add_unowned(message, trainable)

    def _add_groups(self, step: int, rates: dict[str, Any], settings: dict[str, Any]) -> None:
        """Add the rate of each parameter group, and its other settings."""
        for key, rate in rates.items():
            name = _group_name(key, tuple(rates))
            if rate is not None:
                self._receive_later("learning_rate", name, step, float(rate))
            for setting, value in settings.get(key, {}).items():
                self._receive_later(f"optimizer_{setting}", name, step, value)

    def _add_unowned(self, message: NetworkMessage, unowned: Sequence[NamedParameter]) -> None:
        """Add the number of parameters that no optimizer owns, and 1 for each of them."""
        kind = "unowned_parameters"
        self.receive(message, kind, float(len(unowned)))
        for named in unowned:
            name = f"{named.name}.bias" if named.is_bias and not named.path else named.name
            self.receive(ModuleMessage(message.stamp, kind, module=named.module, name=name), kind, 1.0)

    def finish(self, stamp: Stamp) -> None:
        """Judge the step, and act on the new findings.

        Raises
        ------
        StopTraining
            If `stop` asks for it.
        """
        if self._reads(stamp) or self.judge.is_urgent:
            self._end_step(stamp)

    def _end_step(self, stamp: Stamp, is_stored: bool = True) -> None:
        """Judge a step, store it unless that can wait until the end of a block, and act on the new findings."""
        judged = [*self._check_first_step(stamp.global_step), *self.judge.finish_step(stamp.global_step)]
        if (run := getattr(self._host, "run", None)) is not None:
            self._mute = self._muted_first | run.control.mute  # by another process
        if self._kept:
            self._judged.append((stamp.global_step, self._kept))
            self._kept = []
        if is_stored or self.judge.has_changed:
            self._store_steps(stamp)
        found = [each for each in judged if not is_muted(each, self._mute)]
        for finding in found:
            self._act(finding, stamp)
        if found:
            self.show(NetworkMessage(stamp, "findings"), self.findings.as_markdown())
        for finding in found:
            if finding.severity in self._stopping:
                raise StopTraining(finding)

    def process_fails(self, error: BaseException, stamp: Stamp, is_over: bool) -> None:
        """Add and tell the finding that an exception ends the process in the step of a stamp, or after it if that `is_over`."""
        if isinstance(error, StopTraining):
            return
        module, place = raised_in(error, self._host.modules if self._host is not None else ())
        when = "After" if is_over else "In"
        detail = f"{when} this step: {error_text(error)}{place and f' ({place})'}."
        self.add_finding(ENDED_BY_EXCEPTION.found(module=module, detail=detail), stamp)

    def add_finding(self, finding: Finding, stamp: Stamp) -> None:
        """Add a finding that no rule makes and no step ends, store it, and act on it."""
        added = self.judge.add_finding(finding, stamp.global_step)
        if added is not None and not is_muted(added, self._mute):
            self._store_steps(stamp)
            self._act(added, stamp)

    def _check_first_step(self, step: int) -> list[Finding]:
        """Return the findings of the first call of the loss, once."""
        if self.preflight is None:
            return []
        heard = [finding for finding in self.preflight.findings() if not is_muted(finding, self._mute)]
        return [added for finding in heard if (added := self.judge.add_finding(finding, step)) is not None]

    def _store_steps(self, stamp: Stamp) -> None:
        """Store the judged steps, and how they have changed the findings."""
        steps, self._judged = self._judged, []
        if self._store is None or self._host is None:
            return
        events, step = self.judge.events(), stamp.global_step
        if not (events or steps) or (run := self._host.open_run()) is None:
            return
        if steps:
            run.add_all([("add_judged", (steps,), None)], step, (self._store,))
        note = "" if self.preflight is None else self.preflight.note
        for event in events:
            told = {**event, "note": note, "mute": sorted(self._muted_first)} if event["event"] == "judged" else event
            run.show(_JUDGED, event_text(told), step, (self._store,))

    def _act(self, finding: Finding, stamp: Stamp) -> None:
        # before the line is logged, so that the run is named first
        self.show(NetworkMessage(stamp, "findings", path=finding.rule), finding)
        verbosity = getattr(getattr(self._host, "settings", None), "verbosity", 1)
        mark, _, text = str(finding).partition(":")
        advice = f" Try: {finding.advice.rstrip('.')}." if finding.advice else ""
        if self._told.get((finding.rule, finding.module)) == finding.message:  # more severe now
            text, advice = f"{finding.head.partition(':')[2]}: see above.", ""
        self._told[finding.rule, finding.module] = finding.message
        announce(f":{text}{advice}", logging.WARNING, verbosity, mark, STYLES[finding.severity])
        for action in self.actions:
            action(finding)
        if self._on_finding is not None and World.here().rank == 0:
            try:
                self._on_finding(finding)
            except Exception as error:
                raise_users_exception(error)
                self.judge.errors += 1
                log.exception("on_finding failed (training is not affected)")


def _group_name(key: str, keys: tuple[str, ...]) -> str:
    """Return the name of the series of a parameter group; empty for the only one without a name."""
    return "" if keys == ("0",) else f"group {key}" if key.isdigit() else key


def _writes_files(backend: "str | Backend") -> bool:
    """Return whether a backend writes into the directory of the run."""
    return type(get_backend(adapted(backend))).open is not Backend.open


_OWN = ("learning_rate", *FACT_KINDS)

RuleSelection = str | Rule | Iterable[str | Rule]
"""Names of rules and `Rule` objects, see `ikkuna.diagnosis.get_rules`."""


def register_rules(
    bus: MessageBus,
    rules: RuleSelection = "default",
    *,
    every: int = 10,
    later: int | None = None,
    loss_every: int | None = None,
    on_finding: OnFinding | None = None,
    stop: str | None = None,
    backend: str | Backend | list[str | Backend] | None = None,
    mute: Iterable[str] = (),
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
        From step ``300 * every`` on it is twice as many.
        It concerns what no other subscriber measures, and facts of the loop: most mistakes show in the first steps, and these
        statistics are most of the cost.
    loss_every : int, optional
        The number of steps between two values of the loss, the learning rate and skipped steps that rules read; `every` is a multiple
        of it.  Rules are judged at these steps; by default 2, at which their thresholds were measured, if `every` is even, otherwise 1.
        A spike, or a loss that is not finite, is found at the other steps as well,
        except in a distributed run, in which a loss is merged over ranks.
    on_finding : callable, optional
        Called with each new `Finding` on rank 0: once for each rule, however many modules follow.
    stop : {'info', 'warning', 'error'}, optional
        The least severity of a finding that raises `StopTraining` at the end of the step; by default nothing is raised.
    backend : str, Backend or list of these, optional
        Where findings are shown; by default the backends of the registered subscribers, or ``"tb"``.

    mute : iterable of str
        ``"rule"`` does not apply a rule; ``"rule:module"`` leaves out its findings in a module.

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
    chosen, muted = _without_muted(get_rules(rules), mute)
    judge = Judge(chosen, Network(bus.network))
    used = list(
        {(b if isinstance(b, str) else id(b)): b for r in bus.registered for b in r.subscriber.backends}.values()
    )
    options: dict[str, Any] = {"backend": backend if backend is not None else used or ["tb"]}
    handles: list[Handle] = []
    try:
        for rule in judge.rules:
            handles += _register_needs(bus, rule, judge.history.network, (every, later))
        published = {kind for r in bus.registered for kind in r.subscriber.publishes}
        kinds = ["batch_finished", "loss", *sorted((judge.kinds & published) - set(_OWN))]
        facts = _thinned(Subscription("batch_finished", subsample=every), every, later)
        settings: dict[str, Any] = {"on_finding": on_finding, "stop": stop, "facts": facts, "loss_every": loss_every}
        subscriber = RuleSubscriber(kinds, judge, mute=muted, **settings, **options)
        if World.here().size > 1:
            subscriber.subscription = subscriber.subscription.sampled(subsample=loss_every)
        shared = shared_kinds(sorted(judge.kinds - published))
        for kind, statistics in shared.items():
            reader = StatisticsReader(
                kind,
                statistics,
                subscriber.receive_all,
                subsample=every,
                modules=_few(judge.history.network) if kind in MICRO_KINDS else None,
                backend=[],
            )
            reader.subscription = _thinned(reader.subscription, every, later)
            handles.append(bus.register_subscriber(reader))
        judge.measured = frozenset((*kinds, *_OWN, *(f"{kind}_{end}" for kind, ends in shared.items() for end in ends)))
        bus.register_subscriber(subscriber)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    _warn_of_unmeasured(judge, rules)
    return subscriber


def _warn_of_unmeasured(judge: Judge, rules: RuleSelection) -> None:
    """Log which of the rules that the user has named, or passed as objects, read what nothing measures."""
    named = {getattr(each, "name", each) for each in (rules if isinstance(rules, list | tuple) else [rules])}
    for name, missing in judge.findings.needed.items():
        if name in named:
            log.warning("the rule %r cannot judge, because this is not measured: %s", name, missing)


def _without_muted(rules: Iterable[Rule], mute: Iterable[str]) -> tuple[list[Rule], frozenset[str]]:
    """Return the rules that are not muted, and all that is."""
    if isinstance(mute, str):
        raise ConfigTypeError(f"mute needs a list of names of rules, got {mute!r}; pass [{mute!r}]")
    rules, muted = list(rules), frozenset(mute)
    known = dict.fromkeys((*(rule.name for rule in rules), *EXPLAINS))
    for name in muted:
        if (rule := name.partition(":")[0]) not in known:
            raise ConfigError(unknown_name("rule in mute", rule, known))
    return [rule for rule in rules if rule.name not in muted], muted


def _checked_later(every: int, later: int | None) -> int:
    """Return the number of steps between two samples from step ``30 * every`` on; from step ``300 * every`` on it doubles."""
    if not is_integer(every, 1):
        raise ConfigError(f"every must be an int >= 1, got {every!r}")
    later = 4 * every if later is None else later
    if not is_integer(later, every) or later % every:
        raise ConfigError(f"later needs a multiple of every={every}, got {later!r}")
    return later


def _checked_loss_every(every: int, loss_every: int | None) -> int:
    """Return the number of steps between two samples of the loss."""
    if loss_every is None:
        return 1 if every % 2 else 2
    if not is_integer(loss_every, 1) or every % loss_every:
        raise ConfigError(f"loss_every needs a divisor of every={every}, got {loss_every!r}")
    return loss_every


def _thinned(subscription: Subscription, every: int, later: int) -> Subscription:
    """Return a subscription whose samples are at most `later` steps apart from step ``30 * every`` on, later twice as many.

    A rule that needs several samples in a row is late by a multiple of this distance,
    so what is sampled more rarely than `every` from the beginning is thinned less.
    """
    factors = [max(times * later // subscription.subsample, 1) for times in (1, 2)]
    return subscription.thinned((30 * every, factors[0]), (300 * every, factors[1]))


def _register_needs(
    bus: MessageBus,
    rule: Rule,
    network: Network,
    distances: tuple[int, int],
) -> list[Handle]:
    """Register the subscribers that a rule brings along; one that cannot work with this model is left out."""
    handles = []
    published = {kind for r in bus.registered for kind in r.subscriber.publishes}
    for subscriber in rule.subscribers(network, distances[0]):
        if not published.isdisjoint(subscriber.publishes):
            continue
        subscriber.backends = ()  # what only rules read is stored where they are applied
        subscriber.subscription = _thinned(subscriber.subscription, *distances)
        try:
            handles.append(bus.register_subscriber(subscriber))
        except ConfigError as error:
            log.warning("the rule %s lacks %s: %s", rule.name, ", ".join(subscriber.publishes), error)
    return handles


def _few(network: Network) -> list[str] | None:
    """Return the modules with the smallest weight matrices: the gradients of a few show whether they are carried over.

    They are up to four, with at most 5% of all parameters or 65,536 elements, whichever is more, unless it is a single one.
    """
    entries = [entry for entry in network.modules if any(len(shape or ()) > 1 for _, shape in entry.parameters)]
    entries.sort(key=lambda entry: entry.count)
    limit, found, total = 0.05 * sum(entry.count for entry in network.modules), list[str](), 0
    for entry in entries[:4]:
        total += entry.count
        if found and total > max(limit, 65_536):
            break
        found.append(entry.name)
    return found or None
