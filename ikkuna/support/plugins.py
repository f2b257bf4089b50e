"""Finds plugins through entry points, one distribution at a time, and loads each on its first use.

Importing ikkuna loads no plugin.  The error about a broken plugin names its distribution and the cause.
A distribution whose metadata cannot be read is skipped with a warning.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from ikkuna.errors import PluginError, unknown_name
from ikkuna.support.failures import log

_GROUPS = "ikkuna."  # the beginning of the names of all groups


def plugins(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; a name of several distributions has several entry points.

    If a distribution is found in two places, as editable installs are, the first one counts.
    The result is cached: a distribution that is installed later is found by the next process.
    """
    return _plugins().get(group, {})


@cache
def _plugins() -> dict[str, dict[str, tuple[EntryPoint, ...]]]:
    """Return the entry points of each group by name; reads the metadata of every distribution, once."""
    found: dict[str, dict[str, tuple[EntryPoint, ...]]] = defaultdict(dict)
    seen: set[str] = set()
    for distribution in distributions():
        try:
            points = _points(distribution)
        except Exception as error:
            text = "the entry points of %s cannot be read, its plugins are ignored: %s: %s"
            log.warning(text, _name(distribution), type(error).__name__, error)
            continue
        if not points or (name := re.sub("[-_.]+", "-", _name(distribution)).lower()) in seen:
            continue
        seen.add(name)
        for point in points:
            if point.name.isidentifier() and not point.name.startswith("_"):
                group = found[point.group]
                group[point.name] = (*group.get(point.name, ()), point)
            else:
                log.warning("the plugin name %r of %s is not a public identifier; ignored", point.name, _origin(point))
    return found


def _points(distribution: Distribution) -> list[EntryPoint]:
    text = distribution.read_text("entry_points.txt")
    if text is None or _GROUPS not in text:  # most distributions need no parsing
        return []
    return [point for point in distribution.entry_points if point.group.startswith(_GROUPS)]


def _name(distribution: Distribution | None) -> str:
    """Return the name of a distribution, or that of its directory if its metadata is damaged."""
    try:
        name = distribution.metadata["Name"] if distribution else None
    except Exception:
        name = None
    directory = getattr(distribution, "_path", None)
    return name or (directory.name if directory else "an unknown distribution")


def _origin(point: EntryPoint) -> str:
    try:
        version = point.dist.version if point.dist else None
    except Exception:
        version = None
    return f"{_name(point.dist)} {version}" if version else _name(point.dist)


def plugin_names(group: str) -> frozenset[str]:
    """Return the names of a group's plugins without loading them."""
    return frozenset(plugins(group))


def load_plugin(group: str, name: str, base: type) -> Any:
    """Import the plugin `name` of a group and check that it is a subclass of `base`.

    Raises
    ------
    PluginError
        If no distribution or more than one has a plugin of this name, if its import fails, or if it is no subclass of `base`.
        The message names the distribution and the cause.
    """
    points = plugins(group).get(name, ())
    if not points:
        raise PluginError(unknown_name(base.__name__.lower(), name, sorted(plugin_names(group))))
    if len(points) > 1:
        offers = ", ".join(f"{_origin(point)} ({point.value})" for point in points)
        raise PluginError(f"several distributions have a plugin {name!r}: {offers}; uninstall all but one")
    (point,) = points

    def problem(text: str) -> PluginError:  # reads the metadata of the distribution only now
        return PluginError(f"plugin {name!r} from distribution {_origin(point)} ({point.value}) {text}")

    try:
        target = point.load()
    except SystemExit as error:
        raise problem(f"called sys.exit({error.code}) while being imported") from error
    except Exception as error:
        raise problem(f"could not be imported: {type(error).__name__}: {error}") from error
    if not isinstance(target, type):
        raise problem(f"is of type {type(target).__name__}, expected a subclass of {base.__name__}")
    if not issubclass(target, base):
        raise problem(f"is the class {target.__qualname__}, expected a subclass of {base.__name__}")
    return target


def import_extra(name: str) -> Any:
    """Import a module of an optional dependency.

    Raises
    ------
    PluginError
        If it is not installed; the message names the extra.
    """
    try:
        return import_module(name)
    except ImportError as error:
        extra = name.partition(".")[0]
        raise PluginError(f'{name} cannot be imported ({error}); pip install "ikkuna[{extra}]"') from error
