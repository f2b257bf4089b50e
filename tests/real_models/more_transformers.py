"""Many model classes of transformers, each made small by the names that its configuration knows."""

import importlib
from inspect import signature

import torch

from tests.real_models.training import RealModel

__all__ = ["MORE_TRANSFORMERS"]

_SIZES = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 32),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "embedding_size", "moe_intermediate_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "shared_expert_intermediate_size", "word_embed_proj_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "conv_kernel", "d_conv", "state_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "moe_k"), 1),
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}


def _make(name, head):
    def make():
        transformers = importlib.import_module("transformers")
        kind = getattr(transformers, f"{name}Config")
        sizes = {key: value for key, value in _SIZES.items() if key in signature(kind.__init__).parameters}
        return getattr(transformers, name + head)(kind(**sizes))

    return make


def _words():
    ids = torch.randint(3, 64, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def _pictures():
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 3, (2,))}


_NAMES = {
    "ForCausalLM": (
        _words,
        (
            *("Apertus", "Arcee", "AriaText", "Bart", "BigBird", "BigBirdPegasus", "BioGpt", "BitNet"),
            *("Blenderbot", "BlenderbotSmall", "Bloom", "Camembert", "Cohere2", "Cohere", "CpmAnt"),
            *("Data2VecText", "Dbrx", "DeepseekV2", "DeepseekV3", "DiffLlama", "Doge", "Dots1"),
            *("Electra", "Ernie4_5", "Ernie4_5_Moe", "Ernie", "Exaone4", "Falcon", "FalconMamba"),
            *("FlexOlmo", "Fuyu", "GPTBigCode", "GPTNeoX", "GPTNeoXJapanese", "Gemma2", "Gemma", "Glm4"),
            *("Glm4Moe", "Glm", "GptOss", "Granite", "GraniteMoe", "GraniteMoeShared", "Helium"),
            *("HunYuanDenseV1", "HunYuanMoEV1", "JetMoe", "Lfm2", "Llama", "MBart", "Mamba", "Marian"),
            *("Mega", "MegatronBert", "MiniMax", "Ministral", "Mistral", "Mixtral", "ModernBertDecoder"),
            *("Moshi", "Mpt", "Mvp", "Nemotron", "OPT", "Olmo2", "Olmo3", "Olmo", "Olmoe", "OpenLlama"),
            *("PLBart", "Pegasus", "Persimmon", "Phi3", "Phi", "Phimoe", "ProphetNet", "Qwen2"),
            *("Qwen2Moe", "Qwen3", "Qwen3Moe", "RecurrentGemma", "RemBert", "RoFormer", "Roberta"),
            *("RobertaPreLayerNorm", "Rwkv", "SeedOss", "SmolLM3", "StableLm", "Starcoder2", "TrOCR"),
            *("VaultGemma", "Whisper", "XGLM", "XLMProphetNet", "XLMRoberta", "XLMRobertaXL", "xLSTM"),
        ),
    ),
    "ForMaskedLM": (
        _words,
        (
            *("Albert", "Bert", "BigBird", "Camembert", "ConvBert", "Data2VecText", "Deberta"),
            *("DebertaV2", "DistilBert", "Electra", "Ernie", "Esm", "FNet", "Funnel", "IBert"),
            *("LayoutLM", "Longformer", "MPNet", "Mega", "MegatronBert", "MobileBert"),
        ),
    ),
}

MORE_TRANSFORMERS: dict[str, RealModel] = {
    f"transformers {name}{head}": RealModel(_make(name, head), batch, steps=1)
    for head, (batch, names) in _NAMES.items()
    for name in names
}
