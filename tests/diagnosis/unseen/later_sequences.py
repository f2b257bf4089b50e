"""Faults of the later set: language models, recurrent networks, audio, time series and graphs."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.diagnosis.unseen import fault, healthy
from tests.diagnosis.unseen.programs import (
    RecurrentClassifier,
    Transformer,
    classifier,
    graph,
    language_model,
    loader,
    mlp,
    program,
    recurrent,
    regressor,
    signals,
    text,
)

# --- language models --------------------------------------------------------------------------------------------------


@fault(
    "language models",
    "the head shares the weights of an embedding with a spread of one, so that the first logits are huge",
    "embedding",
    why="the first loss is many times the logarithm of the number of words",
)
def tied_to_an_embedding_of_unit_spread():
    model = Transformer(width=96, layers=1)
    model.head.weight = model.embedding.weight
    return language_model(model, epochs=4, rate=1e-3)


@fault(
    "language models",
    "the embedding's weights are copied to the head as data, so that two parameters share one memory",
    "head",
    why="two parameters of the model use the same storage, and the optimizer updates it twice",
)
def tied_by_data():
    model = Transformer()
    nn.init.normal_(model.embedding.weight, std=0.1)
    model.head.weight.data = model.embedding.weight.data
    return language_model(model, epochs=5)


@fault(
    "language models",
    "the numbers of the positions are added to the embeddings, which they exceed many times",
    "embedding",
    why="the inputs of the first block are the same for all words at a position, but for a small part",
)
def numbers_of_positions_added():
    class Numbered(Transformer):
        def __init__(self):
            super().__init__()
            nn.init.normal_(self.embedding.weight, std=0.02)
            del self.position

        def forward(self, tokens):
            x = self.embedding(tokens) + torch.arange(tokens.shape[1])[:, None].float()
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return language_model(Numbered())


class Heads(nn.Module):
    """Causal attention with several heads."""

    def __init__(self, width, heads, transposed):
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.transposed = heads, transposed

    def split(self, x):
        rows, length, width = x.shape
        if self.transposed:
            return x.reshape(rows, length, self.heads, width // self.heads).transpose(1, 2)
        return x.reshape(rows, self.heads, length, width // self.heads)

    def forward(self, x):
        queries, keys, values = (self.split(part) for part in self.mix(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


def with_heads(transposed):
    model = Transformer()
    for block in model.blocks:
        block.attention = Heads(24, 4, transposed)
    return language_model(model)


@fault(
    "language models",
    "the heads are split by a view without a transpose, which mixes positions, so that the causal mask leaks",
    "blocks.0.attention",
    why="the output at a position depends on later words",
)
def heads_split_by_a_view():
    return with_heads(transposed=False)


@healthy("language models")
def heads_split_by_a_transpose():
    return with_heads(transposed=True)


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.embedding = nn.Embedding(20, 24)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(24, 2)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def pairs_of_words(model):
    tokens = torch.randint(1, 20, (512, 12))
    labels = ((tokens == 3).any(1) & (tokens == 5).any(1)).long()
    labels[:256] = 1
    tokens[:256, :2] = torch.tensor([3, 5])
    return classifier(model, loader(tokens[:, torch.randperm(12)], labels))


@fault(
    "language models",
    "the encoder layer expects the time first and gets the batch first, so that rows attend to other rows",
    "layer",
    why="the output of a row depends on the other rows of the batch",
)
def attention_over_the_rows():
    return pairs_of_words(Encoder(batch_first=False))


@healthy("language models")
def attention_over_the_words():
    return pairs_of_words(Encoder(batch_first=True))


@fault(
    "language models",
    "the vocabulary is that of another tokenizer, so that nearly all words are the unknown word",
    "embedding",
    why="nineteen tokens in twenty have the same number",
)
def nearly_all_words_unknown():
    tokens = text()
    labels = tokens[:, 1:].clone()
    tokens[torch.rand(tokens.shape) < 0.95] = 1
    return language_model(data=loader(tokens[:, :-1], labels, batch=24))


@fault(
    "language models",
    "rows that consist of padding are masked completely, so that their attention is not a number",
    "attention",
    why="the first value that is not finite comes from the softmax of a row whose scores are all minus infinity",
)
def rows_masked_completely():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 24, padding_idx=0), nn.Linear(24, 20)
            self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(x + self.attention(x, x, x, key_padding_mask=tokens == 0)[0])

    tokens = text()[:, :-1]
    tokens[5::37] = 0
    labels = (7 * tokens % 20).masked_fill(tokens == 0, -100)
    return language_model(Tagger(), loader(tokens, labels, batch=24), epochs=3)


@fault(
    "language models",
    "the text is cut to windows of one word, so that attention has nothing to attend to",
    "blocks.0.attention",
    why="queries and keys get gradients of exactly zero, as the softmax is over one score",
)
def windows_of_one_word():
    tokens = text()
    return language_model(data=loader(tokens[:, :-1].reshape(-1, 1), tokens[:, 1:].reshape(-1, 1), batch=96), epochs=3)


@fault(
    "language models",
    "the largest norm of an embedding's rows is set to a hundredth, which shrinks the words at each call",
    "embedding",
    why="the rows of the embedding are changed in the forward pass and all have the largest norm",
)
def norm_of_words_limited():
    model = Transformer()
    model.embedding = nn.Embedding(20, 24, max_norm=0.01)
    return language_model(model)


# --- recurrent networks -----------------------------------------------------------------------------------------------


class TwoWays(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.rnn, self.head, self.last = nn.GRU(3, 16, batch_first=True, bidirectional=True), nn.Linear(32, 3), last

    def forward(self, x):
        outputs, state = self.rnn(x)
        return self.head(outputs[:, -1] if self.last else torch.cat([state[0], state[1]], 1))


@fault(
    "recurrent networks",
    "the last output is used of both directions, and the backward direction has read one step there",
    "rnn",
    why="the recurrent weights of the backward direction get gradients of exactly zero",
    report="https://discuss.pytorch.org/t/bilstm-output-hidden-state-mismatch/49825",
)
def last_output_of_the_backward_direction():
    return recurrent(TwoWays(last=True))


@healthy("recurrent networks")
def states_of_both_directions():
    return recurrent(TwoWays(last=False))


@fault(
    "recurrent networks",
    "the state of the lowest of three layers is used, so that the upper layers are never trained",
    "rnn",
    why="the weights of the upper layers get gradients of zero",
)
def state_of_the_lowest_layer():
    class Lowest(RecurrentClassifier):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 24, num_layers=3, batch_first=True)

        def forward(self, x):
            return self.head(self.rnn(x)[1][0])

    return recurrent(Lowest(), epochs=5)


@fault(
    "recurrent networks",
    "the lengths of the packed rows are all one, so that the network reads the first step only",
    "rnn",
    why="the recurrent weights get no gradient and all but the first step of the inputs have none",
)
def packed_with_lengths_of_one():
    class Packed(RecurrentClassifier):
        def forward(self, x):
            lengths = (x.abs().sum((1, 2)) > 0).long()
            return self.head(self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0])

    return recurrent(Packed())


@fault(
    "recurrent networks",
    "the initial state is drawn at random in each call, in evaluation too",
    "rnn",
    why="the same rows give other outputs in evaluation mode",
)
def random_initial_state():
    class Random(RecurrentClassifier):
        def forward(self, x):
            return self.head(self.rnn(x, 3 * torch.randn(1, len(x), 24))[0][:, -1])

    return recurrent(Random())


@fault(
    "recurrent networks",
    "every row begins with long padding on the left, on which the network forgets or starts from a drifted state",
    knowable=False,
    why="leading zeros are legal inputs, and the network learns",
)
def padding_on_the_left():
    waves, labels = signals(length=14)
    return recurrent(data=loader(torch.cat([torch.zeros(len(waves), 20, 3), waves], 1), labels), epochs=5)


# --- audio ------------------------------------------------------------------------------------------------------------


class Speech(nn.Module):
    """Frames to characters."""

    def __init__(self, normalized):
        super().__init__()
        self.frames, self.rnn = nn.Conv1d(8, 24, 3, padding=1), nn.GRU(24, 24, batch_first=True)
        self.head, self.normalized = nn.Linear(24, 6), normalized

    def forward(self, x):
        outputs = self.head(self.rnn(self.frames(x.transpose(1, 2)).relu().transpose(1, 2))[0]).transpose(0, 1)
        return outputs.log_softmax(-1) if self.normalized else outputs


def speech(normalized=True, length=20, hide=False):
    labels = torch.randint(1, 6, (320, 4))
    sounds = torch.randn(6, 8)
    frames = sounds[labels].repeat_interleave(5, 1) + 0.4 * torch.randn(320, 20, 8)

    def loss(outputs, targets):
        lengths = torch.full((len(targets),), length)
        return F.ctc_loss(outputs, targets, lengths, torch.full((len(targets),), 4), zero_infinity=hide)

    return program(Speech(normalized), loss, loader(frames, labels, batch=20), 5e-3, epochs=6)


@healthy("audio")
def speech_to_characters():
    return speech()


@fault(
    "audio",
    "the connectionist loss wants log-probabilities and gets logits",
    why="the loss becomes negative, which no negative logarithm of a probability is",
)
def connectionist_loss_of_logits():
    return speech(normalized=False)


@fault(
    "audio",
    "the frames are counted after a wrong division, fewer than the characters, and infinite losses are set to zero",
    why="the loss is exactly zero and all gradients are zero",
)
def infinite_losses_hidden():
    return speech(length=3, hide=True)


def waveforms(scale, norm=False):
    labels = torch.randint(3, (384,))
    time = torch.arange(128).float()
    waves = torch.sin((labels[:, None] + 1) * 0.2 * time + 6.28 * torch.rand(384, 1)) + 0.2 * torch.randn(384, 128)
    layers = nn.Conv1d(1, 12, 9, stride=3), nn.ReLU(), nn.Conv1d(12, 12, 5, stride=2), nn.ReLU()
    model = nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(12, 3))
    return classifier(model, loader(scale * waves[:, None], labels))


@fault(
    "audio",
    "the samples are divided by 32768 although they were already between -1 and 1",
    why="the inputs are some ten thousand times smaller than the biases they are added to",
)
def samples_divided_twice():
    return waveforms(1 / 32768)


@healthy("audio")
def samples_between_minus_one_and_one():
    return waveforms(1.0)


# --- time series ------------------------------------------------------------------------------------------------------


def series(rows=512, length=20):
    """Return windows of a wave with a slow trend, ``(rows, length, 1)``, and the next value."""
    start = 50 * torch.rand(rows, 1)
    time = start + torch.arange(length + 1)
    values = torch.sin(0.5 * time) + 0.5 * torch.sin(0.13 * time) + 0.05 * torch.randn(rows, length + 1)
    return values[:, :-1, None], values[:, -1:]


class Forecast(nn.Module):
    def __init__(self, norm=None, pool=None):
        super().__init__()
        self.norm = norm or nn.Identity()
        self.rnn, self.pool, self.head = nn.GRU(1, 24, batch_first=True), pool, nn.Linear(24, 1)

    def forward(self, x):
        outputs = self.rnn(self.norm(x))[0]
        return self.head(self.pool(outputs) if self.pool else outputs[:, -1])


class AttentionPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score, self.dim = nn.Linear(24, 1), dim

    def forward(self, outputs):
        return (self.score(outputs).softmax(self.dim) * outputs).sum(1)


@healthy("time series")
def next_value_of_a_wave():
    return regressor(Forecast(), loader(*series()))


@healthy("time series")
def pooled_by_attention():
    return regressor(Forecast(pool=AttentionPool(1)), loader(*series()))


@fault(
    "time series",
    "the layer norm is over the one feature of a series, which it sets to zero",
    "norm",
    why="the outputs of the norm are constant",
)
def norm_of_a_single_feature():
    return regressor(Forecast(norm=nn.LayerNorm(1)), loader(*series()))


@fault(
    "time series",
    "the softmax of the attention pool is over the one score of a step, so that every weight is one",
    "pool.score",
    why="the layer of the scores gets gradients of exactly zero",
)
def pool_over_one_score():
    return regressor(Forecast(pool=AttentionPool(-1)), loader(*series()))


@fault(
    "time series",
    "the relative error is divided by values near zero, so that few rows make the whole loss",
    why="the loss jumps by orders of magnitude between batches, by the rows whose targets are next to zero",
)
def relative_error_near_zero():
    return regressor(Forecast(), loader(*series()), loss=lambda o, t: ((o - t) / (t + 1e-6)).abs().mean())


@fault(
    "time series",
    "the error of the quantile has its two factors exchanged, so that the lower quantile is learned for the upper one",
    knowable=False,
    why="the loss is that of another quantile and is legal",
)
def quantiles_exchanged():
    def loss(outputs, targets):
        error = targets - outputs
        return torch.maximum(0.1 * error, -0.9 * error).mean()

    return regressor(Forecast(), loader(*series()), loss=loss)


@fault(
    "time series",
    "the series is normalized by the window's own last value, which divides by numbers near zero",
    why="single inputs are larger than all others by orders of magnitude",
)
def windows_divided_by_their_last_value():
    windows, following = series()
    last = windows[:, -1:]
    return regressor(Forecast(), loader(windows / last, following / last[:, 0]))


# --- graphs -----------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    def __init__(self, adjacency, normalize):
        super().__init__()
        self.register_buffer("adjacency", normalize(adjacency))
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 3)

    def forward(self, x):
        return self.adjacency @ self.second((self.adjacency @ self.first(x)).relu())


def by_degree(adjacency):
    adjacency = adjacency + torch.eye(len(adjacency))
    return adjacency / adjacency.sum(1, keepdim=True)


def node_classes(normalize=by_degree, select=lambda mask: mask, lonely=False):
    features, adjacency, labels = graph()
    if lonely:
        adjacency[7], adjacency[:, 7] = 0, 0
    chosen = select(torch.rand(len(labels)) < 0.6)

    def loss(outputs, labels):
        return F.cross_entropy(outputs[chosen], labels[chosen])

    return program(Convolutions(adjacency, normalize), loss, [(features, labels)], 1e-2, epochs=150)


@healthy("graphs")
def nodes_chosen_by_a_mask():
    return node_classes()


@fault(
    "graphs",
    "the mask of the training nodes is used as indices, so that only the nodes 0 and 1 are in the loss",
    why="all other nodes get no gradient, and the loss falls to zero at once",
)
def mask_used_as_indices():
    return node_classes(select=lambda mask: mask.long())


@fault(
    "graphs",
    "a node without edges has a degree of zero, by which its row is divided",
    why="the adjacency has a row that is not a number, and so have the outputs of that node from the first step",
)
def degree_of_zero():
    return node_classes(lambda adjacency: adjacency / adjacency.sum(1, keepdim=True), lonely=True)


class Pooled(nn.Module):
    def __init__(self, over_all):
        super().__init__()
        self.first, self.head, self.over_all = nn.Linear(8, 24), nn.Linear(24, 3), over_all

    def forward(self, nodes):
        hidden = self.first(nodes).relu()
        pooled = hidden.mean((0, 1)).expand(len(nodes), -1) if self.over_all else hidden.mean(1)
        return self.head(pooled)


def graph_classes(over_all):
    labels = torch.randint(3, (512,))
    nodes = torch.randn(512, 10, 8) + 0.7 * torch.randn(3, 8)[labels][:, None]
    return classifier(Pooled(over_all), loader(nodes, labels))


@fault(
    "graphs",
    "the nodes of all graphs of a batch are pooled together, so that all graphs get the same output",
    why="the outputs of all rows of a batch are equal",
)
def one_graph_for_the_whole_batch():
    return graph_classes(over_all=True)


@healthy("graphs")
def pooled_by_graph():
    return graph_classes(over_all=False)


@fault(
    "graphs",
    "the features of the nodes are their numbers, scaled, as the file had no features",
    "first",
    why="the inputs have one distinct column, repeated",
)
def numbers_of_nodes_as_features():
    program_ = node_classes()
    features, labels = program_.loader[0]
    numbers = torch.arange(len(labels)).float()[:, None] / len(labels)
    program_.loader = [(numbers.expand(-1, features.shape[1]).contiguous(), labels)]
    return program_


@fault(
    "recurrent networks",
    "the learned table is a plain tensor and no parameter, so that the optimizer never changes it",
    why="a leaf of the graph wants gradients, gets them, and is no parameter of the model",
)
def table_is_no_parameter():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.body = torch.zeros(14, 3, requires_grad=True), mlp(3, 3)

        def forward(self, x):
            return self.body((x * self.table).sum(1))

    return recurrent(Table())
