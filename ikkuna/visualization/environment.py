"""The environment of a run: versions of packages and the type of the machine, but not its name."""

import platform
from importlib import metadata

from ikkuna.signal_handlers import raise_users_exception

__all__ = ["environment"]

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
