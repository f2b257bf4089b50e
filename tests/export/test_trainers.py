"""Other people's loops: each test is a trainer, the first line of its docstring how it is watched."""

import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import LossSubscriber, NormSubscriber
from ikkuna.support.modules import unwrap
from ikkuna.testing import RecordingBackend

KINDS = ("weights", "weight_gradients", "weight_updates", "activations", "layer_gradients")


def data() -> TensorDataset:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


class Witness:
    """Computes the values expected of a first layer by other means: its outputs between the steps of any optimizer.

    Parameters
    ----------
    layer : nn.Module
        The first layer.
    last : bool
        Whether only the last output of each step counts.
    """

    def __init__(self, layer: nn.Module, last: bool = False) -> None:
        self.squares: list[list[float]] = [[]]
        self._last = last
        layer.register_forward_hook(self._see)
        self._handle = register_optimizer_step_post_hook(lambda *_: self.squares.append([]))

    def _see(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            self.squares[-1].append(output.detach().double().square().sum().item())

    def norms(self) -> list[float]:
        self._handle.remove()
        return [sum(seen[-1:] if self._last else seen) ** 0.5 for seen in self.squares if seen]


Train = Callable[[Callable[..., None]], nn.Module]


def check(train: Train, layer: str, *, last: bool = False, missing: int = 0, loss: bool = True) -> None:
    """Train with and without an exporter and compare: weights bit for bit, steps, and values of one layer.

    Parameters
    ----------
    train : callable
        ``train(watch) -> model`` calls ``watch(model, loss)`` once before it trains.
    layer : str
        Name of the layer to compare.
    last : bool
        See `Witness`.
    missing : int
        How many steps may be without forwards at the start.
    loss : bool
        Whether a loss is shown.
    """
    torch.manual_seed(3)
    alone = train(lambda model, loss=None: None)
    backend, made = RecordingBackend(), []

    def watch(model: nn.Module, loss: nn.Module | None = None) -> None:
        exporter = Exporter(message_bus=MessageBus(), on_error="raise")
        exporter.add_modules(model)
        made.append((exporter, Witness(unwrap(model).get_submodule(layer), last)))
        for kind in KINDS:
            exporter.message_bus.register_subscriber(NormSubscriber(kind, backend=backend))
        if loss is not None:
            exporter.set_loss(loss)
            exporter.message_bus.register_subscriber(LossSubscriber(backend=backend))

    torch.manual_seed(3)
    watched = train(watch)
    [(exporter, witness)] = made
    exporter.close()
    norms = witness.norms()
    for one, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    shown: dict[str, dict[int, float]] = {}
    for series, value, step in backend.values:
        if series.name in (None, layer):
            shown.setdefault(series.kind, {})[step] = value
    steps = list(range(len(norms)))
    for kind in KINDS:
        is_forward = kind in ("activations", "layer_gradients")
        assert list(shown[f"{kind}_norm2"]) == steps[missing if is_forward else 0 :]
    expected = dict(list(enumerate(norms))[missing:])
    assert shown["activations_norm2"] == pytest.approx(expected, rel=1e-6)
    assert not loss or list(shown["loss"]) == steps[missing:]


@functools.cache
def lightning_module() -> type:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], automatic: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net, self.loss, self.optimizer = network(), nn.CrossEntropyLoss(), optimizer
            self.automatic_optimization = automatic

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.loss(self.net(batch[0]), batch[1])
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> object:
            optimizer = self.optimizer(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return Module


def lightning_loop(
    whole: bool, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, automatic: bool = True, **options
) -> Train:
    """Return a training by Lightning in which the whole module, or the network inside, is watched."""

    def train(watch: Callable[..., None]) -> nn.Module:
        import lightning

        module = lightning_module()(optimizer, automatic)
        watch(module if whole else module.net, module.loss)
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
        )
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet, **options)
        trainer.fit(module, DataLoader(data(), 8, shuffle=True), DataLoader(data(), 32))
        return module

    return train


@pytest.mark.parametrize("whole", [False, True], ids=["network", "module"])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=repr)
def test_lightning(whole, options):
    """The ``LightningModule`` or the inner network, added before ``Trainer.fit``; validation is not included."""
    check(lightning_loop(whole, **options), "net.0" if whole else "0")


@pytest.mark.parametrize("whole", [False, True], ids=["network", "module"])
def test_lightning_accumulation(whole):
    """All batches of a step; for a ``LightningModule`` without ``forward``, from the second step on."""
    check(lightning_loop(whole, accumulate_grad_batches=3), "net.0" if whole else "0", missing=int(whole))


@pytest.mark.parametrize("whole", [False, True], ids=["network", "module"])
def test_lightning_closures(whole):
    """The last evaluation of each step."""
    check(lightning_loop(whole, torch.optim.LBFGS), "net.0" if whole else "0", last=True)


def test_lightning_manual_optimization():
    """As in a handwritten loop."""
    check(lightning_loop(False, automatic=False), "0")


@pytest.mark.parametrize("first", [False, True])
def test_fabric(first):
    """The model, added before or after ``Fabric.setup``."""
    import lightning

    def train(watch: Callable[..., None]) -> nn.Module:
        fabric, loss_of = lightning.Fabric(accelerator="cpu", devices=1), nn.CrossEntropyLoss()
        plain = network()
        if first:
            watch(plain, loss_of)
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        if not first:
            watch(model, loss_of)
        for inputs, labels in DataLoader(data(), 8):
            fabric.backward(loss_of(model(inputs), labels))
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        return plain

    check(train, "0")


def test_transformers_trainer(tmp_path):
    """The model, added before ``train()``; the loss is computed inside the model, not by a loss module."""
    import transformers

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    texts = torch.randint(50, (32, 12), generator=torch.Generator().manual_seed(0))
    items = [{"input_ids": text, "labels": int(i % 2)} for i, text in enumerate(texts)]

    def train(watch: Callable[..., None]) -> nn.Module:
        model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **shape))
        watch(model)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            num_train_epochs=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        transformers.Trainer(model, arguments, train_dataset=items, eval_dataset=items[:8]).train()
        return model

    check(train, "bert.encoder.layer.0.output.dense", loss=False)


@pytest.mark.parametrize("first", [False, True])
def test_accelerate(first):
    """The model, added before or after ``prepare``; accumulation and clipping work as in other loops."""
    import accelerate

    def train(watch: Callable[..., None]) -> nn.Module:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        plain, loss_of = network(), nn.CrossEntropyLoss()
        if first:
            watch(plain, loss_of)
        model, optimizer, batches = accelerator.prepare(
            plain, torch.optim.AdamW(plain.parameters(), lr=0.01), DataLoader(data(), 8)
        )
        if not first:
            watch(model, loss_of)
        for inputs, labels in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(inputs), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return plain

    check(train, "0")


def test_ignite():
    """The model that the engine's update function trains."""
    from ignite.engine import create_supervised_trainer

    def train(watch: Callable[..., None]) -> nn.Module:
        model, loss = network(), nn.CrossEntropyLoss()
        watch(model, loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = create_supervised_trainer(model, optimizer, loss, gradient_accumulation_steps=2)
        engine.run(DataLoader(data(), 8), max_epochs=2)
        return model

    check(train, "0")


def test_skorch():
    """``net.module_`` after ``net.initialize()``, with ``net.criterion_`` as the loss, then ``partial_fit``."""
    from skorch import NeuralNetClassifier

    inputs, labels = data().tensors

    def train(watch: Callable[..., None]) -> nn.Module:
        net = NeuralNetClassifier(network, criterion=nn.CrossEntropyLoss, max_epochs=2, lr=0.1, batch_size=8, verbose=0)
        net.initialize()
        watch(net.module_, net.criterion_)
        net.partial_fit(inputs.numpy(), labels.numpy())
        return net.module_

    check(train, "0")
