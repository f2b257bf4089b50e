"""Routers of real mixtures of experts, against the logits and experts that the models compute."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import RouterSubscriber
from tests.metrics.running import trained, watched
from tests.numerics.test_router import reference
from tests.real_models.language_models import from_config

_SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}
_DEEPSEEK = {
    **_SMALL,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_QWEN = {"num_experts": 4, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 8}
LOGITS = {
    "Mixtral": {**_SMALL, "num_local_experts": 4},
    "Qwen2Moe": {**_SMALL, **_QWEN},
    "Qwen3Moe": {**_SMALL, **_QWEN},
    "Olmoe": {**_SMALL, "num_experts": 4},
}
CHOSEN = {"DeepseekV3": (_DEEPSEEK, 0), "GptOss": ({**_SMALL, "num_local_experts": 4}, 1)}


class Training(nn.Module):
    """A language model whose training returns its loss; it stores what each router returned."""

    def __init__(self, name, options):
        super().__init__()
        torch.manual_seed(0)
        self.inner = from_config(name, "ForCausalLM", **options)()
        self.returned = []
        for module_name, module in self.inner.named_modules():
            if module_name.endswith((".gate", ".router")):
                module.register_forward_hook(lambda module, _, output: self.returned.append(output))

    def forward(self, ids):
        return self.inner(input_ids=ids, labels=ids).loss


def routers(name, options, steps=1, **arguments):
    model = Training(name, options)
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(32, (3, 6), generator=generator) for _ in range(steps)]
    make = [lambda **more: RouterSubscriber(2, per_expert=True, **arguments, **more)]
    found, _ = trained(make, model, steps, batch=batch.__getitem__)
    return model, found


@pytest.mark.parametrize("name", LOGITS)
def test_routers_that_return_logits(name):
    model, found = routers(name, LOGITS[name], steps=2, capacity_factor=1.0)
    names = sorted({module for kind, module in found if kind == "router_entropy"})
    assert len(names) == 2
    for i, module in enumerate(names):
        for step in range(2):
            logits = model.returned[2 * step + i].detach()
            assert logits.shape == (18, 4)
            entropy, z_loss, load, dropped = reference(logits, 2, 1.0)
            assert found["router_entropy", module][step] == pytest.approx(entropy, rel=1e-5)
            assert found["router_z_loss", module][step] == pytest.approx(z_loss, rel=1e-5)
            assert found["expert_load_max", module][step] == pytest.approx(load.max())
            assert found["tokens_dropped", module][step] == pytest.approx(dropped)
            shown = [found["expert_load", f"{module}:expert_{e}"][step] for e in range(4)]
            assert shown == pytest.approx(load.tolist())


@pytest.mark.parametrize("name", CHOSEN)
def test_routers_that_return_the_chosen_experts(name):
    options, position = CHOSEN[name]
    model, found = routers(name, options)
    names = sorted({module for kind, module in found if kind == "expert_load_max"})
    assert len(names) == len(model.returned) == 2
    for module, returned in zip(names, model.returned, strict=True):
        load = np.bincount(returned[position].flatten(), minlength=4) / 9
        assert [found["expert_load", f"{module}:expert_{e}"][0] for e in range(4)] == pytest.approx(load.tolist())
        assert found["tokens_dropped", module] == [0]
    assert "router_entropy" not in {kind for kind, _ in found}


class Observing(nn.Linear):
    """A router inside of a module that returns something else."""

    def forward(self, x):
        logits = super().forward(x)
        ikkuna.observe("block.router_logits", logits)
        return logits.sum(-1)


def test_observed_logits_are_measured():
    torch.manual_seed(0)
    model = Observing(3, 4)
    x = torch.randn(9, 3)
    logits = nn.functional.linear(x, model.weight, model.bias).detach()
    found, _ = trained([lambda **more: RouterSubscriber(1, **more)], model, 1, batch=lambda step: x)
    entropy, _, load, _ = reference(logits, 1)
    assert found["router_entropy", "block.router_logits"] == [pytest.approx(entropy, rel=1e-5)]
    assert found["expert_load_max", "block.router_logits"] == [pytest.approx(load.max())]
    assert {name for _, name in found} == {"block.router_logits"}


def test_an_expert_is_dead_after_a_window_without_tokens():
    def choosing(expert):
        return torch.eye(4)[expert].expand(5, 4)

    steps = [choosing(e) for e in (0, 1, 2, 2, 2)]
    dead = watched(lambda **more: RouterSubscriber(1, window=2, modules="*", **more), *steps)["dead_experts"]
    assert dead == [0.75, 0.5, 0.5, 0.75, 0.75]


def test_calls_of_a_step_are_summed_and_those_with_other_experts_left_out():
    step = [torch.eye(4)[[0, 0, 1]], torch.eye(4)[[1]], torch.eye(3)]
    found = watched(lambda **more: RouterSubscriber(1, modules="*", **more), step)
    assert found["expert_load_max"] == [2.0]


def test_layers_that_are_no_routers_publish_nothing():
    model = nn.Sequential()
    model.add_module("gate_proj", nn.Linear(3, 4))
    model.add_module("shared_expert_gate", nn.Linear(4, 1))
    found, _ = trained([lambda **more: RouterSubscriber(1, **more)], model, 1)
    assert not found


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="needs top_k >= 1, got 0"):
        RouterSubscriber(0)
    with pytest.raises(ConfigError, match="needs experts >= 2, got 1"):
        RouterSubscriber(1, experts=1)
    for wrong in (0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="needs a capacity_factor above 0"):
            RouterSubscriber(1, capacity_factor=wrong)
