"""ViT-Lite for small images: 8 layers, 4 heads, width 128, patches of 4 × 4 (arXiv 2104.05704).

GELU, stochastic depth 0.1 (rising over the layers), LayerScale 1e-4, dropout 0.1. It is timm's VisionTransformer
inside transformers' wrapper, so `AutoModelForImageClassification` and `AutoImageProcessor` load what was saved.
"""

from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from training.models import class_names, parse_overrides

SIZES = {"patch_size": 4, "embed_dim": 128, "depth": 8, "num_heads": 4, "init_values": 1e-4}
DROPOUT = {"drop_rate": 0.1, "pos_drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.1}


def vit_lite(
    names: list[str], image_size: int, channels: int, overrides: str | None = None
) -> TimmWrapperForImageClassification:
    """With fresh weights; images are (channels, image_size, image_size), standardised from [0, 1] to [-1, 1].

    overrides: of `SIZES` and `DROPOUT`, as `--config_overrides` takes them.
    """
    sizes = SIZES | DROPOUT
    sizes |= parse_overrides(overrides, sizes, "vit_lite")
    if image_size % sizes["patch_size"]:
        raise ValueError(f"Images of {image_size} pixels do not divide into patches of {sizes['patch_size']}.")
    shape, half = [channels, image_size, image_size], [0.5] * channels
    config = TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",  # timm's name for the class; every size of it is overridden
        model_args={"img_size": image_size, "in_chans": channels, **sizes},
        pretrained_cfg={
            "input_size": shape,
            "mean": half,
            "std": half,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "num_classes": len(names),
        },
        **class_names(names),
    )
    return TimmWrapperForImageClassification(config)
