"""Models of transformers, initialised from small configurations, with batches for which they compute their own loss."""

import torch
import transformers as t

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SAMPLES, LENGTH = 6, 14


def ids(low=3):
    return torch.randint(low, 99, (SAMPLES, LENGTH))


def masked():
    labels = ids()
    chosen = torch.rand(labels.shape) < 0.3
    chosen[:, 0] = True
    inputs = labels.masked_fill(chosen, 2)
    return {"input_ids": inputs, "labels": labels.masked_fill(~chosen, -100), "attention_mask": torch.ones_like(labels)}


def following():
    inputs = ids()
    return {"input_ids": inputs, "labels": inputs.clone(), "attention_mask": torch.ones_like(inputs)}


def classified(classes=5):
    return {"input_ids": ids(), "labels": torch.randint(classes, (SAMPLES,))}


def tagged():
    return {"input_ids": ids(), "labels": torch.randint(5, (SAMPLES, LENGTH))}


def translated():
    return {"input_ids": ids(), "labels": ids()}


def answered():
    start, end = torch.randint(LENGTH, (2, SAMPLES))
    return {"input_ids": ids(), "start_positions": start, "end_positions": end}


def pictured(size=32, classes=5):
    return {"pixel_values": torch.randn(SAMPLES, 3, size, size), "labels": torch.randint(classes, (SAMPLES,))}


def model(name, config, batch, **options):
    return lambda: (getattr(t, name)(getattr(t, config)(**options)), batch())


GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
DISTIL = {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
FIVE = {"num_labels": 5}
GROUPED = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
NEO = {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
NEO |= {"attention_types": [[["global", "local"], 1]]}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
XLNET = {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
FALCON = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
CONVNEXT = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
WAV2VEC2 = {"vocab_size": 32, "conv_dim": (16, 16), "conv_kernel": (10, 5), "conv_stride": (5, 4)}
WAV2VEC2 |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "layerdrop": 0.0}


def spoken():
    return {"input_values": torch.randn(3, 2000), "labels": torch.randint(3, 30, (3, 5))}


CASES = {
    "bert_masked": model("BertForMaskedLM", "BertConfig", masked, **SMALL),
    "bert_classifier": model("BertForSequenceClassification", "BertConfig", classified, **SMALL, **FIVE),
    "bert_tags": model("BertForTokenClassification", "BertConfig", tagged, **SMALL, **FIVE),
    "bert_answers": model("BertForQuestionAnswering", "BertConfig", answered, **SMALL),
    "roberta_masked": model("RobertaForMaskedLM", "RobertaConfig", masked, **{**SMALL, "pad_token_id": 1}),
    "electra_masked": model("ElectraForMaskedLM", "ElectraConfig", masked, **SMALL, embedding_size=32),
    "deberta_classifier": model("DebertaV2ForSequenceClassification", "DebertaV2Config", classified, **SMALL, **FIVE),
    "albert_masked": model("AlbertForMaskedLM", "AlbertConfig", masked, **SMALL, embedding_size=16),
    "distilbert_classifier": model(
        "DistilBertForSequenceClassification", "DistilBertConfig", classified, **DISTIL, **FIVE
    ),
    "mpnet_masked": model("MPNetForMaskedLM", "MPNetConfig", masked, **SMALL),
    "gpt2": model("GPT2LMHeadModel", "GPT2Config", following, **GPT2),
    "gpt2_classifier": model("GPT2ForSequenceClassification", "GPT2Config", classified, **GPT2, **FIVE, pad_token_id=0),
    "gpt_neo": model("GPTNeoForCausalLM", "GPTNeoConfig", following, **NEO),
    "gpt_neox": model("GPTNeoXForCausalLM", "GPTNeoXConfig", following, **SMALL),
    "opt": model("OPTForCausalLM", "OPTConfig", following, **SMALL, ffn_dim=64, word_embed_proj_dim=32),
    "bloom": model("BloomForCausalLM", "BloomConfig", following, vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
    "llama": model("LlamaForCausalLM", "LlamaConfig", following, **GROUPED),
    "llama_tied": model("LlamaForCausalLM", "LlamaConfig", following, **GROUPED, tie_word_embeddings=True),
    "mistral": model("MistralForCausalLM", "MistralConfig", following, **GROUPED),
    "qwen2": model("Qwen2ForCausalLM", "Qwen2Config", following, **GROUPED),
    "qwen3": model("Qwen3ForCausalLM", "Qwen3Config", following, **GROUPED, head_dim=8),
    "phi": model("PhiForCausalLM", "PhiConfig", following, **SMALL),
    "gemma": model("GemmaForCausalLM", "GemmaConfig", following, **GROUPED, head_dim=8),
    "mixtral": model("MixtralForCausalLM", "MixtralConfig", following, **GROUPED, num_local_experts=4),
    "falcon": model("FalconForCausalLM", "FalconConfig", following, **FALCON),
    "mamba": model("MambaForCausalLM", "MambaConfig", following, vocab_size=99, hidden_size=32, num_hidden_layers=2),
    "xlnet": model("XLNetForSequenceClassification", "XLNetConfig", classified, **XLNET, **FIVE),
    "t5": model("T5ForConditionalGeneration", "T5Config", translated, **T5),
    "bart": model("BartForConditionalGeneration", "BartConfig", translated, **BART),
    "pegasus": model("PegasusForConditionalGeneration", "PegasusConfig", translated, **BART),
    "vit": model("ViTForImageClassification", "ViTConfig", pictured, **VIT, **FIVE, patch_size=8),
    "deit": model("DeiTForImageClassification", "DeiTConfig", pictured, **VIT, **FIVE, patch_size=8),
    "beit": model("BeitForImageClassification", "BeitConfig", pictured, **VIT, **FIVE, patch_size=8),
    "swin": model("SwinForImageClassification", "SwinConfig", pictured, **SWIN, **FIVE),
    "resnet": model("ResNetForImageClassification", "ResNetConfig", pictured, **RESNET, **FIVE),
    "convnext": model("ConvNextForImageClassification", "ConvNextConfig", pictured, **FIVE, **CONVNEXT),
    "mobilenet": model(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", pictured, **FIVE, depth_multiplier=0.35
    ),
    "wav2vec2_ctc": model("Wav2Vec2ForCTC", "Wav2Vec2Config", spoken, **{**SMALL, **WAV2VEC2}),
}
