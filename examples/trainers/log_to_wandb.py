"""Weights & Biases; without a login the run is stored offline in the directory of the run."""

from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

import ikkuna

model = network()
optimizer = sgd(model)
with ikkuna.watch(model, every=1, backend=["wandb", "jsonl"], config={"lr": 0.1}, run_name="digits") as exporter:
    for _ in range(EPOCHS):
        for inputs, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        exporter.epoch_finished()
    exporter.message_bus.run.flush(60)
