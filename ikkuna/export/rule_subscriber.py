"""Applies rules while a model trains."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.diagnosis import Finding, Findings, Judge, Network
from ikkuna.diagnosis.finding import SEVERITIES
from ikkuna.errors import StopTraining
from ikkuna.export.messages.batch import MessageBatch
from ikkuna.export.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.export.messages.stamp import TRAINING, Stamp
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.logger import log
from ikkuna.modules import NamedParameter
from ikkuna.signal_handlers import raise_users_exception

__all__ = ["OnFinding", "RuleSubscriber"]

OnFinding = Callable[[Finding], object]


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
        self._lacks_network = not judge.history.network.modules
        self.actions: list[OnFinding] = []

    @property
    def findings(self) -> Findings:
        """The findings so far."""
        return self.judge.findings

    def is_internal(self, kind: str) -> bool:
        """Return whether only rules need the values of a kind."""
        return kind in ("optimizer_closure", "unowned_parameters")

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
        if len(batch) == 1 and batch.stamp.pass_name == TRAINING:  # the loss, which has a value in every step
            [value] = (batch.records.mean if batch.data is None else batch.data).tolist()
            self.judge.defer(batch.kind, batch.names.names[0], batch.stamp.global_step, value)
            return
        self.receive_all(batch, batch.kind, batch.records.mean if batch.data is None else batch.data)

    def _add_event(self, message: Message) -> None:
        assert isinstance(message, NetworkMessage)
        if self._lacks_network:
            self.judge.history.network = Network(self.network)
            self._lacks_network = not self.network
        self.judge.defer("step_skipped", None, message.global_step, float(message.skipped))
        if message.skipped or message.global_step % self._every:
            return
        data = message.data or {}
        rates = data.get("learning_rates", {})
        self._add_rates(message, rates)
        if data.get("has_closure"):
            self._add_and_show(message, "optimizer_closure", 1.0)
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
        self._show(
            NetworkMessage(stamp, "findings", path=finding.rule), finding, "findings"
        )  # names the run in the log
        log.warning("%s", finding)
        for action in self.actions:
            action(finding)
        if self._on_finding is not None:
            try:
                self._on_finding(finding)
            except Exception as error:
                raise_users_exception(error)
                log.exception("on_finding failed (training is not affected)")
