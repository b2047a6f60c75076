"""The models from scratch: what they are, what they keep, the options of training that they take."""

import pytest
import torch

pytest.importorskip("timm")

from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from hf_autonorm import patch
from tests.training.test_tasks import FAMILIES
from training.models import FROM_SCRATCH, hub_id, resolve_model
from training.models.feature_transformer import FeatureTransformer, FeatureTransformerConfig, Standardize
from training.models.text_encoder import text_encoder, train_tokenizer
from training.models.vit_lite import vit_lite
from training.tasks.image_classification import processor_settings


def small_table_model(**options) -> FeatureTransformer:
    options = {"features": list("abc"), "targets": ["y", "z"], "num_hidden_layers": 2, "hidden_size": 32} | options
    return FeatureTransformer(FeatureTransformerConfig(**options)).eval()


# --- ViT-Lite -------------------------------------------------------------------------------------------------------


def test_vit_lite_is_as_designed_and_reloads(tmp_path):
    torch.manual_seed(0)
    model = vit_lite(["cat", "dog", "owl"], image_size=32, channels=3).eval()
    blocks = model.timm_model.blocks
    assert len(blocks) == 8 and {block.attn.num_heads for block in blocks} == {4}
    assert model.timm_model.patch_embed.proj.weight.shape == (128, 3, 4, 4)
    assert all((block.ls1.gamma == 1e-4).all() and isinstance(block.mlp.act, nn.GELU) for block in blocks)
    depth = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    assert depth == pytest.approx([0.1 * i / 7 for i in range(8)])
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} >= {0.1}

    image = torch.rand(2, 3, 32, 32)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(image).logits, model(image).logits)
    assert again.config.id2label == {0: "cat", 1: "dog", 2: "owl"}
    settings = processor_settings(processor, "vit_lite")
    assert (settings["size"], settings["channels"], list(settings["mean"])) == (32, 3, [0.5] * 3)


def test_images_that_do_not_divide_into_patches_are_refused():
    with pytest.raises(ValueError, match="30 pixels do not divide into patches of 4"):
        vit_lite(["a", "b"], image_size=30, channels=1)


def test_sizes_are_overridden_or_refused():
    small = vit_lite(["a", "b"], 28, 1, "patch_size=7,embed_dim=64,init_values=null")
    assert small.timm_model.patch_embed.proj.weight.shape == (64, 1, 7, 7)
    assert not any("ls1" in name for name, _ in small.named_parameters())
    encoder = text_encoder(AutoModelForTokenClassification, train_tokenizer(TEXTS), "hidden_size=64", num_labels=2)
    assert encoder.config.hidden_size == 64 and encoder.config.intermediate_size == 512
    for overrides, words in {
        "dept=4": "'dept=4'.*depth",
        "depth": "KEY=VALUE",
        "depth=four": "no number",
        "depth=4 embed_dim=3": "no number",
    }.items():
        with pytest.raises(ValueError, match=words):
            vit_lite(["a", "b"], 28, 1, overrides)
    with pytest.raises(ValueError, match="models from scratch"):
        resolve_model("minilm", "depth=4")


# --- Text -----------------------------------------------------------------------------------------------------------

TEXTS = ["The same texts give the same tokens .", "So they do , in Every process !", "antidisestablishmentarianism"]


def test_the_same_texts_give_the_same_tokenizer():
    """Trained WordPieces differ from one training to the next, even within a process."""
    assert len({train_tokenizer(TEXTS * 50).backend_tokenizer.to_str() for _ in range(4)}) == 1


def test_text_encoder_is_as_designed_and_reloads_with_its_tokenizer(tmp_path):
    tokenizer = train_tokenizer(text.split() for text in TEXTS)
    model = text_encoder(AutoModelForTokenClassification, tokenizer, num_labels=5).eval()
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (12, 128, 8)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, same = AutoModelForTokenClassification.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    words = ["The", "same", "unseen-ß"]
    batch = tokenizer([words, words[:1]], is_split_into_words=True, padding=True, return_tensors="pt")
    reread = same([words, words[:1]], is_split_into_words=True, padding=True, return_tensors="pt")
    assert batch.keys() == reread.keys() and all(torch.equal(batch[name], reread[name]) for name in batch)
    assert tokenizer.unk_token_id not in batch["input_ids"]  # bytes spell everything
    assert "".join(tokenizer.batch_decode(batch["input_ids"][:1], skip_special_tokens=True)) == " The same unseen-ß"
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    # As long as the tokenizer lets a text be.
    long = tokenizer("word " * 1000, truncation=True, return_tensors="pt")
    assert long["input_ids"].shape[1] == 512 and model(**long).logits.shape == (1, 512, 5)


# --- Tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 3])
def test_scales_are_those_of_the_training_rows_and_invert(columns):
    values = torch.randn(50, columns) * torch.tensor([1e5, 1.0, 1e-3])[:columns] + 7
    scale = Standardize(columns)
    scale.fit(values)
    assert torch.allclose(scale(values).mean(0), torch.zeros(columns), atol=1e-3)
    assert torch.allclose(scale(values).std(0, correction=0), torch.ones(columns), atol=1e-4)
    assert torch.allclose(scale.back(scale(values)), values, rtol=1e-4)
    scale.fit(torch.full((4, columns), 3.0))
    assert torch.equal(scale(torch.full((2, columns), 3.0)), torch.zeros(2, columns))


def test_units_do_not_change_what_is_learned():
    """Features and targets in other units: the same loss and gradients, predictions in those units."""
    torch.manual_seed(0)
    features, targets = torch.randn(20, 3), torch.randn(20, 2)
    results = []
    for unit, offset in ((1.0, 0.0), (1000.0, 50.0)):
        torch.manual_seed(1)
        model = small_table_model()
        model.feature_scale.fit(features * unit + offset)
        model.target_scale.fit(targets * unit + offset)
        output = model(features * unit + offset, targets * unit + offset)
        output.loss.backward()
        results.append((output.loss, (output.logits - offset) / unit, model.head.weight.grad))
    for first, second in zip(*results):
        assert torch.allclose(first, second, atol=1e-3)


def test_predictions_keep_their_units_in_half_precision_and_after_reloading(tmp_path):
    """House values do not fit into fp16: 206,000 ± 115,000."""
    torch.manual_seed(0)
    model = small_table_model(targets=["value"])
    features = torch.randn(8, 3)
    model.feature_scale.fit(features)
    model.target_scale.fit(torch.tensor([[91_000.0], [321_000.0]]))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(features).logits
        assert torch.equal(AutoModel.from_pretrained(tmp_path)(features).logits, expected)
        for dtype in (torch.float16, torch.bfloat16):
            half = AutoModel.from_pretrained(tmp_path, dtype=dtype)
            assert half.head.weight.dtype == dtype and half.target_scale.std.dtype == torch.float32
            assert torch.allclose(half(features).logits, expected, atol=0.1 * 115_000)


# --- All of them ----------------------------------------------------------------------------------------------------


def no_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family):
    """The gates' noise is drawn again as it was, in the second forward."""
    make, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model, batch = no_dropout(patch(make())), inputs()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(1)
        model(**batch).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-6), name


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_precision(family):
    make, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model, batch = patch(make()).train(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_names_of_models_from_scratch():
    for name in FROM_SCRATCH:
        assert hub_id(name) is None
        with pytest.raises(ValueError, match="not a model of this task"):
            resolve_model(name)
