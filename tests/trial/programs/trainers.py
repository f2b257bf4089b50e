"""Trainers of other projects: Lightning, transformers, accelerate, ignite, skorch.  One iteration is the whole training."""

import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.trial.program import LABELS, Training, blobs, mlp, program


def loader(samples=320, size=16):
    return DataLoader(TensorDataset(*blobs(samples)), size, shuffle=True)


def fit(module, **options):
    import lightning

    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader())


# Lightning calls the model in a closure, of which the reference does not know the last evaluation
@program(40, 1, needs=["lightning"], layers=False)
def lightning_classifier():
    """A Lightning module with an automatic loop, two epochs."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = mlp(8, 32, 3)

        def training_step(self, batch, _):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 3e-3)

    module = Classifier()
    return Training(module, lambda: fit(module, max_epochs=2))


@program(20, 1, needs=["lightning"], layers=False)
def lightning_accumulation():
    """Lightning with accumulation, clipping and bfloat16."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = mlp(8, 32, 3)

        def training_step(self, batch, _):
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 3e-3)

    module = Classifier()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "precision": "bf16-mixed", "max_epochs": 2}
    return Training(module, lambda: fit(module, **options))


@program(40, 1, needs=["lightning"], layers=False, told=LABELS)
def lightning_adversaries():
    """A GAN with Lightning's manual optimization."""
    import lightning

    class Adversaries(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = mlp(4, 32, 8), mlp(8, 32, 1)

        def training_step(self, batch, _):
            of_generator, of_critic = self.optimizers()
            fake = self.generator(torch.randn(len(batch[0]), 4))
            loss = F.softplus(-self.critic(batch[0])).mean() + F.softplus(self.critic(fake.detach())).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            of_critic.step()
            of_generator.zero_grad()
            self.manual_backward(F.softplus(-self.critic(fake)).mean())
            of_generator.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.critic)]

    module = Adversaries()
    return Training(module, lambda: fit(module, max_epochs=1))


@program(40, 1, needs=["transformers", "accelerate"])
def transformers_trainer():
    """The trainer of transformers with a small GPT-2, two micro-batches a step."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    words = (torch.randint(0, 32, (320, 1)) + 2 * torch.arange(12)) % 32
    data = [{"input_ids": row, "labels": row} for row in words]

    def step():
        with tempfile.TemporaryDirectory() as directory:
            arguments = transformers.TrainingArguments(
                directory,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                max_steps=40,
                learning_rate=3e-3,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
                seed=3,
            )
            transformers.Trainer(model, arguments, train_dataset=data).train()

    return Training(model, step)


@program(40, 1, needs=["accelerate"])
def accelerate_loop():
    """A loop with accelerate: accumulation and clipping."""
    from accelerate import Accelerator

    model = mlp(8, 32, 3)

    def step():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared, optimizer, batches = accelerator.prepare(
            model, torch.optim.Adam(model.parameters(), 3e-3), loader(640, 8)
        )
        losses = []
        for x, y in batches:
            with accelerator.accumulate(prepared):
                loss = F.cross_entropy(prepared(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach() / 2)
        return [one + other for one, other in zip(losses[::2], losses[1::2], strict=True)]

    return Training(model, step)


@program(40, 1, needs=["ignite"])
def ignite_engine():
    """An engine of ignite with an evaluator after each epoch."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Accuracy

    model, loss = mlp(8, 32, 3), nn.CrossEntropyLoss()

    def step():
        trainer = create_supervised_trainer(model, torch.optim.Adam(model.parameters(), 3e-3), loss)
        evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()})
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loader(64)))
        trainer.run(loader(), max_epochs=2)

    return Training(model, step, loss)


# skorch calls the model in a closure, too
@program(32, 1, needs=["skorch"], layers=False)
def skorch_classifier():
    """A classifier of skorch with its validation split."""
    from skorch import NeuralNetClassifier

    model = mlp(8, 32, 3)
    x, y = blobs(320)
    net = NeuralNetClassifier(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=3e-3,
        batch_size=16,
        max_epochs=2,
        verbose=0,
        iterator_train__shuffle=True,
    )
    net.initialize()

    def step():
        net.partial_fit(x.numpy(), y.numpy().astype(np.int64))

    return Training(net.module_, step)
