"""Tiny models of every family that the patch supports, built from a config, with inputs.

Norm weights and biases are perturbed: at their initial 1 and 0 a dropped one would not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import timm
import torch
import transformers as tf
from torch import Tensor, nn

from hf_autonorm.nn.autonorm import AutoNorm

K = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
}


def tokens(batch: int = 2, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Token ids with a mask whose last row is padded by two."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, -2:] = 0
    return {"input_ids": torch.randint(3, 64, (batch, length), generator=generator), "attention_mask": mask}


def images(size: int, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))}


def bert(**k: Any) -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**{**K, "max_position_embeddings": 40, **k}))


def roberta(**k: Any) -> nn.Module:
    config = {**K, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, **k}
    return tf.RobertaForMaskedLM(tf.RobertaConfig(**config))


def distilbert(**k: Any) -> nn.Module:
    config = {
        "vocab_size": 64,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 40,
    }
    return tf.DistilBertForTokenClassification(tf.DistilBertConfig(**{**config, **k}))


def gpt2(**k: Any) -> nn.Module:
    config = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 64,
        "n_positions": 40,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return tf.GPT2LMHeadModel(tf.GPT2Config(**{**config, **k}))


def llama(**k: Any) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**K, "num_key_value_heads": 2, **k}))


def gemma(**k: Any) -> nn.Module:
    return tf.GemmaForCausalLM(tf.GemmaConfig(**{**K, "num_key_value_heads": 2, "head_dim": 8, **k}))


def t5(**k: Any) -> nn.Module:
    config = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    config |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
    return tf.T5ForConditionalGeneration(tf.T5Config(**{**config, **k}))


def vit(**k: Any) -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**{**IMAGE, "patch_size": 8, **k}))


def deit(**k: Any) -> nn.Module:
    return tf.DeiTForImageClassificationWithTeacher(tf.DeiTConfig(**{**IMAGE, "patch_size": 8, **k}))


def swin(**k: Any) -> nn.Module:
    config = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    }
    return tf.SwinForImageClassification(tf.SwinConfig(**{**config, **k}))


def convnext(**k: Any) -> nn.Module:
    config = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}
    return tf.ConvNextForImageClassification(tf.ConvNextConfig(**{**config, **k}))


def timm_vit(**k: Any) -> nn.Module:
    config = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**config, **k})


def timm_deit(**k: Any) -> nn.Module:
    config = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    return timm.create_model("deit_tiny_distilled_patch16_224", **{**config, **k})


def timm_swin(**k: Any) -> nn.Module:
    config = {
        "img_size": 32,
        "embed_dim": 16,
        "depths": (1, 1),
        "num_heads": (2, 2),
        "window_size": 4,
        "num_classes": 5,
    }
    return timm.create_model("swin_tiny_patch4_window7_224", **{**config, **k})


def timm_convnext(**k: Any) -> nn.Module:
    return timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20), num_classes=5, **k)


def albert(**k: Any) -> nn.Module:
    """One layer object, called three times."""
    config = {**K, "num_hidden_layers": 3, "embedding_size": 16, "max_position_embeddings": 40}
    return tf.AlbertModel(tf.AlbertConfig(**{**config, **k}))


def mixtral(**k: Any) -> nn.Module:
    """Experts: which tokens a layer sees depends on the layers before it."""
    config = {**K, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**{**config, **k}))


# name → (builder, inputs, number of norms to patch)
FAMILIES: dict[str, tuple[Callable[..., nn.Module], Callable[[], dict[str, Tensor]], int]] = {
    "bert": (bert, tokens, 5),
    "roberta": (roberta, tokens, 6),
    "distilbert": (distilbert, tokens, 5),
    "gpt2": (gpt2, tokens, 5),
    "llama": (llama, tokens, 5),
    "gemma": (gemma, tokens, 5),
    "t5": (t5, lambda: {**tokens(), "decoder_input_ids": tokens(seed=1)["input_ids"]}, 12),
    "vit": (vit, lambda: images(16), 5),
    "deit": (deit, lambda: images(16), 5),
    "swin": (swin, lambda: images(32), 7),
    "convnext": (convnext, lambda: images(64), 9),
    "timm_vit": (timm_vit, lambda: {"x": images(32)["pixel_values"]}, 5),
    "timm_deit": (timm_deit, lambda: {"x": images(32)["pixel_values"]}, 5),
    "timm_swin": (timm_swin, lambda: {"x": images(32)["pixel_values"]}, 7),
    "timm_convnext": (timm_convnext, lambda: {"x": images(64)["pixel_values"]}, 9),
}
CAUSAL = ("gpt2", "llama", "gemma")


def build(family: str, **k: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """(the model in eval mode, norms perturbed; its inputs). The same bits at every call."""
    builder, inputs, _ = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return perturb_norms(builder(**k)).eval(), inputs()


@torch.no_grad()
def perturb_norms(model: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for p in module._parameters.values():
                if p is not None:
                    p.add_(0.3 * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


@torch.no_grad()
def perturb_gates(model: nn.Module, seed: int = 2, size: float = 0.5) -> nn.Module:
    """Selectors as training might leave them: at the start they say the same for every token."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, AutoNorm):
            for p in module.bias_gate.parameters():
                p.add_(size * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


def floats(output: Any) -> Iterator[Tensor]:
    """All floating tensors in a model's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from floats(value)
    elif hasattr(output, "layers"):  # a key-value cache
        yield from (t for layer in output.layers for t in (layer.keys, layer.values) if isinstance(t, Tensor))


def run(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    outputs = list(floats(model(**inputs)))
    assert outputs
    return outputs


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A scalar in which every output counts, differently."""
    return sum(
        (t.double() * torch.linspace(-1, 1, t.numel(), dtype=torch.float64).view(t.shape)).sum() for t in outputs
    )


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal dtype, shape and bits, NaN included, −0 told from 0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return (
        torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
        if first.ndim
        else (same_bits(first[None], second[None]))
    )
