"""A tracking service that is not installed is an error at set-up."""

import sys

import pytest

from ikkuna.errors import PluginError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_extra_is_named_when_the_subscriber_is_registered(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    with Exporter(message_bus=MessageBus(), log_dir=tmp_path) as exporter:
        with pytest.raises(PluginError, match=rf'pip install "ikkuna\[{name}\]"'):
            exporter.message_bus.register_subscriber(NormSubscriber("weights", backend=name))
        assert not exporter.message_bus.registered
    assert not list(tmp_path.iterdir())
