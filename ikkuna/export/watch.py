"""Observes a model with one call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ikkuna.diagnosis import RecorderOptions
from ikkuna.export.attachment import attachments_of
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.exporter import Exporter
from ikkuna.export.model.own_loss import takes_labels
from ikkuna.export.preset import GROUP, Preset
from ikkuna.export.rules import RuleSelection
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.export.subscriber.subscription import Schedule
from ikkuna.logger import log
from ikkuna.modules import unwrap
from ikkuna.plugins import load_plugin

__all__ = ["watch"]

_BUS = "watch"


def watch(
    model: nn.Module,
    *subscribers: Subscriber,
    loss: nn.Module | Callable[..., Any] | None = None,
    preset: str = "default",
    log_dir: str | Path | None = None,
    rules: RuleSelection | None = "default",
    stop: str | int | None = None,
    recorder: RecorderOptions | bool = True,
    every: int | None = None,
    start: int | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Exporter:
    """Observe a model on a bus of its own, and return the open exporter.

    The model is observed until the exporter is closed or the model is deleted, also if the result is not kept.
    A second call with the same model closes the exporter of the first one, and logs a warning.

    Parameters
    ----------
    model : nn.Module
        The model.
    *subscribers : Subscriber
        The metrics; by default those of the preset.
    loss : nn.Module or callable, optional
        The module or function that computes the loss, see `Exporter.set_loss`.
        By default the loss is the scalar on which ``backward()`` is called, and the accuracy is shown for models
        that take ``labels`` and return a ``loss``, as those of transformers do.
    preset : str
        Name of a preset, from the entry-point group ``ikkuna.presets``.
    log_dir : path, optional
        The directory of the runs; by default ``run``.
    rules : str, Rule, iterable of them, or None
        The rules that name mistakes of the training (see ``exporter.findings``): ``"default"``, ``"all"``, names of rules,
        or `ikkuna.diagnosis.Rule` objects; ``None`` for no rules.
    stop : {'info', 'warning', 'error'} or int, optional
        The least severity of a finding that raises `ikkuna.errors.StopTraining` at the end of the step;
        a number is the step before which metrics are sampled.
    recorder : bool or RecorderOptions
        Whether the last sampled steps are kept, and written when something goes wrong, see `Exporter.record_steps`.
    every, start : int, optional
        The steps that all metrics sample, in place of their own; see `ikkuna.export.subscriber.Subscription`.
    schedule : callable, optional
        A function of the step that returns whether the metrics sample it.
    **options : Any
        Further options of the exporter, such as ``run_name``, ``config`` and ``resume``.

    Examples
    --------
    >>> import ikkuna
    >>> exporter = ikkuna.watch(nn.Sequential(nn.Linear(2, 2)))
    >>> "weight_updates_weights_ratio" in exporter.message_bus.kinds
    True
    >>> exporter.close()
    """
    for other in attachments_of(unwrap(model)) if isinstance(model, nn.Module) else ():
        if other.bus.name == _BUS:
            log.warning("the model is watched already; closed the exporter of the earlier watch()")
            other.close()
    last, severity = (stop, None) if isinstance(stop, int) and not isinstance(stop, bool) else (None, stop)
    given = {"subsample": every, "start": start, "stop": last, "schedule": schedule}
    changes = {name: value for name, value in given.items() if value is not None}
    exporter = Exporter(message_bus=MessageBus(_BUS), log_dir=log_dir, **options)
    try:
        exporter.add_modules(model)
        if loss is not None:
            exporter.set_loss(loss)
        sees_labels = loss is not None or takes_labels(model)
        for subscriber in subscribers or load_plugin(GROUP, preset, Preset)().subscribers(sees_labels):
            if changes and isinstance(subscriber, Subscriber):
                subscriber.subscription = subscriber.subscription.sampled(**changes)
            exporter.message_bus.register_subscriber(subscriber)
        if rules is not None:
            exporter.apply_rules(rules, stop=severity)
        if recorder is not False:
            exporter.record_steps(None if recorder is True else recorder)
    except BaseException:
        exporter.close()
        raise
    return exporter
