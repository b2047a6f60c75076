"""Whole models: inference, training step and generation of a patched model as ratios to the unpatched one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_autonorm import fold, patch, set_strength
from hf_autonorm.nn.autonorm import autonorms

from .timing import Section, forward, measure

UNPATCHED, FOLDED = "unpatched", "folded to the originals"


def encoder(layers: int = 6, width: int = 384, heads: int = 12, vocabulary: int = 30522) -> nn.Module:
    """MiniLM's sizes."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            vocab_size=vocabulary,
        )
    )


def vision_transformer(depth: int = 8) -> nn.Module:
    """ViT-Lite as `training/models/vit_lite.py` sets it, for images of 32 × 32."""
    import timm

    from training.models.vit_lite import DROPOUT, SIZES

    sizes = {"img_size": 32, "num_classes": 10, **SIZES, "depth": depth}
    return timm.create_model("vit_tiny_patch16_224", **sizes, **DROPOUT)


def decoder(layers: int = 6, width: int = 256, vocabulary: int = 4096) -> nn.Module:
    """A small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=3 * width,
            vocab_size=vocabulary,
            pad_token_id=0,
        )
    )


def variants(model: nn.Module, corrections: dict[str, str]) -> dict[str, nn.Module]:
    """The model itself, and patched copies of it. corrections: {"linear": …} or {"conv": …}."""
    found = {
        UNPATCHED: model,
        "AutoNorm": patch(copy.deepcopy(model)),
        "AutoNorm, frozen": patch(copy.deepcopy(model)),
        "Dynamic Tanh": patch(copy.deepcopy(model), "dyt"),
        "affine-like": patch(copy.deepcopy(model), None, **corrections),
        FOLDED: patch(copy.deepcopy(model)),
    }
    for _, layer in autonorms(found["AutoNorm, frozen"]):
        layer.freeze()
    set_strength(found[FOLDED], 0.0)
    found[FOLDED] = fold(found[FOLDED])
    return found


def is_the_same(first: nn.Module, second: nn.Module) -> bool:
    """Same classes under the same names, same state dict to the bit."""
    classes = [[(name, type(module)) for name, module in model.named_modules()] for model in (first, second)]
    states = [model.state_dict() for model in (first, second)]
    return (
        classes[0] == classes[1]
        and list(states[0]) == list(states[1])
        and all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states)))
    )


def training_step(model: nn.Module, loss_of: Callable[[Any], Tensor], inputs: dict[str, Tensor]) -> Callable[[], None]:
    """Forward, backward and AdamW's step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(**inputs)).backward()
        optimizer.step()

    return run


def inference(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], object]:
    step = forward(model, **inputs)
    return lambda: step() if model.eval() else None


def generation(model: nn.Module, prompt: Tensor, new: int) -> Callable[[], object]:
    """Greedy, with the key-value cache, `new` tokens."""

    def run() -> object:
        model.eval()
        with torch.no_grad():
            return model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )

    return run


def run(seconds: float, tiny: bool = False) -> dict[str, Section]:
    torch.manual_seed(0)
    small = {"layers": 1, "width": 32, "vocabulary": 64} if tiny else {}
    batch, length, images, new = (2, 8, 2, 2) if tiny else (16, 64, 64, 32)
    sections: dict[str, Section] = {}

    def measured(name: str, title: str, work: dict[str, Callable[[], object]], share: float) -> None:
        sections[name] = measure(title, UNPATCHED, work, seconds * share)

    text = variants(encoder(**small, **({"heads": 2} if tiny else {})), {"linear": "affine_like"})
    ids = torch.randint(1, text[UNPATCHED].config.vocab_size, (batch, length))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    labelled = {**inputs, "labels": torch.randint(0, 2, (batch,))}
    assert is_the_same(text[UNPATCHED], text[FOLDED])
    size = f"MiniLM-size encoder, batch {batch}×{length}"
    measured("MiniLM, inference", f"{size}, inference", {k: inference(m, inputs) for k, m in text.items()}, 0.25)
    steps = {k: training_step(m, lambda output: output.loss, labelled) for k, m in text.items()}
    measured("MiniLM, training step", f"{size}, training step (AdamW)", steps, 0.35)

    rules = {"linear": "affine_like", "conv": "affine_like"}
    vision = variants(vision_transformer(1 if tiny else 8), rules)
    x = {"x": torch.randn(images, 3, 32, 32)}
    size = f"ViT-Lite, {images} images"
    measured("ViT-Lite, inference", f"{size}, inference", {k: inference(m, x) for k, m in vision.items()}, 0.08)
    labels = torch.randint(0, 10, (images,))
    steps = {
        k: training_step(m, lambda logits: nn.functional.cross_entropy(logits, labels), x) for k, m in vision.items()
    }
    measured("ViT-Lite, training step", f"{size}, training step (AdamW)", steps, 0.12)

    causal = variants(decoder(**small), {"linear": "affine_like"})
    ids = torch.randint(1, causal[UNPATCHED].config.vocab_size, (max(1, batch // 4), 2 * length))
    size = f"Llama of {sum(p.numel() for p in causal[UNPATCHED].parameters()) / 1e6:.1f} M"
    of_batch = f"{size}, batch {len(ids)}×{ids.shape[1]}"
    work = {k: inference(m, {"input_ids": ids}) for k, m in causal.items()}
    measured("Llama, inference", f"{of_batch}, inference", work, 0.05)
    steps = {
        k: training_step(m, lambda output: output.loss, {"input_ids": ids, "labels": ids}) for k, m in causal.items()
    }
    measured("Llama, training step", f"{of_batch}, training step (AdamW)", steps, 0.08)
    work = {k: generation(m, ids[:1, :8], new) for k, m in causal.items()}
    measured("Llama, generation", f"{size}, {new} new tokens from 8, greedy", work, 0.07)
    return sections
