"""A stored run: its series as arrays."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError, unknown_name
from ikkuna.store.names import Series
from ikkuna.store.quantity import LOGGED, NEUTRAL, Quantity, installed_quantities, network_order, step_order
from ikkuna.store.run_contents import RunFilesReader
from ikkuna.store.run_directory import read_run_file
from ikkuna.store.stored_value import StoredHistogram
from ikkuna.store.values import ModuleEntry, ModuleOrder
from ikkuna.support.failures import log

TRAINING = "training"
_MARKS = "findings"  # earlier versions marked the steps of findings by values of rules in the place of modules


class Point(NamedTuple):
    """One stored value.

    Parameters
    ----------
    kind : str
        The kind, such as ``weights_norm2``.
    name : str or None
        Module and path; ``None`` for the whole network.
    pass_name : str
        ``"training"``, or the name of another pass.
    step : int
        The number of the optimizer step.
    value : float
        The value.
    """

    kind: str
    name: str | None
    pass_name: str
    step: int
    value: float


class SeriesValues(NamedTuple):
    """The values of a series.

    Parameters
    ----------
    steps : ndarray (values,)
        The steps.
    values : ndarray (values,)
        The values; event files store them in single precision.
    times : ndarray (values,)
        When they were written, in seconds since 1970.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    times: NDArray[np.float64]


class StoredRun:
    """The values of a run's directory, or of one event file or file of JSON lines.

    Values of steps that a resumed training has repeated are left out, as in TensorBoard.
    Damaged parts of a file are skipped and counted.
    If the directory has event files and JSON lines, the series that the event files lack are read from the JSON lines.
    The run may be written at the same time; :meth:`update` reads what has been added.

    Parameters
    ----------
    path : str or path-like
        The directory or file.
    is_native : bool
        Whether event files may be read by the native library.

    Raises
    ------
    ConfigError
        If there is no such path, or if it has no file of a run.

    Attributes
    ----------
    path : Path
        The directory or file.
    modules : tuple of ModuleEntry
        The observed modules, of which event files and ``run.json`` have a table.
    texts : dict of str to str
        The pages of text by their titles.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.backends.jsonl import JSONLinesBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = JSONLinesBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("weights_norm2", "fc"), 0.5, 10)
    ...     backend.commit(10)
    ...     backend.close()
    ...     run = StoredRun(directory)
    True
    >>> run.kinds(), run.names("weights_norm2"), run.series("weights_norm2", "fc").values.tolist()
    (('weights_norm2',), ('fc',), [0.5])
    """

    def __init__(self, path: str | os.PathLike[str], *, is_native: bool = True) -> None:
        self.path = Path(path)
        self._reader = RunFilesReader(self.path, is_native)
        self.update()

    def update(self) -> None:
        """Read what has been added to the files since the last call."""
        found = self._reader.read()
        self._table, self.all_series = found.table(), tuple(found.series)
        """All series; `session_columns` names them by their positions."""
        self.modules: tuple[ModuleEntry, ...] = found.modules
        self.texts: dict[str, str] = found.texts
        self.lost: int = found.lost
        """Number of damaged bytes and lines."""
        self.waiting: int = found.waiting
        """Size of the incomplete record at the end of a file, which may be being written."""
        self._stored = found.stored
        self.matrices: list[dict[str, Any]] = found.matrices
        self.order = ModuleOrder(self.modules)
        """Sorts names of series by the positions of their modules."""
        self._quantities: Mapping[str, Quantity] | None = None
        self._index: dict[tuple[str, str], dict[str | None, int]] = {}
        for number, series in enumerate(self.all_series):
            if self._table.size(number) and series.kind != _MARKS:
                self._index.setdefault((series.kind, series.pass_name), {})[series.name] = number

    @property
    def count(self) -> int:
        """The number of numbers that the run holds."""
        return sum(self._table.size(number) for number in range(len(self.all_series)))

    def size(self, series: Series) -> int:
        """Return the number of values of one of `all_series`."""
        names = self._index.get((series.kind, series.pass_name), {})
        return self._table.size(names[series.name]) if series.name in names else 0

    @property
    def last_step(self) -> int:
        """The last step with a value of the training; -1 without one."""
        steps = [
            self._table.series(number)[0]
            for (_, name), found in self._index.items()
            if name == TRAINING
            for number in found.values()
        ]
        return max((int(each[-1]) for each in steps if len(each)), default=-1)

    def kinds(self, pass_name: str | None = TRAINING) -> tuple[str, ...]:
        """Return the kinds with numbers, in alphabetical order; ``None`` selects those of all passes."""
        return tuple(sorted({kind for kind, name in self._index if pass_name is None or name == pass_name}))

    @property
    def quantities(self) -> Mapping[str, Quantity]:
        """The declarations of the kinds, which the run has stored; for other kinds those of installed subscribers."""
        if self._quantities is None:
            stored = read_run_file(self.path)
            known = {} if stored is None else stored.quantities
            self._quantities = {**installed_quantities(set(self.kinds(None)) - known.keys()), **known}
        return self._quantities

    def quantity(self, kind: str) -> Quantity:
        """Return what a kind is; neutral if no subscriber declares it."""
        return self.quantities.get(kind, NEUTRAL)

    def network_series(self, pass_name: str = TRAINING) -> list[Series]:
        """Return the series that belong to no module; the most important kinds are first, such as the loss.

        They are those of the whole network, and those with a name of their own: logged values, and the rates of groups.
        """
        found = (
            Series(kind, name, pass_name) for kind in self.kinds(pass_name) for name in self.names(kind, pass_name)
        )
        own = [series for series in found if not self._is_of_module(series.name, series.kind)]
        return sorted(own, key=lambda series: network_order(series.kind, self.quantity(series.kind)))

    def module_kinds(self) -> list[str]:
        """Return the kinds with values of modules, in the order in which a step computes them."""
        found = [kind for kind in self.kinds() if any(self._is_of_module(name, kind) for name in self.names(kind))]
        return sorted(found, key=lambda kind: (step_order(kind, self.quantities), kind))

    def _is_of_module(self, name: str | None, kind: str) -> TypeGuard[str]:
        return name is not None and kind != LOGGED and self.order.belongs(name)

    def passes(self) -> tuple[str, ...]:
        """Return the names of the passes, the training first."""
        names = {name for _, name in self._index}
        return tuple(sorted(names, key=lambda name: (name != TRAINING, name)))

    def names(self, kind: str, pass_name: str = TRAINING) -> tuple[str | None, ...]:
        """Return the names of the series of a kind, in the order of the network; ``None`` is the whole network."""
        found = self._index.get((kind, pass_name), {})
        return tuple(sorted(found, key=lambda name: (name is not None, self.order.key(name or ""))))

    def module_names(self) -> tuple[str, ...]:
        """Return the names of all modules and of all series of modules, in the order of the network."""
        named = {name for (kind, _), found in self._index.items() for name in found if self._is_of_module(name, kind)}
        named |= {entry.name for entry in self.modules}
        return tuple(sorted(named, key=self.order.key))

    def series(self, kind: str, module: str | None = None, pass_name: str = TRAINING) -> SeriesValues:
        """Return the values of a series.

        Raises
        ------
        ConfigError
            If the run has no such kind, pass or module; the message names those that are like it.
        """
        found = self._index.get((kind, pass_name))
        if found is None:
            known = self.kinds(pass_name)
            raise ConfigError(unknown_name("kind", kind, known) if known else f"the run has no pass {pass_name!r}")
        if module not in found:
            raise ConfigError(_no_series(kind, module, self.names(kind, pass_name)))
        return SeriesValues(*self._table.series(found[module]))

    def matrix(
        self, kind: str, pass_name: str = TRAINING
    ) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.float64]]:
        """Return the values of all modules: names, steps, and an array (modules, steps), with NaN where a module has none.

        Raises
        ------
        ConfigError
            If the run has no such kind.
        """
        names = tuple(name for name in self.names(kind, pass_name) if name is not None)
        found = [self.series(kind, name, pass_name) for name in names]
        if found and all(np.array_equal(each.steps, found[0].steps) for each in found[1:]):
            steps = found[0].steps
            if (np.diff(steps) > 0).all():  # the usual case needs no search
                return names, steps, np.stack([each.values for each in found])
        steps = np.unique(np.concatenate([each.steps for each in found] or [np.empty(0, np.int64)]))
        values = np.full((len(names), len(steps)), np.nan)
        for row, each in zip(values, found, strict=True):
            row[np.searchsorted(steps, each.steps)] = each.values
        return names, steps, values

    def presence(self, kind: str, names: Sequence[str], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which values of the matrix of a kind are there: (modules, steps)."""
        present = np.zeros((len(names), len(steps)), bool)
        for row, name in zip(present, names, strict=True):
            is_whole = self.size(Series(kind, name)) == len(steps)
            row[slice(None) if is_whole else np.searchsorted(steps, self.series(kind, name).steps)] = True
        return present

    def histogram_kinds(self, pass_name: str = TRAINING) -> tuple[str, ...]:
        """Return the kinds with histograms, in alphabetical order."""
        return tuple(sorted({series.kind for series in self._stored if series.pass_name == pass_name}))

    def histogram_names(self, kind: str, pass_name: str = TRAINING) -> tuple[str | None, ...]:
        """Return the names of the series with histograms of a kind, in the order of the network."""
        found = [series.name for series in self._stored if (series.kind, series.pass_name) == (kind, pass_name)]
        return tuple(sorted(found, key=lambda name: (name is not None, self.order.key(name or ""))))

    def histograms(
        self, kind: str, module: str | None = None, pass_name: str = TRAINING
    ) -> Iterator[tuple[int, StoredHistogram]]:
        """Yield step and histogram of a series; each is read from its file when it is asked for."""
        for stored in self._stored.get(Series(kind, module, pass_name), ()):
            if (found := stored.histogram()) is not None:
                yield stored.step, found

    def sessions(self, kinds: frozenset[str] | None = None) -> Iterator[Iterator[Point]]:
        """Yield the values of each part of the training between two restarts, in the order of steps.

        Values of steps that were repeated later are among them.

        Parameters
        ----------
        kinds : frozenset of str, optional
            Yield the values of these kinds only.
        """
        for numbers, steps, values in self.session_columns(kinds):
            yield self._points(numbers, steps, values)

    def session_columns(
        self, kinds: frozenset[str] | None = None
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]]:
        """Yield the values of :meth:`sessions` as arrays: positions in `all_series`, steps and values."""
        wanted = np.array([kinds is None or series.kind in kinds for series in self.all_series], bool)
        yield from self._table.sessions(wanted)

    def _points(
        self, numbers: NDArray[np.int32], steps: NDArray[np.int64], values: NDArray[np.float64]
    ) -> Iterator[Point]:
        heads = [(series.kind, series.name, series.pass_name) for series in self.all_series]
        for number, step, value in zip(numbers.tolist(), steps.tolist(), values.tolist(), strict=True):
            kind, name, pass_name = heads[number]
            yield Point(kind, name, pass_name, step, value)

    def close(self) -> None:
        """Free the memory of the scanners of event files; the values stay readable."""
        self._reader.close()

    def require_values(self) -> "StoredRun":
        """Return this run; log what is damaged.

        Raises
        ------
        ConfigError
            If the run holds neither a value nor a finding.
        """
        if not (self._index or self._stored or any(self.path.glob("findings.*.jsonl"))):
            raise ConfigError(f"'{self.path}' holds no value of a run")
        if self.lost:
            log.warning("'%s' is damaged: %d bytes or lines could not be read", self.path, self.lost)
        return self


def _no_series(kind: str, module: str | None, names: Sequence[str | None]) -> str:
    """Return the text of an error about a kind that has no series of a module, or none of the whole network."""
    modules = [name for name in names if name is not None]
    if not modules:
        return f"{kind!r} belongs to the whole network, not to a module such as {module!r}"
    if module is None:
        return f"{kind!r} has one series for each module; pass one of them: {', '.join(map(repr, modules))}"
    return unknown_name(f"module of {kind!r}", module, modules)


def read_run(path: str | os.PathLike[str]) -> StoredRun:
    """Return the run of a directory, or of one event file or file of JSON lines; a damaged run is logged.

    Raises
    ------
    ConfigError
        If there is no such path, if it has no file of a run, or if the files hold neither a value nor a finding.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from ikkuna.store.names import Series
    >>> from ikkuna.backends.tensorboard import TensorBoardBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = TensorBoardBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("weights_norm2", "fc"), 0.5, 10)
    ...     backend.commit(10)
    ...     backend.close()
    ...     run = read_run(directory)
    True
    >>> run.series("weights_norm2", "fc").steps.tolist()
    [10]
    """
    run = StoredRun(path)
    run.close()
    return run.require_values()
