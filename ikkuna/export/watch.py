"""Observes a model with one call."""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ikkuna.backends.backend import Backend
from ikkuna.errors import ConfigError, ConfigTypeError, is_integer, nearest_name
from ikkuna.export.attachment import attachments_of
from ikkuna.export.exporter import Exporter
from ikkuna.export.handle import WatchHandle
from ikkuna.flight_recorder.options import RecorderOptions
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.live_rules import OnFinding, RuleSelection
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.bases import GROUP, Preset
from ikkuna.metrics.subscriber.subscription import ModulePattern, Schedule, Subscription
from ikkuna.support.failures import log
from ikkuna.support.modules import NamedModule, unwrap
from ikkuna.support.plugins import load_plugin

_BUS = "watch"
_DEFAULT = "default"


def watch(
    model: nn.Module,
    *arguments: Subscriber | nn.Module | Callable[..., Any] | Optimizer,
    loss: nn.Module | Callable[..., Any] | None = None,
    preset: str | None = None,
    every: int | None = None,
    modules: ModulePattern = None,
    depth: int = -1,
    backend: str | Backend | Sequence[str | Backend] | None = None,
    log_dir: str | Path | None = None,
    run_name: str | None = None,
    rules: RuleSelection | bool | None = "default",
    stop: str | int | None = None,
    on_finding: OnFinding | None = None,
    mute: Sequence[str] = (),
    preflight: str | bool = "auto",
    recorder: RecorderOptions | bool = True,
    start: int | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> WatchHandle:
    """Observe a model on a bus of its own, and return a handle.

    The model is observed until the handle is closed or the model is deleted, also if the result is not kept.
    A second call with the same model closes the handle of the first one, and logs a warning.
    When the first value is stored, one line names the model, the number of modules and metrics, the directory of the run, and
    the command that shows it: it is written by the logger ``"ikkuna"``, or to the standard error if logging is not configured.

    Parameters
    ----------
    model : nn.Module
        The model.
    *arguments : Subscriber, nn.Module, callable or Optimizer
        Subscribers are the metrics; by default those of the preset.  A module or function is the `loss`.
        An optimizer is not needed, because it is recognised when it steps.
    loss : nn.Module or callable, optional
        The module or function that computes the loss, see `Exporter.set_loss`; ``criterion=`` means the same.
        By default the loss is the scalar on which ``backward()`` is called, and the labels are those that models
        of transformers take, or that the losses of ``torch.nn.functional`` were called with.
    preset : str, optional
        Name of a preset, from the entry-point group ``ikkuna.presets``, such as ``"economy"``, ``"default"`` or ``"full"``.
        By default ``"default"`` if no subscribers are given; together with subscribers, both are registered.
        ``log="gradients"``, ``"parameters"`` and ``"all"``, as other libraries call them, are part of every preset.
    every, start : int, optional
        The steps that all metrics sample, in place of their own; see `ikkuna.export.subscriber.Subscription`.
        The metrics of the presets sample every tenth step by default.  ``log_freq=`` and ``subsample=`` mean the same.
    modules : str, Pattern, callable, sequence of them, optional
        The modules to observe: a glob such as ``"features.*"``, a compiled regex, a function of the name, or a list.
    depth : int
        The depth of the modules to observe, see `Exporter`.
    backend : str, Backend or sequence of these, optional
        Where all metrics show their values, in place of their own backends, which are ``"tb"`` by default.
    log_dir : path, optional
        The directory of the runs; by default ``run``.
    run_name : str, optional
        The name of the run's directory, see `Exporter`.
    rules : str, Rule, iterable of them, bool, or None
        The rules that name mistakes of the training (see ``findings``): ``"default"``, ``"all"``, names of rules,
        or `ikkuna.diagnosis.Rule` objects; ``None`` or ``False`` for no rules.
    stop : {'info', 'warning', 'error'} or int, optional
        The least severity of a finding that raises `ikkuna.errors.StopTraining` at the end of the step;
        a number is the step before which metrics are sampled.
    on_finding : callable, optional
        Called with each new `ikkuna.diagnosis.Finding`, once for each rule, on the training thread of rank 0;
        its exceptions are logged.
    mute : sequence of str
        ``"rule"`` does not apply a rule, and ``"rule:module"`` leaves out its findings in a module.
    preflight : {'auto', False}
        Whether the loss is checked at the end of the first step, if training begins at step 0 in one process on the host: a copy of the
        loss is called with copies of the outputs and labels, for at most about 0.5 s, and the model is not called.
        Without `loss`, a loss of torch such as ``F.cross_entropy`` is known if ``backward()`` is called on it or on a multiple.
        Its findings are those of rules; the note of ``findings`` says what was not checked.  Without rules nothing is checked.
    recorder : bool or RecorderOptions
        Whether the last sampled steps are kept, and written when something goes wrong, see `Exporter.record_steps`.
    schedule : callable, optional
        A function of the step that returns whether the metrics sample it, in place of their own `every`;
        with `every`, only steps that both sample are.
    **options : Any
        Further options of the exporter: ``config``, ``resume``, ``verbosity``, ``on_error``, ``kernels`` and ``compiled``.

    Raises
    ------
    ConfigTypeError
        If `model` is no module.
    ConfigError
        If it is a scripted module, if its parameters are on the device ``meta``, if an argument is invalid,
        or if there is no option of a name; the message names the nearest one.
    PluginError
        If there is no preset of this name.

    Examples
    --------
    >>> import ikkuna
    >>> watched = ikkuna.watch(nn.Sequential(nn.Linear(2, 2)))
    >>> "weight_updates_weights_ratio" in watched.message_bus.kinds
    True
    >>> watched.close()
    """
    _check_model(model)
    if preflight not in ("auto", False):
        raise ConfigError(
            f"watch() needs preflight='auto' or False, got {preflight!r}; ikkuna.preflight() checks before training"
        )
    subscribers, losses = _sorted_arguments(arguments)
    options, meant = _understood(options, {"loss": loss, "every": every})
    loss, every = _one("loss", meant["loss"], *losses), meant["every"]
    if every is not None and not is_integer(every, 1):
        raise ConfigError(f"watch() needs every to be an int >= 1, got {every!r}")
    last, severity = (stop, None) if isinstance(stop, int) and not isinstance(stop, bool) else (None, stop)
    distance = 1 if every is None and schedule is not None else every
    given = {"subsample": distance, "start": start, "stop": last, "schedule": schedule}
    changes = {name: value for name, value in given.items() if value is not None}
    chosen = _DEFAULT if preset is None and not subscribers else preset
    source = None if chosen is None else load_plugin(GROUP, chosen, Preset)()
    selected = None if modules is None else _module_filter(modules)
    _close_earlier(model)
    handle = WatchHandle(depth, selected, message_bus=MessageBus(_BUS), log_dir=log_dir, run_name=run_name, **options)
    try:
        handle.add_modules(model)
        if loss is not None:
            handle.set_loss(loss)
        metrics = [*_subscribers_of(source, handle), *subscribers]
        with handle.message_bus.registering():
            for subscriber in metrics:
                if isinstance(subscriber, Subscriber):
                    _change(subscriber, changes, backend)
                handle.message_bus.register_subscriber(subscriber)
            if rules is not None and rules is not False:
                chosen_rules = "default" if rules is True else rules
                handle.apply_rules(
                    chosen_rules,
                    stop=severity,
                    on_finding=on_finding,
                    mute=mute,
                    preflight=preflight == "auto",
                    **({} if source is None else source.rules),
                )
            if recorder is not False:
                handle.record_steps(None if recorder is True else recorder)
        handle.begin(len(metrics), chosen, every)
    except BaseException:
        handle._attachment.close(is_given_up=True)
        raise
    return handle


_SPELLINGS = {
    "criterion": "loss",
    "loss_fn": "loss",
    "loss_function": "loss",
    "log_freq": "every",
    "subsample": "every",
}
_NEAREST = {
    "logdir": "log_dir", "dir": "log_dir", "directory": "log_dir", "name": "run_name",
    "project": "log_dir", "freq": "every", "interval": "every", "metrics": "preset", "layers": "modules",
    "callback": "on_finding", "verbose": "verbosity", "hparams": "config",
}  # fmt: skip
_MEASURED = ("gradients", "parameters", "all", None)


def _sorted_arguments(arguments: Iterable[Any]) -> tuple[list[Subscriber], list[Any]]:
    """Return the subscribers and the losses among positional arguments."""
    subscribers, losses = list[Subscriber](), list[Any]()
    for argument in arguments:
        if isinstance(argument, Subscriber):
            subscribers.append(argument)
        elif isinstance(argument, type) and issubclass(argument, Subscriber):
            name = argument.__name__
            raise ConfigTypeError(f"watch() needs a subscriber, got the class {name}; create one, as in {name}(...)")
        elif isinstance(argument, nn.Module) or (callable(argument) and not isinstance(argument, type)):
            losses.append(argument)
        elif not isinstance(argument, Optimizer):
            text = f"got {type(argument).__name__} {argument!r}"
            raise ConfigTypeError(f"watch() needs subscribers, a loss or an optimizer after the model, {text}")
    return subscribers, losses


def _one(name: str, *values: Any) -> Any:
    given = [value for value in values if value is not None]
    if len(given) > 1:
        raise ConfigError(f"watch() needs one {name}, got {len(given)}: {', '.join(map(repr, given))}")
    return given[0] if given else None


def _understood(options: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the exporter, and those of `given` with what the names of other libraries mean."""
    own = {name for name, each in signature(watch).parameters.items() if each.kind is each.KEYWORD_ONLY}
    known = own | (signature(Exporter).parameters.keys() - {"depth", "module_filter", "message_bus"})
    rest, meant = {}, dict(given)
    for name, value in options.items():
        if name in _SPELLINGS:
            meant[_SPELLINGS[name]] = _one(_SPELLINGS[name], meant[_SPELLINGS[name]], value)
        elif name == "log" and value not in _MEASURED:
            raise ConfigError(f"watch(log=) needs 'gradients', 'parameters' or 'all', got {value!r}; see preset=")
        elif name in known:
            rest[name] = value
        elif name not in ("log", "optimizer"):
            near = _NEAREST.get(name) or nearest_name(name, [*known, *_SPELLINGS])
            hint = f" did you mean {near!r}?" if near else ""
            raise ConfigTypeError(f"watch() has no option {name!r};{hint} options: {', '.join(sorted(known))}")
    return rest, meant


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"watch() needs a torch.nn.Module, got {type(model).__name__}")
    parameters = list(model.parameters())
    if parameters and all(parameter.is_meta for parameter in parameters):
        raise ConfigError(
            "watch() needs a model with values, but its parameters are on the device 'meta'; "
            "call model.to_empty(device=...) and initialise or load the parameters before"
        )


def _close_earlier(model: nn.Module) -> None:
    for other in attachments_of(unwrap(model)):
        if other.bus.name == _BUS:
            log.warning("the model is watched already; closed the exporter of the earlier watch()")
            other.close(is_given_up=True)


def _subscribers_of(preset: Preset | None, handle: WatchHandle) -> list[Subscriber]:
    if preset is None:
        return []
    preset.network = handle.message_bus.network
    return preset.subscribers(sees_loss=True)


def _module_filter(modules: ModulePattern) -> Callable[[NamedModule], bool]:
    matches = Subscription("weights", modules=modules).matches
    return lambda named: matches(named.name)


def _change(subscriber: Subscriber, changes: dict[str, Any], backend: Any) -> None:
    """Replace the steps and the backends of a metric."""
    if changes:
        subscriber.subscription = subscriber.subscription.sampled(**changes)
    if backend is not None:
        subscriber.show_with(backend)
