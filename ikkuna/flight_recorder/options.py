"""The settings of a flight recorder, and the memory that it may use."""

import signal
from dataclasses import dataclass, fields

from ikkuna.errors import ConfigError, is_integer, unknown_name
from ikkuna.store.finding import SEVERITIES
from ikkuna.support.files import available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOptions:
    """The settings of a flight recorder.

    Parameters
    ----------
    length : int
        Number of sampled steps that are kept.
    burst : int
        Number of steps after a dump in which all statistics and histograms of all modules are measured; 0 for none.
    severity : {'info', 'warning', 'error'}
        The least severity of a finding that writes a dump.
    every : int
        Number of steps between two samples of the rules in a replay.
    record_batches : bool, optional
        Whether to keep what the model and the loss were called with in the last two steps.  By default tensors in host memory are kept,
        by reference, and those on devices are not.  ``True`` copies those on devices into pinned host memory: the time of one transfer of
        the batch, and a wait for the device when a dump is written.  With ``False`` no dump contains rows of the data, or their ids.
    state_every : int
        Copy the parameters, the buffers and the state of the optimizers before every step whose number is divisible by it,
        and keep all batches since, also those on devices.  A dump can then be replayed.  0 for never.
    signals : tuple of str
        Names of signals that write a dump, such as ``"SIGUSR1"`` and ``"SIGTERM"``.
    cool_down : int
        Number of steps after an automatic dump in which no other one is written, except one because of NaN or Inf; dumps of findings
        and those of jumps of the loss are counted separately.
    max_dumps : int
        Number of dumps of a run, and one more at the end of the process; those of ``exporter.dump()`` and those that cannot be written
        do not count.
    max_bytes : int
        The size of a dump; what does not fit is left out: batches first, then the state, then histograms and rows.
        ``dump.json`` is always written; it has about 2 kB then.
    max_memory : int
        The memory that the recorder uses in the training process.  A burst measures fewer histograms, and states and batches
        are not copied, if they do not fit, or if they need more than half of the memory that the machine or the container has left.

    Raises
    ------
    ConfigError
        If a value is out of range.

    Examples
    --------
    >>> RecorderOptions(length=50).length
    50
    >>> RecorderOptions(burst=-1)
    Traceback (most recent call last):
    ikkuna.errors.ConfigError: burst must be an int >= 0, got -1
    """

    length: int = 20
    burst: int = 10
    severity: str = "warning"
    every: int = 10
    record_batches: bool | None = None
    state_every: int = 0
    signals: tuple[str, ...] = ()
    cool_down: int = 200
    max_dumps: int = 5
    max_bytes: int = 1 << 28
    max_memory: int = 1 << 30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("burst", "state_every", "cool_down", "max_dumps") else 1
            if field.type is int and not is_integer(value, least):
                raise ConfigError(f"{field.name} must be an int >= {least}, got {value!r}")
        if self.record_batches not in (None, True, False):
            raise ConfigError(f"record_batches must be True, False or None, got {self.record_batches!r}")
        if self.record_batches is False and self.state_every:
            raise ConfigError("a replay needs batches: record_batches=False needs state_every=0")
        if self.severity not in SEVERITIES:
            raise ConfigError(unknown_name("severity", self.severity, SEVERITIES))
        given: object = self.signals
        if isinstance(given, str):
            raise ConfigError(f"signals must be a tuple of names, got the string {given!r}")
        known = [each.name for each in signal.Signals]
        for name in self.signals:
            if name not in known:
                raise ConfigError(unknown_name("signal", str(name), known))
        object.__setattr__(self, "signals", tuple(self.signals))


class MemoryBudget:
    """Divides a number of bytes among the parts of the recorder, and asks the system before it is used.

    Parameters
    ----------
    total : int
        The largest number of bytes.

    Attributes
    ----------
    ring : int
        For the rows of the last steps.  A dump that waits for the disk holds a copy of them; there are at most four.
    steps : int
        For the batches of the steps that can run again.
    state : int
        For one copy of the state of the training; there are at most three at a time.
    histograms : int
        For the histograms that are counted in one step of a burst.
    burst : int
        For what is kept of a burst.

    Examples
    --------
    >>> MemoryBudget(1 << 30).ring
    33554432
    """

    def __init__(self, total: int) -> None:
        self.ring = self.burst = total // 32
        self.histograms, self.steps, self.state = total // 16, total // 10, total // 6

    @staticmethod
    def has_room(size: int) -> bool:
        """Return whether `size` bytes are at most half of what the system has left."""
        return size <= available_bytes() // 2
