"""Many model classes of diffusers, small."""

import importlib

import torch

from tests.real_models.training import RealModel

__all__ = ["MORE_DIFFUSION"]


def _loss(output):
    sample = output[0] if isinstance(output, tuple) else next(iter(output.values()))
    return sample.float().square().mean()


def _model(name, sizes, **inputs) -> RealModel:
    """Return a model; an input is a shape of normal numbers, or a function that draws it."""

    def make():
        return getattr(importlib.import_module("diffusers"), name)(**sizes)

    def batch():
        return {key: torch.randn(value) if isinstance(value, tuple) else value() for key, value in inputs.items()}

    return RealModel(make, batch, _loss, needs=("diffusers",), steps=1)


def _times():
    return torch.tensor([3, 500])


def _one():
    return torch.tensor([1.0])


def _pixels():
    return torch.tensor([[64, 64]] * 2)


def _corner():
    return torch.tensor([[0, 0]] * 2)


_TWO = {"num_attention_heads": 2, "num_layers": 2}
_VIDEO_BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 8, 8, 8), "latent_channels": 4}
_PICTURE, _FILM = (2, 3, 16, 16), (1, 3, 5, 16, 16)
_DOWN, _UP = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
_AXES = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)}
_PLACES = {"img_ids": (16, 3), "txt_ids": (6, 3), "timestep": _one}
_CROSS = {"cross_attention_dim": 8, "norm_num_groups": 4, "block_out_channels": (4, 8), "layers_per_block": 1}

MORE_DIFFUSION: dict[str, RealModel] = {
    "diffusers asymmetric autoencoder": _model(
        "AsymmetricAutoencoderKL",
        {
            "down_block_types": _DOWN,
            "up_block_types": _UP,
            "norm_num_groups": 2,
            "latent_channels": 4,
            "down_block_out_channels": (4, 8),
            "up_block_out_channels": (4, 8),
            "layers_per_down_block": 1,
            "layers_per_up_block": 1,
        },
        sample=_PICTURE,
        mask=lambda: torch.ones(2, 1, 16, 16),
    ),
    "diffusers deep compression autoencoder": _model(
        "AutoencoderDC",
        {
            "in_channels": 3,
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_out_channels": (8, 8),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "downsample_block_type": "conv",
            "upsample_block_type": "interpolate",
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
        },
        sample=_PICTURE,
    ),
    "diffusers CogVideoX autoencoder": _model(
        "AutoencoderKLCogVideoX", {**_VIDEO_BLOCKS, "norm_num_groups": 2}, sample=_FILM
    ),
    "diffusers temporal autoencoder": _model(
        "AutoencoderKLTemporalDecoder",
        {"block_out_channels": (32, 32), "down_block_types": _DOWN, "layers_per_block": 1},
        sample=(2, 3, 16, 16),
        num_frames=lambda: 2,
    ),
    "diffusers Magvit autoencoder": _model(
        "AutoencoderKLMagvit",
        {
            **_VIDEO_BLOCKS,
            "down_block_types": ("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
            "up_block_types": ("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
            "norm_num_groups": 8,
        },
        sample=_FILM,
    ),
    "diffusers Oobleck autoencoder": _model(
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 12,
            "decoder_channels": 12,
            "decoder_input_channels": 6,
            "audio_channels": 2,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        sample=(2, 2, 24),
    ),
    "diffusers tiny autoencoder": _model(
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        sample=_PICTURE,
    ),
    "diffusers vector-quantized autoencoder": _model(
        "VQModel",
        {"block_out_channels": (8, 16), "norm_num_groups": 8, "down_block_types": _DOWN, "up_block_types": _UP},
        sample=_PICTURE,
    ),
    "diffusers PixArt": _model(
        "PixArtTransformer2DModel",
        {
            **_TWO,
            "sample_size": 8,
            "attention_head_dim": 4,
            "in_channels": 4,
            "cross_attention_dim": 8,
            "out_channels": 8,
            "caption_channels": None,
            "use_additional_conditions": False,
        },
        hidden_states=(2, 4, 8, 8),
        timestep=_times,
        encoder_hidden_states=(2, 6, 8),
        added_cond_kwargs=lambda: {"aspect_ratio": None, "resolution": None},
    ),
    "diffusers prior": _model(
        "PriorTransformer",
        {**_TWO, "attention_head_dim": 4, "embedding_dim": 8, "num_embeddings": 7, "additional_embeddings": 4},
        hidden_states=(2, 8),
        timestep=lambda: 2,
        proj_embedding=(2, 8),
        encoder_hidden_states=(2, 7, 8),
    ),
    "diffusers Allegro": _model(
        "AllegroTransformer3DModel",
        {
            **_TWO,
            "attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 8,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
        },
        hidden_states=(2, 4, 2, 8, 8),
        encoder_hidden_states=(2, 6, 8),
        timestep=_times,
    ),
    "diffusers AuraFlow": _model(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 16,
            "pos_embed_max_size": 16,
        },
        hidden_states=(2, 4, 8, 8),
        encoder_hidden_states=(2, 6, 16),
        timestep=_times,
    ),
    "diffusers Chroma": _model(
        "ChromaTransformer2DModel",
        {
            **_AXES,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        hidden_states=(1, 16, 4),
        encoder_hidden_states=(1, 6, 32),
        **_PLACES,
    ),
    "diffusers CogVideoX": _model(
        "CogVideoXTransformer3DModel",
        {
            **_TWO,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "max_text_seq_length": 8,
        },
        hidden_states=(2, 1, 4, 8, 8),
        encoder_hidden_states=(2, 8, 8),
        timestep=_times,
    ),
    "diffusers CogView 3": _model(
        "CogView3PlusTransformer2DModel",
        {
            **_TWO,
            "in_channels": 4,
            "attention_head_dim": 4,
            "out_channels": 4,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 2,
            "pos_embed_max_size": 8,
            "sample_size": 8,
        },
        hidden_states=(2, 4, 8, 8),
        encoder_hidden_states=(2, 8, 8),
        timestep=_times,
        original_size=_pixels,
        target_size=_pixels,
        crop_coords=_corner,
    ),
    "diffusers CogView 4": _model(
        "CogView4Transformer2DModel",
        {
            **_TWO,
            "in_channels": 4,
            "attention_head_dim": 4,
            "out_channels": 4,
            "text_embed_dim": 8,
            "time_embed_dim": 8,
            "condition_dim": 4,
        },
        hidden_states=(2, 4, 8, 8),
        encoder_hidden_states=(2, 8, 8),
        timestep=_times,
        original_size=_pixels,
        target_size=_pixels,
        crop_coords=_corner,
    ),
    "diffusers Flux": _model(
        "FluxTransformer2DModel",
        {**_AXES, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "pooled_projection_dim": 32},
        hidden_states=(1, 16, 4),
        encoder_hidden_states=(1, 6, 32),
        pooled_projections=(1, 32),
        **_PLACES,
    ),
    "diffusers Latte": _model(
        "LatteTransformer3DModel",
        {
            **_TWO,
            "sample_size": 8,
            "patch_size": 2,
            "attention_head_dim": 4,
            "caption_channels": 8,
            "in_channels": 4,
            "cross_attention_dim": 8,
            "out_channels": 8,
            "attention_bias": True,
            "norm_elementwise_affine": False,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
        },
        hidden_states=(2, 4, 1, 8, 8),
        encoder_hidden_states=(2, 6, 8),
        timestep=_times,
    ),
    "diffusers LTX": _model(
        "LTXVideoTransformer3DModel",
        {
            **_TWO,
            "in_channels": 4,
            "out_channels": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "qk_norm": "rms_norm_across_heads",
            "caption_channels": 16,
        },
        hidden_states=(2, 2 * 4 * 4, 4),
        encoder_hidden_states=(2, 6, 16),
        timestep=_times,
        encoder_attention_mask=lambda: torch.ones(2, 6, dtype=torch.bool),
        num_frames=lambda: 2,
        height=lambda: 4,
        width=lambda: 4,
    ),
    "diffusers Lumina 2": _model(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 16,
        },
        hidden_states=(2, 4, 8, 8),
        encoder_hidden_states=(2, 6, 16),
        timestep=lambda: torch.rand(2),
        encoder_attention_mask=lambda: torch.ones(2, 6, dtype=torch.bool),
    ),
    "diffusers Mochi": _model(
        "MochiTransformer3DModel",
        {
            **_TWO,
            "attention_head_dim": 8,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        hidden_states=(2, 4, 2, 8, 8),
        encoder_hidden_states=(2, 16, 16),
        timestep=_times,
        encoder_attention_mask=lambda: torch.ones(2, 16, dtype=torch.bool),
    ),
    "diffusers Qwen-Image": _model(
        "QwenImageTransformer2DModel",
        {
            **_TWO,
            "in_channels": 16,
            "out_channels": 4,
            "attention_head_dim": 16,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        hidden_states=(1, 16, 16),
        encoder_hidden_states=(1, 6, 16),
        encoder_hidden_states_mask=lambda: torch.ones(1, 6, dtype=torch.long),
        timestep=_one,
        img_shapes=lambda: [(1, 4, 4)],
        txt_seq_lens=lambda: [6],
    ),
    "diffusers Sana": _model(
        "SanaTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 4,
            "caption_channels": 8,
            "num_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 8,
            "sample_size": 8,
        },
        hidden_states=(2, 4, 8, 8),
        encoder_hidden_states=(2, 6, 8),
        timestep=_times,
    ),
    "diffusers Stable Diffusion 3": _model(
        "SD3Transformer2DModel",
        {
            **_TWO,
            "sample_size": 8,
            "patch_size": 1,
            "in_channels": 4,
            "attention_head_dim": 8,
            "out_channels": 4,
            "caption_projection_dim": 16,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "pos_embed_max_size": 16,
        },
        hidden_states=(2, 4, 8, 8),
        encoder_hidden_states=(2, 6, 16),
        pooled_projections=(2, 16),
        timestep=_times,
    ),
    "diffusers temporal transformer": _model(
        "TransformerTemporalModel",
        {"num_attention_heads": 2, "attention_head_dim": 4, "in_channels": 4, "num_layers": 1, "norm_num_groups": 1},
        hidden_states=(2, 4, 8, 8),
        timestep=_times,
    ),
    "diffusers Wan": _model(
        "WanTransformer3DModel",
        {
            **_TWO,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 24,
            "rope_max_seq_len": 32,
        },
        hidden_states=(1, 4, 2, 8, 8),
        encoder_hidden_states=(1, 6, 16),
        timestep=lambda: torch.tensor([3]),
    ),
    "diffusers UNet of sequences": _model(
        "UNet1DModel",
        {
            "block_out_channels": (8, 8, 16, 16),
            "in_channels": 14,
            "out_channels": 14,
            "act_fn": "swish",
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "flip_sin_to_cos": False,
            "freq_shift": 1.0,
            "out_block_type": "OutConv1DBlock",
            "mid_block_type": "MidResTemporalBlock1D",
            "down_block_types": ("DownResnetBlock1D",) * 4,
            "up_block_types": ("UpResnetBlock1D",) * 3,
        },
        sample=(2, 14, 16),
        timestep=_times,
    ),
    "diffusers UNet of films": _model(
        "UNet3DConditionModel",
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "attention_head_dim": 2,
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        sample=(1, 4, 2, 8, 8),
        timestep=lambda: torch.tensor([10]),
        encoder_hidden_states=(1, 4, 8),
    ),
    "diffusers UNet of motion": _model(
        "UNetMotionModel",
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
            "num_attention_heads": 2,
            "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            "motion_num_attention_heads": 2,
        },
        sample=(1, 4, 2, 8, 8),
        timestep=lambda: torch.tensor([10]),
        encoder_hidden_states=(2, 4, 8),
    ),
    "diffusers UNet of space and time": _model(
        "UNetSpatioTemporalConditionModel",
        {
            "block_out_channels": (32, 32),
            "cross_attention_dim": 8,
            "num_attention_heads": 2,
            "in_channels": 4,
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "layers_per_block": 1,
            "projection_class_embeddings_input_dim": 96,
            "addition_time_embed_dim": 32,
        },
        sample=(1, 2, 4, 8, 8),
        timestep=lambda: torch.tensor([10]),
        encoder_hidden_states=(1, 1, 8),
        added_time_ids=lambda: torch.tensor([[6, 127, 0.02]]),
    ),
}
