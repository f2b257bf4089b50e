"""The state of the monitor itself: errors, lost values and overhead."""

from dataclasses import dataclass, fields

from ikkuna.export.recorder.flight_recorder import FlightRecorder
from ikkuna.export.session.session import Session
from ikkuna.export.subscriber.registered import Registered
from ikkuna.visualization.run import Run

__all__ = ["Health", "health_of"]

_WIDTH = 15
_LONGEST = 100


@dataclass(frozen=True, slots=True, repr=False)
class Health:
    """The state of the monitor itself; ``print()`` shows it as a table.

    Parameters
    ----------
    acked_step : int
        The last step whose values were written to the operating system; -1 before the first.
    steps : int
        Number of training steps.
    errors : int
        Number of caught errors, of subscribers and of ikkuna.
    dropped : int
        Number of values that were lost before they were written, of incomplete bundles, of rows that other ranks did not keep,
        and of values that a device computes more slowly than they are sampled.
    unwritable : tuple of str
        The backends that cannot store values now, by name or class: the last attempt failed, or they are disabled.
        It is empty again when the disk has recovered and the waiting values are written.
    disabled : tuple of str
        Names of the disabled subscribers: their classes, or what the function of a user publishes.
    skipped : int
        Number of series whose tensors cannot be read, such as packed weights that cannot be dequantised,
        and of updates for which memory was missing.
    overhead : float
        Time that ikkuna spent on the training thread, and CPU time of the threads that draw pictures while the model trains,
        divided by the rest of the time, from the second step on.
        It does not contain the microseconds that torch takes on the way to each hook.
    dumps : int
        Number of dumps of the flight recorder that are on the disk.
    failed_dumps : int
        Number of dumps that could not be written.
    seconds : dict of str to float
        Time spent in the code of each subscriber, by class and kinds; includes the subscribers of its results.

    Examples
    --------
    >>> Health(99, 100, 0, 0, (), (), 0, 0.0123, 0, 0, {"NormSubscriber(weights)": 0.25, "LossSubscriber(loss)": 0.5})
    acked_step     99
    steps          100
    errors         0
    dropped        0
    unwritable     none
    disabled       none
    skipped        0
    overhead       1.23%
    dumps          0
    failed_dumps   0
    seconds
      0.5          LossSubscriber(loss)
      0.25         NormSubscriber(weights)
    """

    acked_step: int
    steps: int
    errors: int
    dropped: int
    unwritable: tuple[str, ...]
    disabled: tuple[str, ...]
    skipped: int
    overhead: float
    dumps: int
    failed_dumps: int
    seconds: dict[str, float]

    def __str__(self) -> str:
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "seconds"}
        facts["overhead"] = f"{self.overhead:.2%}"
        lines = [f"{name:<{_WIDTH}}{_text(value)}" for name, value in facts.items()]
        slowest = sorted(self.seconds.items(), key=lambda pair: -pair[1])
        lines += ["seconds", *(f"  {spent:<{_WIDTH - 2}.3g}{_shortened(label)}" for label, spent in slowest)]
        return "\n".join(lines)

    __repr__ = __str__


def health_of(
    session: Session,
    run: Run | None = None,
    subscribers: tuple[Registered, ...] = (),
    recorder: FlightRecorder | None = None,
) -> Health:
    """Return the health of a session and its bus; `run` and `subscribers` are those of a bus that was closed since."""
    bus = session.bus
    run, subscribers = run or bus.run, subscribers or bus.registered
    seconds: dict[str, float] = {}
    for registered in subscribers:
        seconds[registered.label] = seconds.get(registered.label, 0.0) + registered.seconds
    return Health(
        acked_step=run.acked_step if run is not None else -1,
        steps=session.cycle.steps,
        errors=bus.error_guard.errors,
        dropped=(run.dropped if run is not None else 0)
        + sum(registered.dropped for registered in subscribers)
        + session.exchange.dropped
        + session.logged.dropped,
        unwritable=run.unwritable if run is not None else (),
        disabled=tuple(bus.error_guard.disabled),
        skipped=session.skipped,
        overhead=session.context.stopwatch.overhead,
        dumps=len(recorder.dumps) if recorder is not None else 0,
        failed_dumps=recorder.failed if recorder is not None else 0,
        seconds=seconds,
    )


def _text(value: object) -> str:
    """Return a value of the table; names are separated by commas."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
