"""The first operation that differs between two programs: planted differences, differences without effect, the command."""

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ikkuna.cli import main
from ikkuna.diagnosis import RecorderOptions, read_dump
from ikkuna.errors import DumpError
from ikkuna.export import Exporter, step_difference
from ikkuna.export.messages import MessageBus
from ikkuna.export.step_difference import StepDifference, record_operations
from ikkuna.flight_recorder.operations import fingerprint, first_difference

WIDTH, ROWS, TIME, WORDS = 16, 8, 6, 11


class Block(nn.Module):
    """A causal transformer with one block; every option plants one difference."""

    def __init__(self, **options):
        super().__init__()
        self.o = options
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=options.get("eps", 1e-5))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.act = nn.GELU(options.get("gelu", "none"))
        self.drop = nn.Dropout(options.get("p", 0.1))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", torch.ones(TIME, TIME).tril(options.get("diagonal", 0)).bool(), persistent=False)

    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if "sdpa" in self.o:
            return F.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (q, k, v)), is_causal=True).squeeze(1)
        scores = q @ k.transpose(1, 2) / (WIDTH if "scale" in self.o else math.sqrt(WIDTH))
        if "half_scores" in self.o:
            scores = scores.to(torch.bfloat16).float()
        scores = scores.masked_fill(~self.mask, self.o.get("fill", float("-inf")))
        return scores.softmax(1 if "softmax" in self.o else -1) @ v

    def forward(self, words):
        x = self.embed(words)
        if "embed_scale" in self.o:
            x = x * math.sqrt(WIDTH)
        x = x + (self.norm(self.attend(x)) if "post_norm" in self.o else self.attend(self.norm(x)))
        if "extra_draw" in self.o:
            torch.rand(1)
        h = self.up(x)
        if "unfused" in self.o:
            h = x.reshape(-1, WIDTH) @ self.up.weight.t() + self.up.bias
            h = h.reshape(ROWS, TIME, 32)
        if "order" in self.o:
            x = (self.down(self.act(h)) + 0.1) + x
        else:
            x = self.down(self.act(h)) + (x + 0.1)
        if "detach" in self.o:
            x = x.detach() + 0 * x
        if "view" in self.o:
            x = x.reshape(-1, WIDTH).unsqueeze(0).squeeze(0).reshape(ROWS, TIME, WIDTH)
        return self.head(self.drop(x))


class Loss(nn.CrossEntropyLoss):
    def forward(self, output, labels):
        return super().forward(output.flatten(0, 1), labels.flatten())


def build(**options):
    torch.manual_seed(3)
    model = Block(**options)
    rates = {"eps": options.get("adam_eps", 1e-8), "weight_decay": options.get("decay", 0.01)}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        1e-2,
        betas=(0.9, options.get("beta", 0.999)),
        foreach=options.get("foreach", False),
        **rates,
    )
    loss = Loss(label_smoothing=options.get("smoothing", 0.0), reduction=options.get("reduction", "mean"))
    return {"model": model, "loss": loss, "optimizer": optimizer}


def clipped(made):
    def step(model_calls, loss_calls):
        made["optimizer"].zero_grad()
        for (args, _), ((labels,), _) in zip(model_calls, loss_calls, strict=True):
            made["loss"](made["model"](*args), labels).backward()
        nn.utils.clip_grad_norm_(made["model"].parameters(), 0.01)
        made["optimizer"].step()

    return {**made, "step": step}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    torch.manual_seed(0)
    made = build()
    model, loss, optimizer = made.values()
    exporter = Exporter(message_bus=MessageBus("two codes"), log_dir=tmp_path_factory.mktemp("run"), on_error="raise")
    exporter.add_modules(model)
    exporter.set_loss(loss)
    exporter.record_steps(RecorderOptions(every=5, burst=0, state_every=1))
    for _ in range(12):
        optimizer.zero_grad()
        words = torch.randint(0, WORDS, (ROWS, TIME))
        loss(model(words), words.roll(-1, 1)).backward()
        optimizer.step()
    exporter.dump("by hand")
    exporter.close()
    return exporter.dumps[-1]


@pytest.fixture(scope="module")
def original(dump):
    return record_operations(dump, build())[0]


# option, its value, the operation that is to be named in the second program, and its module
PLANTED = [
    ("eps", 1e-4, "native_layer_norm", "norm"),
    ("gelu", "tanh", "gelu", "act"),
    ("diagonal", 1, "bitwise_not", ""),
    ("p", 0.2, "bernoulli_", "drop"),
    ("sdpa", 1, "_scaled_dot_product", ""),
    ("scale", 1, "div", ""),
    ("half_scores", 1, "_to_copy", ""),
    ("fill", -1.0, "masked_fill", ""),
    ("softmax", 1, "_softmax", ""),
    ("embed_scale", 1, "mul", ""),
    ("post_norm", 1, "addmm", "qkv"),
    ("extra_draw", 1, "rand", ""),
    ("order", 1, "add", ""),
    ("detach", 1, "mul", ""),
    ("smoothing", 0.1, "sum", ""),
    ("reduction", "sum", "nll_loss_forward", ""),
    ("adam_eps", 1e-3, "add_", ""),
    ("decay", 0.1, "mul_", ""),
    ("beta", 0.99, "mul_", ""),
    ("clip", 1, "_foreach_norm", ""),
]


@pytest.mark.parametrize(("option", "value", "operation", "module"), PLANTED, ids=[row[0] for row in PLANTED])
def test_the_planted_operation_is_named(dump, original, option, value, operation, module):
    made = build(**{option: value})
    found = first_difference(original, record_operations(dump, clipped(made) if option == "clip" else made)[0])
    named = found.operations[1]
    assert operation in named.name
    assert named.module == module


@pytest.mark.parametrize("option", [None, "view", "foreach"])
def test_a_program_of_the_same_bits_has_no_difference(dump, original, option):
    found = first_difference(original, record_operations(dump, build(**({option: True} if option else {})))[0])
    assert found.operations == (None, None)


def test_programs_with_other_learning_rates_differ(dump, original):
    """The step itself runs with the rates of the dump, if it has them, and is the same then."""
    made = build()
    made["optimizer"].param_groups[0]["lr"] = 2e-2
    other = record_operations(dump, made)[0]
    found = StepDifference(1, (), first_difference(original, original), None, (original.rates, other.rates))
    assert not found.is_equal
    assert "the learning rates of the programs differ, 0.01 and 0.02; both run" in str(found)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.diagnosis.test_step_difference import build
from torch import nn


def make():
    made = build({options})
    {further}
    return made
"""


def test_the_command_names_operation_line_and_size(dump, tmp_path, capsys):
    """The second program has other names of modules, and both scripts have one name."""
    root = str(Path(__file__).parents[2])
    scripts = []
    for folder, options, further in (
        ("a", "", ""),
        (
            "b",
            "gelu='tanh'",
            "made['model'].add_module('top', made['model'].head); del made['model'].head\n"
            "    type(made['model']).head = property(lambda self: self.top)",
        ),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(SCRIPT.format(root=root, options=options, further=further))
        scripts += ["--script", f"{tmp_path / folder / 'train.py'}:make"]
    run = str(dump.parents[1])
    assert main(["diff", run, run, "--replay", str(read_dump(dump).step), *scripts]) == 1
    text = capsys.readouterr().out
    assert "B: operation" in text
    assert "aten.gelu.default(approximate='tanh') in module 'act'" in text
    assert f"{Path(__file__).name}:" in text
    assert "its outputs differ by up to" in text
    assert main(["diff", run, run, "--replay", str(read_dump(dump).step), *scripts[:2], *scripts[:2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]


def test_another_model_is_an_error_that_names_what_is_missing(dump):
    with pytest.raises(DumpError, match="parameters"):
        record_operations(dump, {"model": nn.Linear(2, 2)})


def tensors_of_every_type():
    every = [getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    for dtype in dict.fromkeys(every):
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
            yield torch.empty(3, dtype=dtype)
    yield from (
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.zeros(3)._neg_view(),
        torch.ones(1).expand(4),
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about types that are experimental
def test_every_tensor_has_a_fingerprint_or_none_and_a_size_or_none():
    """A tensor of an unusual type does not hide the operation that differs."""
    for x in tensors_of_every_type():
        assert isinstance(fingerprint(x), str | None)
        found = step_difference._size([x], [x])
        assert found is None or len(found) == 2
    one, other = torch.tensor([3 + 4j, 1j]), torch.tensor([3 + 4j, 1 + 1j])
    assert step_difference._size([one], [other]) == (1.0, 5.0)
    assert step_difference._size([one.imag], [(one - 1j).imag]) == (1.0, 4.0)
