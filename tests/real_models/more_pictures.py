"""Many model classes of timm, one or two of each family, on small pictures."""

import torch

from tests.real_models.timm_import import import_timm
from tests.real_models.training import RealModel

__all__ = ["MORE_PICTURES"]

_NAMES = {
    **dict.fromkeys(
        (
            *("test_byobnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet_evos"),
            *("test_efficientnet_gn", "test_mambaout", "test_nfnet", "test_resnet"),
            *("lcnet_035", "tinynet_e", "mobilenetv3_small_050", "mnasnet_small", "ghostnet_050", "repghostnet_050"),
            *("regnetx_002", "regnety_002", "semnasnet_075", "mobilenetv2_035", "hardcorenas_a", "starnet_s1"),
            *("edgenext_xx_small", "mobilevit_xxs", "mobilevitv2_050", "pvt_v2_b0", "efficientvit_b0", "fasternet_t0"),
            *("repvit_m0_9", "shvit_s1", "hgnetv2_b0", "rexnetr_200", "fbnetc_100", "spnasnet_100", "dla46_c"),
            *("swiftformer_xs", "resnest14d", "selecsls42", "xcit_nano_12_p8_224", "poolformerv2_s12"),
        ),
        (64, {}),
    ),
    **dict.fromkeys(("test_vit", "test_vit2", "test_vit3", "test_vit4", "test_coatnet", "test_maxvit"), (160, {})),
    "test_vit_relpos": (160, {}),
    "deit_tiny_patch16_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "beit_base_patch16_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "cait_xxs24_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4},
    ),
    "swinv2_tiny_window8_256": (
        32,
        {"img_size": 32, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4},
    ),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "embed_dim": 24, "depth": 2, "num_heads": 2}),
}


def _model(name, size, options) -> RealModel:
    def make():
        return import_timm().create_model(name, num_classes=3, **options)

    return RealModel(make, lambda: {"x": torch.randn(2, 3, size, size)}, needs=("timm",), steps=1)


MORE_PICTURES: dict[str, RealModel] = {
    f"timm {name}": _model(name, size, options) for name, (size, options) in _NAMES.items()
}
