"""The tags that TensorBoard shows: few beside the kinds' own groups, however many modules a network has."""

from collections import Counter

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ikkuna


def network(blocks):
    """Return a network with 3 modules and 4 for each block."""
    block = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(blocks)]
    return nn.Sequential(nn.Flatten(), *block, nn.Linear(8, 4), nn.Identity())


@pytest.mark.parametrize("blocks", [2, 20, 200])
def test_only_the_groups_of_kinds_grow_with_the_network(blocks, tmp_path):
    model, loss = network(blocks), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ikkuna.watch(model, loss=loss, log_dir=tmp_path, run_name="run", verbosity=0) as monitor:
        observed = len(monitor.message_bus.network)
        for _ in range(11):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 2, 4)), torch.randint(0, 4, (8,))).backward()
            optimizer.step()
    accumulator = EventAccumulator(str(tmp_path / "run"))
    accumulator.Reload()
    tags = accumulator.Tags()
    groups = Counter(tag.partition("/")[0] for tag in tags["scalars"])
    general = [tag for tag in tags["scalars"] if tag.partition("/")[0] in ("Network", "Dashboard", "Overview")]
    kinds = set(groups) - {"Network", "Dashboard", "Overview"}
    assert observed == 4 * blocks + 3
    assert 20 <= len(general) <= 40
    assert all(blocks <= groups[kind] <= observed for kind in kinds)
    assert "weights_norm2" in kinds
    assert not [tag for tag in tags["scalars"] if "Rules" in tag]
    assert len(tags["images"]) + len(tags["tensors"]) <= 12
