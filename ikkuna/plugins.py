"""Find plugins through entry points, one distribution at a time, and load one only when someone asks for it.

Importing ikkuna loads no plugin.  A broken plugin fails alone, naming its distribution and the cause;
a package with malformed metadata, ours or not, is passed over.
"""

import logging
from collections import defaultdict
from functools import cache
from importlib.metadata import EntryPoint, distributions
from typing import Any

from ikkuna.errors import PluginError

__all__ = ["load_plugin", "plugin_names", "plugins"]

log = logging.getLogger("ikkuna")


@cache
def plugins(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; a name that several distributions announce has several.

    The answer is kept: a distribution installed later is seen by the next process.
    """
    found: dict[str, dict[tuple[str, str], EntryPoint]] = defaultdict(dict)
    for distribution in distributions():
        try:
            name = distribution.metadata["Name"]
            points = [point for point in distribution.entry_points if point.group == group]
        except Exception as error:
            log.warning("the metadata of an installed package cannot be read, its plugins are ignored: %s", error)
            continue
        for point in points:
            if point.name.isidentifier() and not point.name.startswith("__"):
                found[point.name][name.lower(), point.value] = point  # an editable install is listed twice
            else:
                log.warning("the plugin name %r of %s is not an identifier; ignored", point.name, name)
    return {name: tuple(points.values()) for name, points in found.items()}


def plugin_names(group: str) -> frozenset[str]:
    """Return the names a group offers, without loading anything."""
    return frozenset(plugins(group))


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def load_plugin(group: str, name: str, base: type) -> Any:
    """Import the plugin `name` of a group and check that it is a subclass of `base`.

    Raises
    ------
    PluginError
        If no distribution or more than one offers the name, if importing it fails for any reason, or if it is something else.
        The message names the distribution and the cause.
    """
    points = plugins(group).get(name, ())
    if not points:
        raise PluginError(
            f"no installed distribution offers {name!r} in {group!r}; is ikkuna installed, or only on the path?"
        )
    if len(points) > 1:
        raise PluginError(
            f"{name!r} is offered by several distributions: {', '.join(map(_origin, points))}; uninstall all but one"
        )
    (point,) = points
    what = f"plugin {name!r} from distribution {_origin(point)} ({point.value})"
    try:
        target = point.load()
    except SystemExit as error:
        raise PluginError(f"{what} called sys.exit({error.code}) while being imported") from error
    except Exception as error:
        raise PluginError(f"{what} could not be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(target, type) and issubclass(target, base)):
        raise PluginError(f"{what} is {type(target).__name__} {target!r}, expected a subclass of {base.__name__}")
    return target
