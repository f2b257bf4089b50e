"""The state of the monitor itself: errors, lost values and overhead."""

from dataclasses import dataclass

from ikkuna.export.recorder.flight_recorder import FlightRecorder
from ikkuna.export.session.session import Session
from ikkuna.export.subscriber.registered import Registered
from ikkuna.visualization.run import Run

__all__ = ["Health", "health_of"]


@dataclass(frozen=True, slots=True)
class Health:
    """The state of the monitor itself.

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
    dumps : int
        Number of dumps of the flight recorder that are on the disk.
    failed_dumps : int
        Number of dumps that could not be written.
    seconds : dict of str to float
        Time spent in the code of each subscriber, by class and kinds; includes the subscribers of its results.
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
