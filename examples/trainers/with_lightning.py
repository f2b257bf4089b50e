"""Lightning's Trainer and its TensorBoardLogger, which shows the metrics too."""

import os

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from task import EPOCHS, batches, network, sgd
from torch.nn import functional as F

from ikkuna.integrations.lightning import IkkunaCallback


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return sgd(self)


logger = TensorBoardLogger(".", "lightning_logs", version=0)
callbacks = [IkkunaCallback(every=1, backend=[logger.experiment, "tb", "jsonl"]), ModelCheckpoint("saved", "digits")]
trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", logger=logger, callbacks=callbacks)
trainer.fit(Digits(), batches(), ckpt_path="saved/digits.ckpt" if os.path.exists("saved/digits.ckpt") else None)
