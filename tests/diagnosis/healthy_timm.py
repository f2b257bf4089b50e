"""Unmodified models of timm with a new head, by name: one of each family that has a small model."""

import torch
from torch import nn

from tests.real_models.timm_import import import_timm

_PICTURE = 64

PLAIN = (
    *("cs3darknet_focus_s", "cspnext_tiny", "csatv2", "densenet121", "dla34", "dpn48b", "edgenext_xx_small"),
    *("efficientnet_b0", "efficientnet_lite0", "efficientvim_m1", "efficientvit_b0", "efficientvit_m0"),
    *("ese_vovnet19b_slim_dw", "fastvit_s12", "fbnetc_100", "ghostnet_050", "hardcorenas_b", "hgnetv2_b0"),
    *("hrnet_w18_small", "inception_next_atto", "lcnet_050", "lcnetv2_small", "legacy_seresnet18", "lowformer_b0"),
    *("mnasnet_small", "mobilenetv2_050", "mobilenetv3_small_050", "mobileone_s0", "mobilevit_xxs", "poolformer_s12"),
    *("pvt_v2_b0", "regnetx_002", "repghostnet_050", "repvgg_a0", "repvit_m1", "res2net50_14w_8s", "resnest14d"),
    *("resnet10t", "resnetv2_18", "rexnet_100", "selecsls42", "semnasnet_075", "shvit_s1", "skresnet18"),
    *("spnasnet_100", "starnet_s1", "swiftformer_xs", "test_nfnet", "tinynet_e", "convnext_atto"),
)
SIZED = (
    *("coat_tiny", "convit_tiny", "deit_tiny_patch16_224", "eva02_tiny_patch14_224", "gcvit_xxtiny", "pit_xs_224"),
    *("resmlp_12_224", "test_vit", "tiny_vit_5m_224", "visformer_tiny", "vit_tiny_patch16_224"),
    *("xcit_nano_12_p8_224", "test_coatnet"),
)
"""Models that are made for a size of pictures."""

NAMES = (*PLAIN, *SIZED)


def make(name: str, classes: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return a model with a new head, and a batch of 8 pictures of noise."""
    timm = import_timm()
    try:
        model = timm.create_model(name, num_classes=classes, **({"img_size": _PICTURE} if name in SIZED else {}))
    except TypeError:  # a model that has no option for the size accepts each size
        model = timm.create_model(name, num_classes=classes)
    return model, (torch.randn(8, 3, _PICTURE, _PICTURE), torch.randint(classes, (8,)))
