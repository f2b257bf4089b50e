"""Subscribers: the base classes, and every installed metric by its class name.

``from ikkuna.export.subscriber import NormSubscriber`` finds the plugin `NormSubscriber` through its entry point and loads it.
Importing this package loads no plugin; ``from ikkuna.export.subscriber import *`` loads all of them.
"""

from typing import TYPE_CHECKING, Any

from ikkuna.errors import PluginError, unknown_name
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.bases import CallbackSubscriber, PlotSubscriber, SharedStatisticSubscriber, name_results
from ikkuna.metrics.subscriber.state import DeferredRow
from ikkuna.metrics.subscriber.subscription import Subscription, SynchronizedSubscription
from ikkuna.store.quantity import Quantity
from ikkuna.support.device_thread import Pending
from ikkuna.support.plugins import load_plugin, plugin_names

if TYPE_CHECKING:
    __all__ = [
        "GROUP",
        "CallbackSubscriber",
        "DeferredRow",
        "Pending",
        "PlotSubscriber",
        "Quantity",
        "SharedStatisticSubscriber",
        "Subscriber",
        "Subscription",
        "SynchronizedSubscription",
        "name_results",
    ]

GROUP = "ikkuna.export.subscriber"


_OWN = (
    *("GROUP", "CallbackSubscriber", "DeferredRow", "Pending", "PlotSubscriber", "Quantity"),
    *("SharedStatisticSubscriber", "Subscriber", "Subscription", "SynchronizedSubscription", "name_results"),
)


def __getattr__(name: str) -> Any:
    if name == "__all__":  # of a star import, which loads every installed metric
        return [*_OWN, *sorted(plugin_names(GROUP))]
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in plugin_names(GROUP):
        return load_plugin(GROUP, name, Subscriber)
    text = unknown_name("subscriber", name, sorted(plugin_names(GROUP)))
    if name.endswith("Subscriber"):
        raise PluginError(text)  # a from-import would replace the text of an AttributeError
    raise AttributeError(text)


def __dir__() -> list[str]:
    return sorted((*_OWN, *plugin_names(GROUP)))
