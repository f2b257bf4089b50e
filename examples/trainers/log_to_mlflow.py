"""MLflow; a server or store is chosen by the environment variable MLFLOW_TRACKING_URI."""

from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

import ikkuna

model = network()
optimizer = sgd(model)
with ikkuna.watch(model, every=1, backend=["mlflow", "jsonl"], config={"lr": 0.1}, run_name="digits") as exporter:
    for _ in range(EPOCHS):
        for inputs, labels in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        exporter.epoch_finished()
    exporter.message_bus.run.flush(60)
