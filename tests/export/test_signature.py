"""A person who asks for help reads the arguments of the constructor."""

import inspect

import pytest

from ikkuna.export import subscriber
from ikkuna.support.plugins import plugin_names


@pytest.mark.parametrize("name", [*sorted(plugin_names(subscriber.GROUP)), "Subscriber", "CallbackSubscriber"])
def test_the_signature_of_a_subscriber_is_that_of_its_constructor(name):
    metric = getattr(subscriber, name)
    assert list(inspect.signature(metric).parameters) == list(inspect.signature(metric.__init__).parameters)[1:]


def test_the_order_of_a_norm_is_there_to_be_found():
    assert list(inspect.signature(subscriber.NormSubscriber).parameters)[:2] == ["kind", "p"]
