"""Models of pictures, sounds, series and pairs of them, of transformers, from configurations."""

from collections.abc import Callable
from typing import Any

import torch

from tests.real_models.language_models import from_config
from tests.real_models.timm_import import import_timm
from tests.real_models.training import Batch, RealModel

__all__ = ["PERCEPTION_MODELS"]

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_PICTURE = {**_SMALL, "image_size": 16, "patch_size": 8}
_STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16]}


def pictures(size: int = 16, labels: str = "class", channels: int = 3) -> Callable[[], Batch]:
    """Return a function that draws pictures, with labels of their classes or of each pixel."""

    def draw() -> Batch:
        batch: dict[str, Any] = {"pixel_values": torch.randn(2, channels, size, size)}
        if labels == "class":
            batch["labels"] = torch.randint(2, (2,))
        elif labels == "pixels":
            batch["labels"] = torch.randint(2, (2, size, size))
        elif labels == "boxes":
            batch["labels"] = [
                {"class_labels": torch.randint(2, (3,)), "boxes": torch.rand(3, 4) / 2 + 0.2} for _ in range(2)
            ]
        return batch

    return draw


def _classifier(name: str, size: int = 16, head: str = "ForImageClassification", **options: Any) -> RealModel:
    return RealModel(from_config(name, head, **options), pictures(size))


def _speech() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 8, (2, 3))}


def _whisper() -> Batch:
    return {"input_features": torch.randn(2, 8, 16), "labels": torch.randint(1, 32, (2, 5))}


def _pairs() -> Batch:
    return {
        "input_ids": torch.randint(1, 32, (2, 6)),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "return_loss": True,
    }


def _questions() -> Batch:
    return {
        "input_ids": torch.randint(1, 32, (2, 6)),
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": torch.rand(2, 4),
    }


def _series() -> Batch:
    return {"past_values": torch.randn(2, 16, 2), "future_values": torch.randn(2, 4, 2)}


_WAVE = {
    **_SMALL,
    "vocab_size": 8,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
}
_CLIP = {
    "text_config": {**_SMALL, "vocab_size": 32, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": _PICTURE,
    "projection_dim": 8,
}
_DETECTOR = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_queries": 4,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}

PERCEPTION_MODELS: dict[str, RealModel] = {
    "ViT": _classifier("ViT", **_PICTURE),
    "DeiT": _classifier("DeiT", **_PICTURE),
    "BEiT": _classifier("Beit", **_PICTURE, vocab_size=16, use_relative_position_bias=True),
    "DINOv2": _classifier("Dinov2", **_PICTURE),
    "ViT-MAE": RealModel(
        from_config(
            "ViTMAE",
            "ForPreTraining",
            **_PICTURE,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=24,
        ),
        pictures(labels="none"),
    ),
    "Swin": _classifier(
        "Swin", image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=2
    ),
    "Swin v2": _classifier(
        "Swinv2", image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=2
    ),
    "ConvNeXt": _classifier("ConvNext", 32, **_STAGES, num_stages=2),
    "ConvNeXt v2": _classifier("ConvNextV2", 32, **_STAGES, num_stages=2),
    "ResNet": _classifier("ResNet", 32, embedding_size=8, **_STAGES, layer_type="bottleneck"),
    "RegNet": _classifier("RegNet", 32, embedding_size=8, **_STAGES, groups_width=4),
    "BiT": _classifier("Bit", 32, embedding_size=8, **_STAGES, num_groups=4),
    "MobileNet v1": _classifier("MobileNetV1", 32, depth_multiplier=0.25),
    "MobileNet v2": _classifier("MobileNetV2", 32, depth_multiplier=0.25),
    "EfficientNet": _classifier(
        "EfficientNet", 32, image_size=32, width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320
    ),
    "PoolFormer": _classifier("PoolFormer", 32, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    "LeViT": _classifier(
        "Levit",
        64,
        image_size=64,
        hidden_sizes=[16, 16, 16],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[4, 4, 4],
    ),
    "CvT": _classifier("Cvt", 32, embed_dim=[8, 8, 16], num_heads=[1, 2, 2]),
    "FocalNet": _classifier(
        "FocalNet",
        16,
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[1, 1],
        focal_windows=[3, 3],
    ),
    "PVT": _classifier(
        "Pvt",
        32,
        image_size=32,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "MobileViT": _classifier(
        "MobileViT",
        64,
        image_size=64,
        hidden_sizes=[12, 12, 16],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16],
        num_attention_heads=2,
    ),
    "SegFormer": RealModel(
        from_config(
            "Segformer",
            "ForSemanticSegmentation",
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=8,
        ),
        pictures(32, "pixels"),
    ),
    "UPerNet": RealModel(lambda: _upernet(), pictures(64, "pixels")),
    "DETR": RealModel(lambda: _detr("Detr", "ForObjectDetection"), pictures(32, "boxes")),
    "Conditional DETR": RealModel(lambda: _detr("ConditionalDetr", "ForObjectDetection"), pictures(32, "boxes")),
    "YOLOS": RealModel(
        from_config("Yolos", "ForObjectDetection", **{**_PICTURE, "image_size": [32, 32], "num_detection_tokens": 4}),
        pictures(32, "boxes"),
    ),
    "Wav2Vec2": RealModel(from_config("Wav2Vec2", "ForCTC", **_WAVE), _speech),
    "HuBERT": RealModel(from_config("Hubert", "ForCTC", **_WAVE), _speech),
    "WavLM": RealModel(from_config("WavLM", "ForCTC", **_WAVE), _speech),
    "Data2Vec audio": RealModel(from_config("Data2VecAudio", "ForCTC", **_WAVE), _speech),
    "Whisper": RealModel(
        from_config(
            "Whisper",
            "ForConditionalGeneration",
            vocab_size=32,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=[],
            begin_suppress_tokens=[],
        ),
        _whisper,
    ),
    "AST": RealModel(
        from_config(
            "AST",
            "ForAudioClassification",
            **_SMALL,
            max_length=24,
            num_mel_bins=16,
            patch_size=8,
            frequency_stride=8,
            time_stride=8,
        ),
        lambda: {"input_values": torch.randn(2, 24, 16), "labels": torch.randint(2, (2,))},
    ),
    "CLIP": RealModel(from_config("CLIP", "Model", **_CLIP), _pairs),
    "SigLIP": RealModel(
        from_config("Siglip", "Model", **{k: v for k, v in _CLIP.items() if k != "projection_dim"}), _pairs
    ),
    "ViLT": RealModel(
        from_config("Vilt", "ForQuestionAnswering", **_PICTURE, vocab_size=32, max_position_embeddings=8, num_labels=4),
        _questions,
    ),
    "PatchTST": RealModel(
        from_config(
            "PatchTST",
            "ForPrediction",
            num_input_channels=2,
            context_length=16,
            prediction_length=4,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            ffn_dim=24,
        ),
        _series,
    ),
    "PatchTSMixer": RealModel(
        from_config(
            "PatchTSMixer",
            "ForPrediction",
            num_input_channels=2,
            context_length=16,
            prediction_length=4,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_layers=1,
        ),
        _series,
    ),
    "Decision transformer": RealModel(
        from_config(
            "DecisionTransformer", "Model", state_dim=3, act_dim=2, hidden_size=16, max_ep_len=8, n_layer=1, n_head=2
        ),
        lambda: {
            "states": torch.randn(2, 4, 3),
            "actions": torch.randn(2, 4, 2),
            "rewards": torch.randn(2, 4, 1),
            "returns_to_go": torch.randn(2, 4, 1),
            "timesteps": torch.arange(4).repeat(2, 1),
            "attention_mask": torch.ones(2, 4),
        },
        loss=lambda output: output.action_preds.square().mean(),
    ),
}
"""By name."""


def _upernet() -> Any:
    import transformers

    backbone = transformers.ConvNextConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone,
        hidden_size=8,
        pool_scales=[1, 2],
        use_auxiliary_head=True,
        auxiliary_channels=8,
        auxiliary_in_channels=16,
    )
    return transformers.UperNetForSemanticSegmentation(config)


def _detr(name: str, head: str) -> Any:
    import transformers

    import_timm()  # transformers imports it if it is installed

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    return getattr(transformers, name + head)(
        getattr(transformers, f"{name}Config")(**_DETECTOR, backbone_config=backbone)
    )
