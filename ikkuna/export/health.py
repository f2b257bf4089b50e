"""How the monitor itself is doing."""

from dataclasses import dataclass

from ikkuna.export.session import Session

__all__ = ["Health", "health_of"]


@dataclass(frozen=True, slots=True)
class Health:
    """How the monitor itself is doing.

    Parameters
    ----------
    acked_step : the last step whose values the operating system has; -1 before
    steps : training steps seen
    errors : errors caught, of subscribers and our own
    dropped : values that were lost on their way to a file, bundles that never met, and rows that other ranks could not keep up with
    disabled : subscribers that are not called any more
    skipped : tensors without numbers and updates there was no memory for
    overhead : time that was ours on the training thread, as a share of the time that was not, from the second step on
    seconds : time spent in each subscriber's own code, its subscribers' included, by class and kinds
    """

    acked_step: int
    steps: int
    errors: int
    dropped: int
    disabled: tuple[str, ...]
    skipped: int
    overhead: float
    seconds: dict[str, float]


def health_of(observer: Session) -> Health:
    """Return how an observer and its bus are doing."""
    bus, run = observer.bus, observer.bus.run
    return Health(
        acked_step=run.acked_step if run is not None else -1,
        steps=observer.steps,
        errors=bus.error_guard.errors,
        dropped=(run.dropped if run is not None else 0)
        + sum(s.dropped for s in bus.registered)
        + observer.exchange.dropped,
        disabled=tuple(bus.error_guard.disabled),
        skipped=observer.skipped,
        overhead=observer.stopwatch.overhead,
        seconds={s.label: s.seconds for s in bus.registered},
    )
