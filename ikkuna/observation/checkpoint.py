"""The state of an exporter for a checkpoint: steps, the run, and what subscribers keep over several steps."""

import time
from pathlib import Path
from typing import Any

from ikkuna.distributed.dtensor import is_run_together
from ikkuna.distributed.rendezvous import World, from_first_rank, on_all_ranks
from ikkuna.errors import ConfigError, LogDirError
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.observation.session import Session
from ikkuna.store.run_contents import last_step
from ikkuna.store.run_directory import Continued, find_run, latest_run, log_path, read_run_file
from ikkuna.support.failures import log
from ikkuna.support.modules import difference, signature

_PATIENCE = 2.0  # seconds
_COUNTERS = ("global_step", "train_step", "epoch")
_OTHERS = ("model", "rank", "run", "subscribers")  # earlier states have the rank


def state_of(session: Session) -> dict[str, Any]:
    """Return the state of an exporter as plain values and tensors in host memory.

    The values of finished steps are delivered before, for at most 2 seconds if they come from other ranks or a device,
    and written to the operating system, for at most 2 seconds if the disk is slow.
    What ranks or steps can lack is in a tuple, or on one rank alone: ``torch.distributed.checkpoint`` stores a tuple as a whole, of
    equal names only what one of the ranks has, and loads the names that the state of a new exporter has.
    """
    bus = session.bus
    store_finished(bus)
    model, part = session.context.model.roots.whole, _part(session)
    return {
        **session.context.tracker.counters.state_dict(),
        "model": None if model is None else signature(model),
        **({"run": _run_state(bus)} if World.here().rank == 0 else {}),
        "subscribers": tuple({"part": part, **each} for each in bus.subscriber_states()),
    }


def store_finished(bus: MessageBus) -> None:
    """Deliver the values of finished steps and write them to the operating system, for at most 2 seconds each."""
    deadline = time.monotonic() + _PATIENCE
    bus.drain()
    while bus.queue and time.monotonic() < deadline:
        time.sleep(0.001)
        bus.drain()
    if bus.queue:
        log.warning("values of finished steps have not arrived within %g seconds", _PATIENCE)
    if bus.run is not None:
        bus.run.settle(_PATIENCE)


def _run_state(bus: MessageBus) -> dict[str, str]:
    found = bus.continued if bus.run is None else bus.run
    return (
        {"id": "", "directory": ""}
        if found is None
        else {"id": found.identity, "directory": str(found.directory or "")}
    )


def _part(session: Session) -> tuple[int, int]:
    """Return rank and number of ranks, which decide what this rank holds of the parameters; ``(0, 1)`` if it is all."""
    world = World.here()
    return (world.rank, world.size) if any(map(is_run_together, session.context.model.callable)) else (0, 1)


def load_state(session: Session, state: Any) -> None:
    """Continue from a state; if an error is raised, nothing has changed except the states of some subscribers.

    Raises
    ------
    ConfigError
        If `state` is not from `state_of`, or belongs to another model.
    LogDirError
        If the run is to be continued and its directory is gone.
    """
    counters = _counters(state)
    check_model(session, state.get("model"), "the state")
    continued = _continued(session.bus, state.get("run"), counters["global_step"])
    session.load_counters(counters, continued)
    _load_subscribers(session, state)


def _counters(state: Any) -> dict[str, int]:
    """Return the counters in a state."""
    if not isinstance(state, dict) or not set(_COUNTERS) <= state.keys() <= {*_COUNTERS, *_OTHERS}:
        what = sorted(map(str, state)) if isinstance(state, dict) else repr(state)[:200]
        raise ConfigError(f"load_state_dict() needs what state_dict() returned, got {what}")
    return {name: state[name] for name in _COUNTERS}


def check_model(session: Session, stored: dict[str, Any] | None, what: str) -> None:
    """Raise `ConfigError` if a stored signature is not that of the observed model."""
    model = session.context.model.roots.whole
    if stored is None or model is None:
        return
    if differs := difference(stored, signature(model)):
        raise ConfigError(f"{what} belongs to another model: to {differs}")


def check_stored_model(session: Session) -> None:
    """Raise `ConfigError` if the run that is continued without a state belongs to another model."""
    continued = session.bus.continued
    if continued is not None and session.bus.run is None and (stored := read_run_file(continued.directory)) is not None:
        check_model(session, stored.model, f"the run in '{continued.directory}'")


def _continued(bus: MessageBus, run: dict[str, str] | None, step: int) -> Continued | None:
    """Return the stored run that the state belongs to, if it is to be continued."""
    settings, own = bus.settings, bus.run
    if not settings.resume or run is None or World.here().rank != 0 or not run["directory"]:  # no file was written
        return None
    if own is not None:
        if own.identity != run["id"]:
            log.warning("values were shown before load_state_dict(); the run stays in '%s'", own.directory)
        return None
    stored = Path(run["directory"] or ".")
    directory = find_run(run["id"], log_path(bus.log_dir or "run") / stored.name, stored)
    if directory is not None:
        return Continued(directory, step, run["id"])
    if settings.resume is True:
        raise LogDirError(
            f"the run of the state is neither in '{bus.log_dir or 'run'}' nor at '{stored}'; "
            "pass its log_dir=, or resume='auto' to begin a new run if it is gone"
        )
    log.warning("the directory '%s' of the run is gone; a new run begins at step %d", stored, step)
    return None


def continue_latest(session: Session) -> None:
    """Continue the latest run of rank 0 after its last step; a state that is loaded later has priority.

    Raises
    ------
    LogDirError
        If there is no run to continue, on all ranks.
    """
    bus = session.bus
    found = from_first_rank(World.here(), "latest run", lambda: _latest(bus))
    counters = {"global_step": found["step"], "train_step": 0, "epoch": 0}
    session.load_counters(counters, Continued(Path(found["directory"]), found["step"], found["id"]))


def _latest(bus: MessageBus) -> dict[str, Any]:
    """Return directory and identity of the latest run, and the step after its last one."""
    name, log_dir = bus.settings.name, log_path(bus.log_dir or "run")
    directory = latest_run(log_dir, name)
    if directory is None:
        which = "" if name is None else f" {name!r}"
        raise LogDirError(f"resume=True, but '{log_dir}' has no run{which}; resume='auto' begins a new run then")
    stored = read_run_file(directory)
    return {"directory": str(directory), "step": last_step(directory) + 1, "id": "" if stored is None else stored.id}


def _load_subscribers(session: Session, state: dict[str, Any]) -> None:
    states, own = state.get("subscribers") or (), _part(session)
    fits = not session.context.model.callable or all(each.get("part", own) == own for each in states)
    if own[1] > 1:
        fits = on_all_ranks(World.here(), "state of subscribers", fits)
    if fits:
        session.bus.load_subscriber_states(states)
    elif World.here().rank == 0:
        log.warning(
            "the states hold other parts of the parameters than the ranks do, and subscribers begin without them; "
            "save the state of every rank, and load each on its rank of as many ranks"
        )
