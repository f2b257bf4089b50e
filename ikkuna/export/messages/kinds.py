"""The old place of the kinds, until every import has been changed."""

from ikkuna.export.message.kinds import (
    BUILT_IN,
    EVENT_KINDS,
    FORWARD_KINDS,
    MEASURED_TOGETHER,
    MICRO_KINDS,
    MODULE_KINDS,
    NETWORK_KINDS,
    PARAMETER_KINDS,
    STATE_PREFIXES,
    is_built_in,
    is_of_module,
)

__all__ = [
    "BUILT_IN",
    "EVENT_KINDS",
    "FORWARD_KINDS",
    "MEASURED_TOGETHER",
    "MICRO_KINDS",
    "MODULE_KINDS",
    "NETWORK_KINDS",
    "PARAMETER_KINDS",
    "STATE_PREFIXES",
    "is_built_in",
    "is_of_module",
]
