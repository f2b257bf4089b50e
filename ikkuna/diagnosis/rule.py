"""The base class of rules, and how rules are found by their names."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

from ikkuna.diagnosis.history import History, Network
from ikkuna.diagnosis.mistakes import Mistake
from ikkuna.errors import ConfigError, ConfigTypeError, PluginError, is_integer, unknown_name
from ikkuna.store.finding import SEVERITIES
from ikkuna.support.failures import log
from ikkuna.support.plugins import load_plugin, plugin_names

GROUP = "ikkuna.rules"

_COMMON = ("patience", "release", "severity")


class Score(NamedTuple):
    """How bad a series is at the present step.

    Parameters
    ----------
    value : float
        The figure over its threshold: 1 or more is bad; NaN is not.
    figure : float
        The figure, as the finding shows it.
    module : str, optional
        The name of the series; ``None`` for the network.
    kind : str, optional
        The kind of the series that shows the mistake; by default the first kind that the rule needs.
    step : int, optional
        The step at which the mistake begins; by default the present step.
    detail : str
        Further sentences of the finding, if the values say more than the mistake.
    advice : str
        What to try, if the values show which of several causes the mistake has; by default the advice of the rule.
    at_most : {'info', 'warning', 'error'}
        The highest severity that the values justify.
    """

    value: float
    figure: float
    module: str | None = None
    kind: str | None = None
    step: int | None = None
    detail: str = ""
    advice: str = ""
    at_most: str = "error"


class Rule(ABC):
    """Judges the series of a run, one step after another.

    The same instance works while a model trains and on a finished run.
    A score of at least 1 for `patience` judgements in a row is a finding.
    The mistake is over when the score has been below `release` for `patience` judgements in a row.
    A rule stores what it must remember in ``history.memory[self.name]``.
    It does not change anything else.
    If a mistake has other evidences as well, the class takes its name, severities, texts and consequences from the declared
    `Mistake`: ``class MyRule(Rule, mistake=DEAD_UNITS)``.

    Parameters
    ----------
    **settings : Any
        Other values of `patience`, `release`, `severity`, and of the attributes in `thresholds`.

    Raises
    ------
    ConfigError
        If a setting is unknown or out of range.

    Attributes
    ----------
    name : str
        The name of the rule.
    version : int
        Changes with the meaning of the rule or its thresholds; stored with each finding.
    needs : mapping of str to str
        The kinds that the rule needs, and the subscriber that publishes each.
    uses : mapping of str to str
        Further kinds that the rule reads if they are published.
    judged_on : frozenset of str
        The kinds whose new values make the rule judge; by default all of `needs` and `uses`.
    stride : int
        The least number of steps between two judgements.
        A rule about the loss, which has a value in every step, judges every tenth step and reads the values since its last judgement.
    thresholds : tuple of str
        The names of attributes that are thresholds: positive numbers that the constructor accepts.
    severity : {'info', 'warning', 'error'}
        The severity of its findings.
    severity_while_falling : {'info', 'warning', 'error'}
        The highest severity of its findings while the loss falls or is not yet known to fall or not:
        ``info`` for a threshold, ``warning`` for an exact fact, ``error`` for what cannot be right whatever the loss does.
    patience : int
        The number of judgements in a row with a score of at least 1 that make a finding.
    release : float
        The score, in (0, 1], below which a judgement counts as good again.
    origin : {'first', 'last', 'worst'}
        The module that a finding names if several have a bad score: the first or last in the network, or that with the largest score.
    explains : frozenset of str
        The rules whose findings are consequences of this one.
    meaning : str
        What a finding means, in a sentence; ``{figure}`` and ``{module}`` are replaced.
    advice : str
        What to try.
    is_default : bool
        Whether the rule is among those that ``rules="default"`` selects.

    Examples
    --------
    >>> class LossAboveRule(Rule):
    ...     '''The loss is above a limit.'''
    ...     name, needs, thresholds, limit = "loss_above", {"loss": "LossSubscriber()"}, ("limit",), 10.0
    ...     meaning = "The loss is {figure:.3g}."
    ...     def scores(self, history):
    ...         for _, curve in history.fresh("loss"):
    ...             yield Score(curve.last / self.limit, curve.last)
    >>> LossAboveRule(limit=-1)
    Traceback (most recent call last):
    ikkuna.errors.ConfigError: LossAboveRule needs a finite limit > 0, got -1
    """

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1
    needs: ClassVar[Mapping[str, str]] = {}
    uses: ClassVar[Mapping[str, str]] = {}
    judged_on: ClassVar[frozenset[str]] = frozenset()
    stride: ClassVar[int] = 1
    thresholds: ClassVar[tuple[str, ...]] = ()
    origin: ClassVar[str] = "first"
    explains: ClassVar[frozenset[str]] = frozenset()
    meaning: ClassVar[str] = ""
    advice: ClassVar[str] = ""
    is_default: ClassVar[bool] = True
    severity_while_falling: ClassVar[str] = "error"
    severity: str = "warning"
    patience: int = 3
    release: float = 0.8

    def __init_subclass__(cls, mistake: Mistake | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        for each in fields(mistake) if mistake is not None else ():
            setattr(cls, each.name, getattr(mistake, each.name))

    def __init__(self, **settings: Any) -> None:
        for name, value in settings.items():
            if name not in (known := (*_COMMON, *self.thresholds)):
                raise ConfigError(f"{type(self).__name__}: {unknown_name('setting', name, known)}")
            setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise `ConfigError` if a setting or an attribute of the class is invalid."""
        owner = type(self).__name__
        if not self.name.isidentifier() or not self.needs:
            raise ConfigError(f"{owner} needs a name that is an identifier and at least one kind in `needs`")
        if unread := self.judged_on.difference(self.needs, self.uses):
            raise ConfigError(f"{owner} is judged on {sorted(unread)}, which is in neither `needs` nor `uses`")
        for name in ("stride", "version", "patience"):
            value = getattr(self, name)
            if not is_integer(value, 1):
                raise ConfigError(f"{owner} needs {name} >= 1, got {value!r}")
        if unknown := {self.severity, self.severity_while_falling}.difference(SEVERITIES):
            raise ConfigError(f"{owner}: {unknown_name('severity', min(unknown), SEVERITIES)}")
        for name in ("release", *self.thresholds):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{owner} needs a finite {name} > 0, got {value!r}")
        if self.release > 1:
            raise ConfigError(f"{owner} needs release <= 1, got {self.release!r}")
        if self.origin not in (known := ("first", "last", "worst")):
            raise ConfigError(f"{owner}: {unknown_name('origin', self.origin, known)}")

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return new subscribers that publish kinds in `needs` and `uses`.

        They are registered while a model trains, unless another subscriber publishes these kinds.
        Statistics that all subscribers share, such as ``weights_norm2``, need none.

        Parameters
        ----------
        network : Network
            The modules of the network.
        every : int
            The number of steps between two samples.
        """
        return ()

    @abstractmethod
    def scores(self, history: History) -> Iterable[Score]:
        """Yield a score for each series or for the network, in the order of the network.

        Called at each step at which a kind in `judged_on` has a new value, if the last call is at least `stride` steps ago.
        A value that is NaN or infinite, and a value of another pass, causes a call at once, whatever its kind.
        """

    def healthy(self, score: Score) -> tuple[float, float] | None:
        """Return the healthy range of a score's figure; ``None`` if the score compares it with something else than a threshold.

        A score is the ratio of its figure to one of the `thresholds` of the rule, or the inverse ratio if small figures are bad.

        Examples
        --------
        >>> class ShareRule(Rule):
        ...     name, needs, thresholds, share = "share", {"loss": ""}, ("share",), 0.5
        ...     def scores(self, history): ...
        >>> ShareRule().healthy(Score(2.0, 1.0)), ShareRule().healthy(Score(5.0, 0.1)), ShareRule().healthy(Score(1.0, 0.3))
        ((-inf, 0.5), (0.5, inf), None)
        """
        for threshold in (float(getattr(self, name)) for name in self.thresholds):
            if math.isclose(score.value * threshold, score.figure, rel_tol=1e-6):
                return -math.inf, threshold
            least = threshold / score.value if score.value else math.inf
            if math.isclose(least, score.figure, rel_tol=1e-6) or 0 <= score.figure < least <= 1e-6:
                return threshold, math.inf
        return None

    def describe(self, score: Score) -> str:
        """Return what a finding means, in a sentence."""
        return self.meaning.format(figure=score.figure, module=score.module)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def get_rules(rules: "str | Rule | Iterable[str | Rule]" = "default") -> tuple[Rule, ...]:
    """Return rules by their entry-point names.

    Parameters
    ----------
    rules : str, Rule, or iterable of them
        ``"default"`` for every installed rule with `is_default`, ``"all"`` for every installed rule;
        or names of rules and `Rule` objects.  A list can contain ``"default"`` and further rules, which replace those of the same name.

    Raises
    ------
    ConfigTypeError
        If an item is neither a name nor a `Rule`.
    PluginError
        If no rule of this name is installed, or if it cannot be imported.
    ConfigError
        If a rule is invalid.

    Examples
    --------
    >>> get_rules("loss_spike")
    (LossSpikeRule(),)
    """
    items = [rules] if isinstance(rules, str | Rule) else list(rules)
    found: dict[str, Rule] = {}
    for item in items:
        if not isinstance(item, str | Rule):
            raise ConfigTypeError(f"rules needs names and Rule objects, got {type(item).__name__} {item!r}")
        for rule in [item] if isinstance(item, Rule) else _by_name(item):
            found[rule.name] = rule
    return tuple(found.values())


def _by_name(name: str) -> list[Rule]:
    if name not in ("default", "all"):
        return [load_plugin(GROUP, name, Rule)()]
    made = (_load(each) for each in sorted(plugin_names(GROUP)))
    return [rule for rule in made if rule is not None and (rule.is_default or name == "all")]


def _load(name: str) -> Rule | None:
    """Return an installed rule; one that is broken is logged and left out, so that it does not prevent all others."""
    try:
        rule: Rule = load_plugin(GROUP, name, Rule)()
    except PluginError as error:
        log.warning("a rule is left out: %s", error)
        return None
    return rule
