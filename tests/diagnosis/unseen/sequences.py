"""Faults in language models and recurrent networks."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault
from tests.diagnosis.unseen.programs import (
    RecurrentClassifier,
    Transformer,
    language_model,
    loader,
    recurrent,
    signals,
    text,
)

# --- language models --------------------------------------------------------------------------------------------------


@fault(
    "language models",
    "the attention has no causal mask and sees the tokens that it predicts",
    module="blocks.0.attention",
)
def no_causal_mask():
    return language_model(Transformer(causal=False))


@fault("language models", "the causal mask is inverted: a position sees the future only", module="blocks.0.attention")
def inverted_mask():
    model = Transformer()
    for block in model.blocks:
        block.attention.mask = lambda length: torch.ones(length, length).tril(-1).bool()
    return language_model(model)


@fault("language models", "padding counts in the loss: most labels are the padding token")
def padding_in_the_loss():
    tokens = text()
    lengths = torch.randint(3, 8, (len(tokens), 1))
    tokens[torch.arange(tokens.shape[1])[None] >= lengths] = 0
    return language_model(data=loader(tokens[:, :-1], tokens[:, 1:], batch=24))


class NoPositions(Transformer):
    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@fault("language models", "the position embedding is never added", module="position")
def positions_not_added():
    return language_model(NoPositions())


class TransposedOutput(Transformer):
    def forward(self, tokens):
        return super().forward(tokens).transpose(0, 1)


@fault("language models", "outputs are (time, batch), labels are (batch, time), and both are flattened")
def flattened_in_different_order():
    tokens = text()
    return language_model(TransposedOutput(), loader(tokens[:, :-1], tokens[:, 1:], batch=16))


@fault("language models", "padding_idx is a common word, whose embedding is never trained", module="embedding")
def padding_index_of_a_word():
    model, tokens = Transformer(), text()
    model.embedding = nn.Embedding(20, 24, padding_idx=int(tokens.flatten().bincount().argmax()))
    return language_model(model, loader(tokens[:, :-1], tokens[:, 1:], batch=24))


@fault("language models", "the softmax of the attention runs over the queries", module="blocks.0.attention")
def softmax_over_queries():
    return language_model(Transformer(dim=-2))


@fault(
    "language models",
    "scores are multiplied by the root of the width: the attention is saturated",
    module="blocks.0.attention",
)
def scores_multiplied():
    model = Transformer()
    for block in model.blocks:
        block.attention.scale = 24.0**1.5
    return language_model(model)


@fault(
    "language models",
    "the last norm has a weight of zero and gets no chance: it is left out of the optimizer",
    module="norm",
)
def norm_left_out():
    program = language_model()
    nn.init.zeros_(program.model.norm.weight)
    kept = [p for name, p in program.model.named_parameters() if not name.startswith("norm.")]
    program.optimizer = torch.optim.Adam(kept, lr=3e-3)
    return program


# --- recurrent networks -----------------------------------------------------------------------------------------------


class Carried(RecurrentClassifier):
    hidden = None

    def forward(self, x):
        output, hidden = self.rnn(
            x, self.hidden if self.hidden is not None and self.hidden.shape[1] == len(x) else None
        )
        self.hidden = hidden.detach()
        return self.head(output[:, -1])


@fault("recurrent networks", "the hidden state of one batch of shuffled rows is passed to the next", module="rnn")
def state_of_another_batch():
    return recurrent(Carried())


class FirstOutput(RecurrentClassifier):
    def forward(self, x):
        return self.head(self.rnn(x)[0][:, 0])


@fault(
    "recurrent networks",
    "the output of the first time step is classified, so that all later ones are ignored",
    module="rnn",
)
def first_output():
    return recurrent(FirstOutput())


@fault("recurrent networks", "recurrent weights far above 1 make gradients explode through time", module="rnn")
def exploding_in_time():
    model = RecurrentClassifier(kind=nn.RNN)
    model.rnn = nn.RNN(3, 24, batch_first=True, nonlinearity="relu")
    nn.init.normal_(model.rnn.weight_hh_l0, std=1.0)
    return recurrent(model, loader(*signals(length=30)))


class Padded(RecurrentClassifier):
    """The output at the last time step, which is padding for most rows."""


@fault(
    "recurrent networks",
    "the last time step is padding in most rows, and its output is classified",
    module="rnn",
    knowable=True,
)
def last_output_is_padding():
    waves, labels = signals()
    waves = torch.cat([waves, torch.zeros(len(waves), 30, 3)], 1)
    return recurrent(Padded(), loader(waves, labels))


class SharedState(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(3, 24), nn.Linear(24, 3)

    def forward(self, x):
        hidden = torch.zeros(len(x), 24)
        for _ in range(x.shape[1]):
            hidden = self.cell(x[:, 0], hidden)
        return self.head(hidden)


@fault("recurrent networks", "the loop reads the first time step again and again", module="cell")
def loop_without_its_index():
    return recurrent(SharedState())


@fault("recurrent networks", "saturated gates: the biases of an LSTM start at 20", module="rnn")
def saturated_gates():
    model = RecurrentClassifier(kind=nn.LSTM)
    nn.init.constant_(model.rnn.bias_ih_l0, 20.0)
    return recurrent(model)


class Smooth(RecurrentClassifier):
    def forward(self, x):
        return F.log_softmax(super().forward(x), 0)


@fault("recurrent networks", "log_softmax over the batch axis before the negative log likelihood")
def log_softmax_over_the_batch():
    return recurrent(Smooth(), loss=nn.NLLLoss())
