"""Train and monitor a character transformer on the help texts of Python.  Lines of ikkuna are marked with # *."""

import sys
from pydoc_data.topics import topics

import torch
from table import print_table
from torch import nn

from ikkuna.export import Exporter  # *
from ikkuna.export.subscriber import LossSubscriber, MeanSubscriber, NormSubscriber, RatioSubscriber  # *

CONTEXT = 64


class CharTransformer(nn.Module):
    def __init__(self, vocabulary, width=64, layers=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.blocks(self.tokens(text) + self.positions, mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def main(steps=200, log_dir="run"):
    torch.manual_seed(0)
    text = "\n".join(topics.values())
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text[:200_000]])
    model, loss_function = CharTransformer(len(alphabet)), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with Exporter(log_dir=log_dir) as exporter:  # *
        exporter.add_modules(model)  # *
        exporter.set_loss(loss_function)  # *
        for subscriber in (  # *
            LossSubscriber(),  # *
            NormSubscriber("weights", every=10),  # *
            NormSubscriber("layer_gradients", every=10),  # *
            MeanSubscriber("activations", every=10),  # *
            RatioSubscriber(["weight_updates", "weights"], every=10),  # *
        ):
            exporter.message_bus.register_subscriber(subscriber)  # *
        for _ in range(steps):
            starts = torch.randint(0, len(data) - CONTEXT - 1, (16, 1))
            window = data[starts + torch.arange(CONTEXT + 1)]
            optimizer.zero_grad()
            loss_function(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()).backward()
            optimizer.step()
    print_table(log_dir, ["weights_norm2", "weight_updates_weights_ratio", "layer_gradients_norm2"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:3])
