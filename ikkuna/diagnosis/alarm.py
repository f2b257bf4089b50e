"""Turns the scores of one rule into findings: patience and hysteresis."""

from collections.abc import Iterable

from ikkuna.diagnosis.rule import Rule, Score

__all__ = ["Alarm", "Raised"]


class _Place:
    """The state of one module."""

    __slots__ = ("active", "bad", "good", "since")

    def __init__(self) -> None:
        self.active = False
        self.bad = self.good = 0
        self.since = 0


class Raised:
    """A score that has been bad for long enough.

    Parameters
    ----------
    score : Score
        The latest score.
    since : int
        The step of the first bad score in a row.
    """

    __slots__ = ("score", "since")

    def __init__(self, score: Score, since: int) -> None:
        self.score = score
        self.since = since


class Alarm:
    """Counts the bad scores in a row of each module.

    Parameters
    ----------
    rule : Rule
        The rule, with its patience and release.

    Attributes
    ----------
    judged : int
        Number of judgements with a score.

    Examples
    --------
    >>> from ikkuna.diagnosis.rule import Rule
    >>> class AnyRule(Rule):
    ...     name, needs, patience = "any", {"loss": ""}, 2
    ...     def scores(self, history): ...
    >>> alarm = Alarm(AnyRule())
    >>> [len(alarm.update(step, [Score(value, value)])) for step, value in enumerate([2.0, 2.0, 2.0, 0.9, 2.0, 0.1, 0.1, 2.0, 2.0])]
    [0, 1, 0, 0, 0, 0, 0, 0, 1]
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.clear()

    def clear(self) -> None:
        """Forget every module."""
        self._places: dict[str | None, _Place] = {}
        self.judged = 0

    def update(self, step: int, scores: Iterable[Score]) -> list[Raised]:
        """Return the modules whose scores have just been bad for long enough."""
        raised, is_judged = [], False
        for score in scores:
            place = self._places.get(score.module)
            if place is None:
                place = self._places[score.module] = _Place()
            if self._is_raised(place, step if score.step is None else score.step, score.value):
                raised.append(Raised(score, place.since))
            is_judged = True
        self.judged += is_judged
        return raised

    def _is_raised(self, place: _Place, step: int, value: float) -> bool:
        patience = self._rule.patience
        if value >= 1:
            if not place.bad:
                place.since = step
            place.bad += 1
            place.good = 0
        else:
            place.bad = 0
            place.good = place.good + 1 if not value >= self._rule.release else 0
        if place.active:
            place.active = place.good < patience
            return False
        place.active = place.bad >= patience
        return place.active
