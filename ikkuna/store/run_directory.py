"""The directory of a run: its name, its identity, its settings, and requests to the running training."""

import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ikkuna.errors import ConfigError, ConfigTypeError, LogDirError, is_integer
from ikkuna.store.append_file import make_directories, process_name, reason
from ikkuna.store.quantity import Quantity
from ikkuna.store.values import ModuleEntry, module_table, read_module_table
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.files import atomic_file, read_regular

ConfigValue = None | bool | int | float | str
_LIMIT = 1000  # characters of a value


def plain_config(config: Any) -> dict[str, ConfigValue]:
    """Return hyper-parameters as a flat dict of numbers, strings and ``None``.

    Keys of nested mappings are joined by dots.
    A list of plain values becomes its text; any other value becomes its ``repr``, and one line of the log names these.

    Parameters
    ----------
    config : dict or object
        For example a dict, an `argparse.Namespace`, or a configuration object with ``to_dict()``.

    Raises
    ------
    ConfigTypeError
        If `config` is none of these.

    Examples
    --------
    >>> plain_config({"lr": 0.1, "optimizer": {"name": "adam", "betas": (0.9, 0.99)}})
    {'lr': 0.1, 'optimizer.name': 'adam', 'optimizer.betas': '(0.9, 0.99)'}
    """
    mapping = _mapping(config)
    if mapping is None:
        raise ConfigTypeError(f"config needs a dict or an object with attributes, got {type(config).__name__}")
    flat: dict[str, ConfigValue] = {}
    unknown: list[str] = []
    _flatten(mapping, "", flat, unknown, ())
    if unknown:
        log.info("config: stored as text: %s", ", ".join(unknown))
    return flat


def _mapping(config: Any) -> Mapping[Any, Any] | None:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, type | str | bytes | int | float | list | tuple | set) or config is None:
        return None
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if callable(to_dict := getattr(config, "to_dict", None)):
        found = to_dict()
        return found if isinstance(found, Mapping) else None
    return getattr(config, "__dict__", None)


def _flatten(
    mapping: Mapping[Any, Any], prefix: str, flat: dict[str, ConfigValue], unknown: list[str], around: tuple[int, ...]
) -> None:
    for key, value in list(mapping.items()):
        name = f"{prefix}{key}"
        inner = value if isinstance(value, Mapping) else None
        if inner is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = _mapping(value)
        if inner and id(value) not in around:
            _flatten(inner, f"{name}.", flat, unknown, (*around, id(value)))
        else:
            flat[name] = _plain(name, value, unknown)


def _plain(name: str, value: Any, unknown: list[str]) -> ConfigValue:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = _attempt(value.item, value)
    if value is None or type(value) in (bool, int, float):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str):
        return str(value)[:_LIMIT]
    if isinstance(value, list | tuple) and all(
        item is None or isinstance(item, bool | int | float | str) for item in value
    ):
        return repr(value)[:_LIMIT]
    unknown.append(name)
    return str(_attempt(lambda: repr(value), f"<{type(value).__name__}>"))[:_LIMIT]


def _attempt(function: Any, otherwise: Any) -> Any:
    """Return the result of a function of the user's value, or `otherwise` if it raises."""
    try:
        return function()
    except Exception as error:
        raise_users_exception(error)
        return otherwise


def config_table(config: Mapping[str, ConfigValue]) -> str:
    """Return a Markdown table of hyper-parameters.

    Examples
    --------
    >>> print(config_table({"lr": 0.1}))
    | name | value |
    |:--|:--|
    | lr | 0.1 |
    """
    rows = [(str(name), str(value)) for name, value in config.items()]
    lines = ["| name | value |", "|:--|:--|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


_PACKAGES = ("ikkuna", "torch", "numpy", "tensorboardX", "protobuf", "matplotlib", "jinja2", "tensorboard", "triton")
_MISSING = "not installed"


def environment() -> dict[str, str]:
    """Return the versions of Python, of the packages that ikkuna uses and of the system; no package is imported.

    Examples
    --------
    >>> sorted(environment())[:3]
    ['ikkuna', 'jinja2', 'machine']
    """
    found = {"python": platform.python_version(), "system": platform.system()}
    found["machine"] = platform.machine()
    return found | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _MISSING
    except Exception as error:  # the metadata of a distribution may be damaged
        raise_users_exception(error)
        return "unknown"


RUN_FILE = "run.json"

_LARGEST = 1 << 24


@dataclass(frozen=True, slots=True)
class RunFile:
    """Contents of ``run.json``.

    Parameters
    ----------
    id : str
        Identifies the run, also if its directory is moved.
    config : dict
        The hyper-parameters.
    model : dict, optional
        The signature of the model, see `ikkuna.support.modules`.
    created : str
        The time of its creation, in the form of ISO 8601.
    environment : dict
        The versions of the packages, see `ikkuna.store.run_directory`.
    quantities : dict of str to Quantity
        What the shown kinds are; a kind without an entry is neutral.
    modules : tuple of ModuleEntry
        The observed modules.
    """

    id: str
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    created: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    modules: tuple[ModuleEntry, ...] = ()


def write_run_file(directory: Path, content: RunFile) -> None:
    """Write ``run.json`` into a directory that has none; an error of the disk is ignored, because values matter more."""
    path = directory / RUN_FILE
    if os.path.exists(path):
        return
    created = content.created or datetime.now(UTC).isoformat(timespec="seconds")
    data = {"id": content.id, "created": created, "config": content.config, "model": content.model}
    data["environment"] = content.environment or environment()
    data["quantities"] = {kind: quantity.as_dict() for kind, quantity in content.quantities.items()}
    data["modules"] = module_table(content.modules)
    with contextlib.suppress(OSError):
        _write(path, data)


def add_quantities(directory: Path, quantities: Mapping[str, Quantity]) -> None:
    """Add what kinds are to ``run.json``; an error of the disk is ignored, because values matter more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        data = json.loads((directory / RUN_FILE).read_bytes())
        stored = data.get("quantities") or {}
        data["quantities"] = {**stored, **{kind: quantity.as_dict() for kind, quantity in quantities.items()}}
        if data["quantities"] != stored:
            _write(directory / RUN_FILE, data)


def _write(path: Path, data: dict[str, Any]) -> None:
    with atomic_file(path, 0o600) as file:  # a configuration may contain secrets
        file.write(json.dumps(data, indent=1).encode())


def stored_facts(directory: str | os.PathLike[str]) -> Any:
    """Return the JSON value of ``run.json`` in a directory, which can be of any form.

    Raises
    ------
    OSError
        If it cannot be read, is no regular file, or has more than 16 MiB.
    ValueError
        If it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(read_regular(Path(directory) / RUN_FILE, _LARGEST))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_run_file(directory: str | os.PathLike[str]) -> RunFile | None:
    """Return the content of ``run.json`` in a directory; ``None`` if there is none or if it cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_run_file(Path(directory), RunFile("1a2b", {"lr": 0.1}))
    ...     read_run_file(directory).config
    {'lr': 0.1}
    """
    try:
        data = stored_facts(directory)
        config, model = data.get("config") or {}, data.get("model")
        if not isinstance(config, dict) or not isinstance(model, dict | None):
            return None
        stored = data.get("environment") or {}
        versions = {str(name): str(value) for name, value in stored.items()}
        quantities = {str(kind): Quantity.from_dict(each) for kind, each in (data.get("quantities") or {}).items()}
        modules = read_module_table(data.get("modules") or "")
        return RunFile(str(data["id"]), config, model, str(data.get("created", "")), versions, quantities, modules)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_run(identity: str, *candidates: Path) -> Path | None:
    """Return the first of some directories that holds the run `identity`; ``None`` if none does."""
    for directory in candidates:
        found = read_run_file(directory)
        if found is not None and found.id == identity:
            return directory
    return None


fcntl: types.ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


_LOCK = ".writer"
_NAME = re.compile(r"run([0-9]{4,18})")


def make_run_directory(log_dir: Path, name: str | None = None) -> Path:
    """Create and return the next of ``run0001``, ``run0002``, … below `log_dir`, which is created if it is missing.

    With a `name` it is ``name``, or, if that is taken, the next of ``name_2``, ``name_3``, ….
    Two processes never get the same directory, because only one of them can create it.

    Raises
    ------
    LogDirError
        If it cannot be created.
    """
    try:
        make_directories(log_dir)
        number = max(_taken(log_dir, name), default=0)
        while True:
            number += 1
            directory = log_dir / _directory_name(name, number)
            try:
                directory.mkdir()
            except FileExistsError:
                continue
            return directory
    except OSError as error:
        raise LogDirError(f"cannot create a run directory in '{log_dir}': {reason(error)}") from error


def lock_run(directory: Path) -> int | None:
    """Lock a run for this process, until the descriptor that is returned is closed or the process ends in whatever way.

    ``None`` is returned where files cannot be locked.  The lock is one of POSIX, which NFS passes on to its server.
    Unlike a file with the number of a process it needs no check whether that process, perhaps of another machine, is alive;
    unlike a lock of BSD, the workers of a data loader that outlive this process do not keep it.

    Raises
    ------
    BlockingIOError
        If another process has locked the run; the text is its machine and its number.
    """
    if fcntl is None:
        return None
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(directory / _LOCK, flags, 0o644)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, process_name().encode())
    except OSError as error:
        owner = os.read(descriptor, 200).decode(errors="replace")
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(errno.EAGAIN, owner) from error
        return None
    return descriptor


def _directory_name(name: str | None, number: int) -> str:
    if name is None:
        return f"run{number:04d}"
    return name if number == 1 else f"{name}_{number}"


def _taken(log_dir: Path, name: str | None) -> dict[int, str]:
    """Return the numbers of the runs with this name, and the names of their directories."""
    pattern = _NAME if name is None else re.compile(re.escape(name) + "(?:_([0-9]{1,18}))?")
    names = (found for entry in os.listdir(log_dir) if (found := pattern.fullmatch(entry)))
    return {int(found[1] or 1): found[0] for found in names}


def latest_run(log_dir: Path, name: str | None = None) -> Path | None:
    """Return the directory of the latest run, or of the latest with this name; ``None`` if there is none."""
    try:
        numbers = {found: number for number, found in _taken(log_dir, name).items()}
        named = [] if name is not None else [entry for entry in os.listdir(log_dir) if entry not in numbers]
    except FileNotFoundError:
        return None
    found = [log_dir / entry for entry in (*named, *numbers)]
    files = {directory: read_run_file(directory) for directory in found if directory.is_dir()}
    runs = [directory for directory, file in files.items() if file is not None or directory.name in numbers]
    return max(runs, key=lambda each: (getattr(files[each], "created", ""), numbers.get(each.name, 0)), default=None)


def check_run_name(name: Any) -> str | None:
    """Return the name of a run if it can be that of a directory.

    Raises
    ------
    ConfigTypeError, ConfigError
        If it is not a string, or not one part of a path.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigTypeError(f"run_name needs a string, got {type(name).__name__}")
    if not name.strip() or name in (".", "..") or len(name.encode()) > 200 or re.search(r"[/\\\0]", name):
        raise ConfigError(
            f"run_name needs a name for a directory, without '/' and at most 200 bytes long, got {name!r}"
        )
    return name


def log_path(log_dir: Any) -> Path:
    """Return `log_dir` as an absolute path, so that it stays the same when the process changes its directory.

    Raises
    ------
    ConfigError
        If it is not a path.
    LogDirError
        If it is relative and the current directory does not exist.
    """
    if not isinstance(log_dir, str | os.PathLike):
        raise ConfigTypeError(f"log_dir is a path, got {type(log_dir).__name__}")
    text = os.fspath(log_dir)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"log_dir is a path, got {text!r}")
    try:
        return Path(text).absolute()
    except OSError as error:
        raise LogDirError(f"cannot write to log directory '{text}': {reason(error)}") from error


def check_log_dir(log_dir: Any) -> Path:
    """Return `log_dir` as a path if a run can be written there; this creates nothing.

    Raises
    ------
    ConfigError
        If it is not a path.
    LogDirError
        If a temporary file cannot be created in it or, while it does not exist, in the nearest existing parent.
    """
    path = log_path(log_dir)
    try:
        with tempfile.TemporaryFile(dir=_nearest(path)):
            pass
    except OSError as error:
        raise LogDirError(f"cannot write to log directory '{path}': {reason(error)}") from error
    return path


def _nearest(path: Path) -> Path:
    """Return `path` or its nearest existing parent."""
    for nearest in (path, *path.parents):
        if nearest.is_symlink() and not nearest.exists():
            raise OSError(errno.ENOENT, f"'{nearest}' is a symbolic link to something that does not exist")
        with contextlib.suppress(FileNotFoundError):
            nearest.stat()
            return nearest
    return path


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Choices of the user for a run.

    Parameters
    ----------
    log_dir : path, optional
        The directory of the runs; by default ``run``.
    name : str, optional
        The name of the run's directory; by default the next of ``run0001``, ``run0002``, ….
    config : mapping
        The hyper-parameters, see `plain_config`.
    resume : bool or 'auto'
        Whether a stored run is continued, see `ikkuna.export.Exporter`.
    verbosity : int
        0 to write no line about the run's directory.
    subject : str
        What this line says is written.
    """

    log_dir: str | Path | None = None
    name: str | None = None
    config: Mapping[str, ConfigValue] = field(default_factory=dict)
    resume: bool | str = False
    verbosity: int = 0
    subject: str = "the run"

    @classmethod
    def checked(
        cls, log_dir: Any = None, name: Any = None, config: Any = None, resume: Any = False, verbosity: Any = 1
    ) -> "RunSettings":
        """Return settings after a check of all arguments.

        Raises
        ------
        ConfigError, ConfigTypeError
            If an argument is invalid.
        LogDirError
            If `log_dir` cannot be written.
        """
        if log_dir is not None:
            check_log_dir(log_dir)
        if resume not in (True, False, "auto"):
            raise ConfigError(f"resume must be True, False or 'auto', got {resume!r}")
        if not is_integer(verbosity, 0):
            raise ConfigError(f"verbosity must be an int >= 0, got {verbosity!r}")
        plain = {} if config is None else plain_config(config)
        return cls(log_dir, check_run_name(name), plain, resume, verbosity)


@dataclass(frozen=True, slots=True)
class Continued:
    """A stored run that is continued.

    Parameters
    ----------
    directory : Path
        Its directory.
    step : int
        Values of this step and later ones are replaced.
    identity : str
        The ``id`` in its ``run.json``; empty if it has none.
    """

    directory: Path
    step: int
    identity: str = ""


CONTROL_FILE = "control.json"
_KEYS = ("paused", "every", "mute")


class SamplingRequest(NamedTuple):
    """Contents of a control file.

    Parameters
    ----------
    paused : bool, optional
        Whether nothing is sampled; ``None`` for no change.
    every : int or None
        All subscribers sample each multiple of this number; ``None`` for their own steps, -1 for no change.
    mute : frozenset of str
        Rules, or rules with a module such as ``"dead_units:fc1"``, whose findings are not reported.
    """

    paused: bool | None = None
    every: int | None = -1
    mute: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "SamplingRequest":
        """Return the request that a text in JSON contains.

        Raises
        ------
        ValueError
            If it is not an object with some of ``paused``, a bool, ``every``, a positive int or null, and ``mute``, a list of strings.

        Examples
        --------
        >>> SamplingRequest.parse('{"every": 1}')
        SamplingRequest(paused=None, every=1, mute=frozenset())
        """
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(content, dict):
            raise ValueError(f"expected an object with {' or '.join(_KEYS)}, got {type(content).__name__}")
        if unknown := [key for key in content if key not in _KEYS]:
            raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
        paused, every = content.get("paused"), content.get("every", -1)
        if "paused" in content and not isinstance(paused, bool):
            raise ValueError(f"paused must be true or false, got {paused!r}")
        if "every" in content and every is not None and not is_integer(every, 1):
            raise ValueError(f"every must be an int >= 1 or null, got {every!r}")
        mute = content.get("mute", [])
        if not isinstance(mute, list) or not all(isinstance(name, str) for name in mute):
            raise ValueError(f"mute must be a list of strings, got {mute!r}")
        return cls(paused, every, frozenset(mute))


class ControlFile:
    """Reads ``control.json`` in the directory of a run when it changes; the thread of a writer calls :meth:`check`.

    Examples
    --------
    >>> import tempfile
    >>> control = ControlFile()
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = (Path(directory) / "control.json").write_text('{"paused": true}')
    ...     control.check(Path(directory))
    >>> control.take(), control.take()
    (SamplingRequest(paused=True, every=-1, mute=frozenset()), None)
    """

    __slots__ = ("_seen", "mute", "request")

    def __init__(self) -> None:
        self._seen: Any = None
        self.request: SamplingRequest | None = None
        self.mute: frozenset[str] = frozenset()

    def check(self, directory: Path) -> None:
        """Read the file if it has changed since the last call; what it does not contain properly is logged."""
        path = directory / CONTROL_FILE
        try:
            status = path.stat()
            state = status.st_mtime_ns, status.st_size, status.st_ino
            if state == self._seen:
                return
            self._seen = state
            request = SamplingRequest.parse(path.read_text("utf-8"))
        except FileNotFoundError:
            self._seen = None
        except (OSError, ValueError) as error:
            log.warning("'%s' is ignored: %s", path, error)
        else:
            self.mute = request.mute
            if request[:2] != (None, -1):
                self.request = request

    def take(self) -> SamplingRequest | None:
        """Return what was read since the last call; ``None`` if the file has not changed."""
        if self.request is None:
            return None
        request, self.request = self.request, None
        return request
