"""Language models of transformers, from configurations."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.real_models.training import Batch, RealModel

__all__ = ["LANGUAGE_MODELS", "from_config", "tokens"]

_VOCABULARY = 64
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 1, "head_dim": 8}
_ENCODER_DECODER = {
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
}


def from_config(
    name: str, head: str, prepare: Callable[[nn.Module], Any] | None = None, **options: Any
) -> Callable[[], nn.Module]:
    """Return a function that makes the model class ``name + head`` of transformers from its configuration."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{name}Config")(**options)
        model = getattr(transformers, name + head)(config)
        if prepare is not None:
            prepare(model)
        return model

    return make


def tokens(
    *, length: int = 7, masked: bool = False, labels: str = "tokens", **more: Callable[[], Any]
) -> Callable[[], Batch]:
    """Return a function that draws token ids with labels for each token, each sequence, or each position of an answer."""

    def draw() -> Batch:
        ids = torch.randint(1, _VOCABULARY, (3, length))
        batch: dict[str, Any] = {"input_ids": ids}
        if masked:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, length // 2 :] = 0
        if labels == "tokens":
            batch["labels"] = ids.clone()
        elif labels == "class":
            batch["labels"] = torch.randint(2, (3,))
        elif labels == "span":
            batch |= {name: torch.randint(length, (3,)) for name in ("start_positions", "end_positions")}
        return batch | {name: make() for name, make in more.items()}

    return draw


def _checkpointed(use_reentrant: bool) -> Callable[[nn.Module], Any]:
    options = {"use_reentrant": use_reentrant}
    return lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _causal(name: str, prepare: Callable[[nn.Module], Any] | None = None, **options: Any) -> RealModel:
    return RealModel(from_config(name, "ForCausalLM", prepare, **options), tokens(masked=True))


def _encoder(name: str, head: str = "ForMaskedLM", labels: str = "tokens", **options: Any) -> RealModel:
    return RealModel(from_config(name, head, **options), tokens(masked=True, labels=labels))


_GPT2 = {"vocab_size": _VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_MAMBA = {"vocab_size": _VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3}

LANGUAGE_MODELS: dict[str, RealModel] = {
    "GPT-2": RealModel(from_config("GPT2", "LMHeadModel", **_GPT2), tokens(masked=True)),
    "GPT-2, checkpointed": RealModel(
        from_config("GPT2", "LMHeadModel", _checkpointed(False), **_GPT2, use_cache=False), tokens()
    ),
    "GPT-2, reentrant checkpoints": RealModel(
        from_config("GPT2", "LMHeadModel", _checkpointed(True), **_GPT2, use_cache=False), tokens()
    ),
    "Llama": _causal("Llama", **_GROUPED),
    "Llama, checkpointed": _causal("Llama", _checkpointed(False), **_GROUPED, use_cache=False),
    "Mistral": _causal("Mistral", **_GROUPED, sliding_window=4),
    "Mixtral": _causal("Mixtral", **_GROUPED, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True),
    "Qwen2": _causal("Qwen2", **_GROUPED),
    "Qwen3": _causal("Qwen3", **_GROUPED),
    "Qwen2-MoE": _causal(
        "Qwen2Moe",
        **_GROUPED,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    ),
    "Gemma": _causal("Gemma", **_GROUPED),
    "Gemma 2": _causal("Gemma2", **_GROUPED),
    "Phi": _causal("Phi", **_SMALL),
    "Phi-3": _causal("Phi3", **_SMALL),
    "OPT": _causal(
        "OPT",
        vocab_size=_VOCABULARY,
        hidden_size=16,
        word_embed_proj_dim=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=32,
    ),
    "Bloom": _causal("Bloom", vocab_size=_VOCABULARY, hidden_size=16, n_layer=2, n_head=2),
    "Falcon": _causal("Falcon", **_SMALL),
    "GPT-NeoX": _causal("GPTNeoX", **_SMALL),
    "GPT-Neo": _causal(
        "GPTNeo",
        vocab_size=_VOCABULARY,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32,
    ),
    "GPT-J": _causal("GPTJ", **_GPT2, rotary_dim=4),
    "CodeGen": _causal("CodeGen", vocab_size=_VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=32, rotary_dim=4),
    "StableLM": _causal("StableLm", **_SMALL),
    "OLMo": _causal("Olmo", **_SMALL),
    "Granite": _causal("Granite", **_SMALL),
    "Cohere": _causal("Cohere", **_SMALL),
    "XGLM": _causal(
        "XGLM",
        vocab_size=_VOCABULARY,
        d_model=16,
        num_layers=2,
        attention_heads=2,
        ffn_dim=24,
        max_position_embeddings=32,
    ),
    "BERT": _encoder("Bert", **_SMALL),
    "BERT, questions": _encoder("Bert", "ForQuestionAnswering", "span", **_SMALL),
    "DistilBERT": _encoder(
        "DistilBert", vocab_size=_VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32
    ),
    "RoBERTa": _encoder("Roberta", "ForSequenceClassification", "class", **_SMALL),
    "XLM-RoBERTa": _encoder("XLMRoberta", **_SMALL),
    "ALBERT": _encoder("Albert", **_SMALL, embedding_size=8),
    "ELECTRA": _encoder("Electra", **_SMALL, embedding_size=8),
    "DeBERTa": _encoder(
        "Deberta", "ForSequenceClassification", "class", **_SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"]
    ),
    "DeBERTa v2": _encoder(
        "DebertaV2",
        "ForSequenceClassification",
        "class",
        **_SMALL,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    ),
    "ModernBERT": _encoder(
        "ModernBert", **_SMALL, global_attn_every_n_layers=2, local_attention=4, attn_implementation="eager"
    ),
    "MPNet": _encoder("MPNet", **_SMALL),
    "ConvBERT": _encoder("ConvBert", **_SMALL, embedding_size=8),
    "FNet": RealModel(from_config("FNet", "ForMaskedLM", **_SMALL), tokens()),
    "Funnel": _encoder(
        "Funnel",
        "ForSequenceClassification",
        "class",
        vocab_size=_VOCABULARY,
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=24,
    ),
    "XLNet": _encoder(
        "XLNet",
        "ForSequenceClassification",
        "class",
        vocab_size=_VOCABULARY,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=24,
    ),
    "Longformer": _encoder("Longformer", **_SMALL, attention_window=[4, 4]),
    "BigBird": _encoder("BigBird", **_SMALL, attention_type="original_full"),
    "Nystromformer": RealModel(
        from_config("Nystromformer", "ForMaskedLM", **_SMALL, segment_means_seq_len=8, num_landmarks=4),
        tokens(length=8),
    ),
    "T5": RealModel(from_config("T5", "ForConditionalGeneration", **_T5), tokens()),
    "UMT5": RealModel(from_config("UMT5", "ForConditionalGeneration", **_T5), tokens()),
    "BART": RealModel(from_config("Bart", "ForConditionalGeneration", **_ENCODER_DECODER), tokens(masked=True)),
    "Marian": RealModel(
        from_config("Marian", "MTModel", **_ENCODER_DECODER, pad_token_id=0, decoder_start_token_id=0), tokens()
    ),
    "Pegasus": RealModel(from_config("Pegasus", "ForConditionalGeneration", **_ENCODER_DECODER), tokens()),
    "Mamba": RealModel(from_config("Mamba", "ForCausalLM", **_MAMBA), tokens()),
    "Mamba 2": RealModel(
        from_config("Mamba2", "ForCausalLM", **_MAMBA, num_heads=4, head_dim=8, n_groups=1, chunk_size=4), tokens()
    ),
    "RWKV": RealModel(
        from_config(
            "Rwkv", "ForCausalLM", vocab_size=_VOCABULARY, hidden_size=16, num_hidden_layers=2, context_length=32
        ),
        tokens(),
    ),
    "Perceiver": RealModel(
        from_config(
            "Perceiver",
            "ForMaskedLM",
            vocab_size=_VOCABULARY,
            d_model=16,
            d_latents=16,
            num_latents=4,
            num_self_attends_per_block=1,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
            max_position_embeddings=7,
            qk_channels=16,
            v_channels=16,
        ),
        tokens(),
    ),
}
