"""The result of a replay."""

from dataclasses import dataclass, field

from ikkuna.diagnosis.findings import Finding

__all__ = ["Replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay; ``print()`` shows it.

    Parameters
    ----------
    step : int
        The step of the dump.
    first_step : int
        The step whose state the replay began with.
    expected : tuple of Finding
        The findings in the dump.
    findings : tuple of Finding
        The findings at this step of the replay.
    compared, equal : int
        Number of measured values in the dump's last step, and of those that the replay has measured with equal bits.
    loss : tuple of float
        The loss of the step in the dump and in the replay.
    differences : tuple of str
        The first values that differ.

    Examples
    --------
    >>> print(Replay(12, 12, (), (), 40, 40, (0.5, 0.5)))
    step 12, replayed from step 12
      loss 0.5, in the dump 0.5
      40 of 40 values are equal
      the dump has no finding
    """

    step: int
    first_step: int
    expected: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    compared: int
    equal: int
    loss: tuple[float, float]
    differences: tuple[str, ...] = field(default=())

    @property
    def is_reproduced(self) -> bool:
        """Whether all values are equal, bit for bit, and the findings have the same rules, modules and figures."""
        return not self.missing and self.compared == self.equal and _same(*self.loss)

    @property
    def missing(self) -> tuple[Finding, ...]:
        """The findings in the dump that the replay did not find."""
        return tuple(finding for finding in self.expected if not any(_agree(finding, other) for other in self.findings))

    def __str__(self) -> str:
        lines = [f"step {self.step}, replayed from step {self.first_step}"]
        lines.append(f"  loss {self.loss[1]:.9g}, in the dump {self.loss[0]:.9g}")
        lines.append(f"  {self.equal} of {self.compared} values are equal")
        lines += [f"  different: {text}" for text in self.differences]
        for finding in self.expected:
            state = "missing" if finding in self.missing else "reproduced"
            lines.append(f"  {state}: {finding}")
        lines += [] if self.expected else ["  the dump has no finding"]
        return "\n".join(lines)


def _agree(one: Finding, other: Finding) -> bool:
    return (one.rule, one.module) == (other.rule, other.module) and _same(one.value, other.value)


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one != one and other != other)
