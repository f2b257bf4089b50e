"""The settings of a flight recorder."""

import signal
from dataclasses import dataclass, fields

from ikkuna.errors import ConfigError, unknown_name
from ikkuna.store.finding import SEVERITIES

__all__ = ["RecorderOptions"]


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
        Number of steps between two hashes of the inputs.
    record_batches : bool
        Whether to keep copies of what the model and the loss were called with in the last two sampled steps.
    state_every : int
        Copy the parameters, the buffers and the state of the optimizers before every step whose number is divisible by it,
        and all batches since.  A dump can then be replayed.  0 for never.
    signals : tuple of str
        Names of signals that write a dump, such as ``"SIGUSR1"`` and ``"SIGTERM"``.
    cool_down : int
        Number of steps after an automatic dump in which no other one is written.
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
    record_batches: bool = False
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
            if field.type is int and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{field.name} must be an int >= {least}, got {value!r}")
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
