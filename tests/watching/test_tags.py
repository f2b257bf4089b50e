"""The number of tags that TensorBoard shows."""

from collections import Counter

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ikkuna


@pytest.mark.parametrize("blocks", [6, 40])
def test_only_the_groups_of_kinds_grow_with_the_number_of_modules(blocks, tmp_path):
    layers = [module for _ in range(blocks) for module in (nn.Linear(4, 4), nn.ReLU())]
    model, loss = nn.Sequential(*layers, nn.Linear(4, 3)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ikkuna.watch(model, loss=loss, log_dir=tmp_path, verbosity=0) as watched:
        for _ in range(11):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
            optimizer.step()
    tags = EventAccumulator(str(tmp_path / "run0001"), size_guidance={"scalars": 1}).Reload().Tags()["scalars"]
    groups = Counter(tag.partition("/")[0] for tag in tags)
    kinds = set(watched.read().module_kinds())
    assert sum(count for group, count in groups.items() if group not in kinds) <= 40
    assert groups.keys() <= kinds | {"Network", "Dashboard", "Overview"}
    assert all(groups[kind] <= 2 * blocks + 1 for kind in kinds)
