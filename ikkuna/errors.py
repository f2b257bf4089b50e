"""The errors ikkuna raises, all at set-up; none of them reaches a running training loop.

::

    IkkunaError
    ├── ConfigError(ValueError)         an argument has a value that cannot be used
    │   ├── ConfigTypeError(TypeError)  an argument has the wrong type
    │   └── UnknownKindError            a kind of message nobody publishes
    ├── ClosedError(RuntimeError)       an exporter or run was used after close()
    ├── PluginError(ImportError)        a plugin could not be loaded, or offers something else
    ├── LogDirError(OSError)            the log directory cannot be written
    └── SnapshotError(ValueError)       a snapshot file is damaged or unsafe
"""

__all__ = [
    "ClosedError",
    "ConfigError",
    "ConfigTypeError",
    "IkkunaError",
    "LogDirError",
    "PluginError",
    "SnapshotError",
    "UnknownKindError",
]


class IkkunaError(Exception):
    """Base of every error raised by ikkuna."""


class ConfigError(IkkunaError, ValueError):
    """An argument has a value that cannot be used."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument has the wrong type."""


class UnknownKindError(ConfigError):
    """A kind of message that nobody publishes was asked for."""


class ClosedError(IkkunaError, RuntimeError):
    """An exporter or a run was used after ``close()``."""


class PluginError(IkkunaError, ImportError):
    """A plugin could not be loaded, or what it offers is not what its entry point promises."""


class LogDirError(IkkunaError, OSError):
    """The log directory cannot be made or written."""


class SnapshotError(IkkunaError, ValueError):
    """A snapshot file is damaged, or would need code execution to be read."""
