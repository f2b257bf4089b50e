"""Sequences and graphs: language models, recurrence, attention, message passing."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.trial.program import LABELS, Training, mlp, program, sentences, standard


def adam(model, rate=3e-3):
    return torch.optim.Adam(model.parameters(), rate)


def next_word():
    words = sentences()
    return words[:, :-1], words[:, 1:]


def of_words(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


class WordModel(nn.Module):
    """pytorch/examples' word_language_model, with tied weights."""

    def __init__(self, tied=True):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(16, 24), nn.Dropout(0.1)
        self.lstm, self.head = nn.LSTM(24, 24, 2, batch_first=True, dropout=0.1), nn.Linear(24, 16)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words, state=None):
        hidden, state = self.lstm(self.dropout(self.embedding(words)), state)
        return self.head(self.dropout(hidden)), state


@program()
def word_language_model():
    """A word language model: an LSTM with tied embeddings and clipped gradients."""
    model = WordModel()
    clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.25)  # noqa: E731
    return standard(model, adam(model, 1e-2), next_word, lambda out, y: of_words(out[0], y), clip=clip)


@program()
def truncated_backpropagation():
    """Truncated backpropagation through time: the state is carried over."""
    model = WordModel()
    optimizer, words, carried = adam(model, 1e-2), sentences(8, 13 * 60 + 1), [0, None]

    def step():
        begin, state = carried
        part = words[:, begin : begin + 13]
        output, state = model(part[:, :-1], state)
        carried[:] = begin + 12, tuple(each.detach() for each in state)
        optimizer.zero_grad()
        loss = of_words(output, part[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


class Block(nn.Module):
    """nanoGPT's block."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        samples, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, 2)
        q, k, v = (each.view(samples, length, self.heads, -1).transpose(1, 2) for each in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        return x + self.mlp(self.before_mlp(x))


class SmallGPT(nn.Module):
    """nanoGPT: tied weights, a loss inside the model."""

    def __init__(self, width=24, depth=2, words=16):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.apply(self.initialise)
        self.words.weight = self.head.weight

    @staticmethod
    def initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, words, targets=None):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else of_words(logits, targets)


def decayed(model):
    large = [p for p in model.parameters() if p.dim() > 1]
    small = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, 3e-3, betas=(0.9, 0.95))


@program()
def nano_gpt():
    """nanoGPT: the model computes its loss; decay for matrices only; warm-up and cosine."""
    model = SmallGPT()
    optimizer = decayed(model)
    rates = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, 10),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, rates, [10])

    def step():
        _, loss = model(*next_word())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return Training(model, step)


@program(told=("no loss is seen in the evaluations of the loop",))
def small_gpt_with_sampling():
    """minGPT: between steps it writes text in evaluation mode."""
    model, drawn = SmallGPT(), iter(range(10**9))

    def after():
        if next(drawn) % 20 == 19:
            model.eval()
            words = torch.zeros(1, 1, dtype=torch.long)
            with torch.no_grad():
                for _ in range(8):
                    logits, _ = model(words)
                    words = torch.cat([words, torch.multinomial(logits[:, -1].softmax(1), 1)], 1)
            model.train()

    return standard(model, decayed(model), next_word, lambda out, y: of_words(out[0], y), after=after)


class Experts(nn.Module):
    """A mixture of experts, the two best for each token, with a balancing loss."""

    def __init__(self, width=16, number=4):
        super().__init__()
        self.embedding, self.router = nn.Embedding(16, width), nn.Linear(width, number)
        self.experts = nn.ModuleList(mlp(width, 32, width) for _ in range(number))
        self.head = nn.Linear(width, 16)

    def forward(self, words):
        x = self.embedding(words).flatten(0, 1)
        shares, chosen = self.router(x).softmax(1).topk(2)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            if len(tokens):
                mixed = mixed.index_add(0, tokens, shares[tokens, place, None] * expert(x[tokens]))
        used = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        return self.head(x + mixed), (used * self.router(x).softmax(1).mean(0)).sum()


@program()
def mixture_of_experts():
    """A mixture of four experts; some get no token in some steps; the router is called twice."""
    model = Experts()
    return standard(model, adam(model), next_word, lambda out, y: F.cross_entropy(out[0], y.flatten()) + 0.1 * out[1])


class Translation(nn.Module):
    """An encoder and a decoder with attention."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(16, 16, padding_idx=0), nn.Embedding(17, 16)
        self.encoder, self.decoder = nn.GRU(16, 16, batch_first=True), nn.GRU(16, 16, batch_first=True)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(32, 16)

    def forward(self, source, target, lengths):
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        encoded, state = self.encoder(packed)
        encoded, _ = pad_packed_sequence(encoded, batch_first=True, total_length=source.shape[1])
        decoded, _ = self.decoder(self.target(target), state)
        context, _ = self.attention(decoded, encoded, encoded, key_padding_mask=source == 0)
        return self.head(torch.cat([decoded, context], 2))


@program()
def translation():
    """A sequence to sequence model with attention and padding; ignored labels."""
    model, loss_of = Translation(), nn.CrossEntropyLoss(ignore_index=0)
    optimizer = adam(model)

    def step():
        lengths = torch.randint(3, 9, (16,))
        source = torch.randint(1, 16, (16, 8)) * (torch.arange(8) < lengths[:, None])
        target = torch.cat([torch.full((16, 1), 16), source[:, :-1]], 1)
        optimizer.zero_grad()
        loss = loss_of(model(source, target, lengths).flatten(0, 1), source.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return Training(model, step, loss_of)


@program()
def padded_transformer():
    """A transformer encoder with padding that classifies sequences."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 16, padding_idx=0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 2)

        def forward(self, words):
            is_padding = words == 0
            hidden = self.encoder(self.embedding(words), src_key_padding_mask=is_padding)
            return self.head(hidden.masked_fill(is_padding[..., None], 0).sum(1) / (~is_padding).sum(1, keepdim=True))

    def batch():
        lengths = torch.randint(3, 9, (16,))
        words = torch.randint(1, 16, (16, 8)) * (torch.arange(8) < lengths[:, None])
        return words, (words[:, 0] > 7).long()

    model = Classifier()
    return standard(model, adam(model), batch, nn.CrossEntropyLoss(), given=True)


@program(told=LABELS)
def connectionist_classification():
    """CTC on frames that repeat letters."""
    model = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 6, 1))
    optimizer, loss_of = adam(model, 1e-2), nn.CTCLoss()

    def step():
        letters = torch.randint(1, 6, (8, 4))
        frames = F.one_hot(letters.repeat_interleave(4, 1), 8).float().mT + 0.2 * torch.randn(8, 8, 16)
        output = model(frames).permute(2, 0, 1).log_softmax(2)
        optimizer.zero_grad()
        loss = loss_of(output, letters, torch.full((8,), 16), torch.full((8,), 4))
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.lstm, self.head = nn.LSTM(8, 8, bidirectional=True, batch_first=True), nn.Linear(16, 3)

    def forward(self, words):
        return self.head(self.lstm(self.embedding(words))[0]).transpose(1, 2)


@program()
def tagging():
    """A bidirectional tagger with labels of classes in the second axis."""
    model = Tagger()

    def batch():
        words = torch.randint(0, 16, (16, 8))
        return words, words.roll(1, 1) % 3

    return standard(model, adam(model, 1e-2), batch, nn.CrossEntropyLoss(), given=True)


@program()
def skip_gram():
    """Word vectors with sparse gradients."""
    model = nn.Sequential(nn.Embedding(64, 8, sparse=True), nn.Linear(8, 64))
    sparse, dense = (
        torch.optim.SparseAdam(model[0].parameters(), 1e-2),
        torch.optim.Adam(model[1].parameters(), 1e-2),
    )

    def step():
        words = torch.randint(0, 64, (32,))
        loss = F.cross_entropy(model(words), (words + 1) % 64)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        return loss

    return Training(model, step)


@program()
def forecast():
    """A forecast of sine waves by an LSTM cell, step by step."""

    class Forecast(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(1, 16), nn.Linear(16, 1)

        def forward(self, x):
            state, outputs = (torch.zeros(len(x), 16), torch.zeros(len(x), 16)), []
            for value in x.unbind(1):
                state = self.cell(value[:, None], state)
                outputs.append(self.head(state[0]))
            return torch.cat(outputs, 1)

    def batch():
        time = torch.arange(21) / 3 + 6.28 * torch.rand(16, 1)
        return time.sin()[:, :-1], time.sin()[:, 1:]

    model = Forecast()
    return standard(model, adam(model, 1e-2), batch, nn.MSELoss(), given=True)


@program()
def reservoir():
    """An echo state network: a fixed recurrent part, a trained readout."""

    class Reservoir(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.readout = nn.RNN(1, 48, batch_first=True).requires_grad_(False), nn.Linear(48, 1)

        def forward(self, x):
            return self.readout(self.inner(x)[0])

    def batch():
        time = torch.arange(21)[:, None] / 3 + 6.28 * torch.rand(16, 1, 1)
        return time.sin()[:, :-1], time.sin()[:, 1:]

    model = Reservoir()
    return standard(model, torch.optim.Adam(model.readout.parameters(), 1e-2), batch, F.mse_loss)


# -- graphs -----------------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A layer of GCN, GIN or GAT on a dense matrix of edges."""

    def __init__(self, kind, width, out):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(width, out) if kind != "gin" else mlp(width, out, out)
        self.weights = nn.Parameter(0.1 * torch.randn(2, out)) if kind == "gat" else None

    def forward(self, x, edges):
        if self.kind == "gcn":
            degree = edges.sum(1).rsqrt()
            return self.linear(degree[:, None] * (edges @ (degree[:, None] * x)))
        if self.kind == "gin":
            return self.linear(edges @ x)
        hidden = self.linear(x)
        scores = F.leaky_relu((hidden @ self.weights[0])[:, None] + (hidden @ self.weights[1])[None], 0.2)
        return F.dropout(scores.masked_fill(edges == 0, -1e9).softmax(1), 0.1, self.training) @ hidden


class GraphNetwork(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = Convolution(kind, 8, 16), Convolution(kind, 16, 3)

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


def nodes(kind, decay=5e-4):
    """Train on half of the nodes of one graph, in full batches."""
    y = torch.randint(0, 3, (48,))
    x = F.one_hot(y, 8).float() + 0.5 * torch.randn(48, 8)
    edges = ((torch.rand(48, 48) < 0.02) | ((y[:, None] == y[None]) & (torch.rand(48, 48) < 0.2))).float()
    edges = ((edges + edges.T) > 0).float().fill_diagonal_(1)
    model = GraphNetwork(kind)
    optimizer, train = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=decay), torch.arange(48) < 24

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edges)[train], y[train])
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program(judged={"repeated_batch": "true: each step has the whole graph"})
def graph_convolutions():
    """A graph convolutional network on one graph."""
    return nodes("gcn")


@program(judged={"repeated_batch": "true: each step has the whole graph"})
def graph_isomorphism():
    """A graph isomorphism network."""
    return nodes("gin")


@program(judged={"repeated_batch": "true: each step has the whole graph"})
def graph_attention():
    """A graph attention network with dropout of edges."""
    return nodes("gat")
