"""Models of timm, diffusers, PEFT, PyTorch Geometric, torchao and bitsandbytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.real_models.language_models import from_config, tokens
from tests.real_models.timm_import import import_timm
from tests.real_models.training import Batch, RealModel

__all__ = ["OTHER_MODELS"]

_LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_llama = from_config("Llama", "ForCausalLM", **_LLAMA)


# -- pictures -------------------------------------------------------------------------------------------------------


def _timm(name: str, size: int = 32, **options: Any) -> RealModel:
    def make() -> nn.Module:
        return import_timm().create_model(name, num_classes=3, **options)

    def batch() -> Batch:
        return {"x": torch.randn(2, 3, size, size)}

    return RealModel(make, batch, needs=("timm",))


def _unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def _conditional_unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=2,
    )


def _autoencoder() -> nn.Module:
    import diffusers

    return diffusers.AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, layers_per_block=1, latent_channels=2)


def _diffusion_transformer() -> nn.Module:
    import diffusers

    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=2, sample_size=8, norm_num_groups=1
    )


def _noised(channels: int = 3, **more: Callable[[], Any]) -> Callable[[], Batch]:
    def draw() -> Batch:
        shared = {"sample": torch.randn(2, channels, 8, 8), "timestep": torch.tensor([3, 500])}
        return shared | {name: make() for name, make in more.items()}

    return draw


def _mean_square(output: Any) -> Tensor:
    return output.sample.square().mean()


# -- adapters ---------------------------------------------------------------------------------


def _adapted(kind: str = "LoraConfig", checkpointed: bool | None = None, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a language model with adapters.

    `checkpointed` says whether its checkpoints are reentrant; ``None`` for none.
    """

    def make() -> nn.Module:
        import peft

        model = _llama()
        if checkpointed is not None:
            model.config.use_cache = False
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointed})
            model.enable_input_require_grads()
        return peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))

    return make


_LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}


# -- quantised weights ------------------------------------------------------------------------------------------------


def _torchao() -> nn.Module:
    """Return a language model whose linear layers are frozen in eight bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = _llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)
    return model


class _Embedded(nn.Module):
    """A network whose inner layers have four bits."""

    def __init__(self) -> None:
        super().__init__()
        import bitsandbytes

        self.first = nn.Linear(16, 64)
        self.inner = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(self.first(x))))


def _four_bits() -> nn.Module:
    return _Embedded().to("cpu")


def _vectors() -> Batch:
    return {"x": torch.randn(5, 16)}


# -- graphs ---------------------------------------------------------------------------------------------------------


def _graph_network(name: str, **options: Any) -> RealModel:
    def make() -> nn.Module:
        from torch_geometric.nn import models

        return getattr(models, name)(
            in_channels=6, hidden_channels=8, num_layers=3, out_channels=3, dropout=0.2, **options
        )

    return RealModel(make, _graph, needs=("torch_geometric",))


def _graph() -> Batch:
    return {"x": torch.randn(10, 6), "edge_index": torch.randint(10, (2, 30))}


OTHER_MODELS: dict[str, RealModel] = {
    "timm ResNet": _timm("resnet10t", channels=(8, 8, 16, 16), stem_width=8),
    "timm ConvNeXt": _timm("convnext_atto", dims=(8, 16, 24, 32), depths=(1, 1, 1, 1)),
    "timm ViT": _timm("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2),
    "timm EfficientNet": _timm("test_efficientnet", drop_path_rate=0.1),
    "timm MobileNet v4": _timm("mobilenetv4_conv_small_035"),
    "diffusers UNet": RealModel(_unet, _noised(), _mean_square, needs=("diffusers",)),
    "diffusers conditional UNet": RealModel(
        _conditional_unet,
        _noised(4, encoder_hidden_states=lambda: torch.randn(2, 5, 8)),
        _mean_square,
        needs=("diffusers",),
    ),
    "diffusers autoencoder": RealModel(
        _autoencoder, lambda: {"sample": torch.randn(2, 3, 16, 16)}, _mean_square, needs=("diffusers",)
    ),
    "PEFT LoRA": RealModel(_adapted(**_LORA), tokens(), needs=("peft",)),
    "PEFT LoRA, checkpointed": RealModel(_adapted(checkpointed=False, **_LORA), tokens(), needs=("peft",)),
    "PEFT LoRA, reentrant checkpoints": RealModel(_adapted(checkpointed=True, **_LORA), tokens(), needs=("peft",)),
    "PEFT DoRA": RealModel(_adapted(**_LORA, use_dora=True), tokens(), needs=("peft",)),
    "PEFT IA3": RealModel(
        _adapted("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        tokens(),
        needs=("peft",),
    ),
    "PEFT prefix": RealModel(
        _adapted("PrefixTuningConfig", num_virtual_tokens=3), tokens(masked=True), needs=("peft",)
    ),
    "PEFT, trained embedding": RealModel(
        _adapted(**_LORA, modules_to_save=["embed_tokens"]), tokens(), needs=("peft",)
    ),
    "GCN": _graph_network("GCN"),
    "GAT": _graph_network("GAT"),
    "GraphSAGE": _graph_network("GraphSAGE"),
    "GIN": _graph_network("GIN"),
    "torchao": RealModel(_torchao, tokens(), needs=("torchao",)),
    "bitsandbytes": RealModel(_four_bits, _vectors, needs=("bitsandbytes",)),
}
"""By name."""
