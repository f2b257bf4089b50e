"""Ignite; the exporter is one of the objects that its Checkpoint saves and loads."""

import glob

import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

import ikkuna

model = network()
optimizer = sgd(model)
exporter = ikkuna.watch(model, every=1, backend=["tb", "jsonl"], resume="auto")
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
trainer.add_event_handler(Events.EPOCH_COMPLETED, exporter.epoch_finished)
objects = {"model": model, "optimizer": optimizer, "trainer": trainer, "monitor": exporter}
checkpoint = Checkpoint(objects, DiskSaver("saved", require_empty=False), filename_pattern="{name}.{ext}")
trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
for path in glob.glob("saved/checkpoint.pt"):
    Checkpoint.load_objects(objects, torch.load(path))
trainer.run(batches(), max_epochs=EPOCHS)
exporter.close()
