"""dtypes, initialisation, scalars and python state (README.md, rows 39 to 49)."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_autonorm import from_pretrained, patch, save_pretrained
from hf_autonorm.nn import AutoNorm, Wrapper
from hf_autonorm.nn.branches import BRANCHES
from tests import zoo
from tests.guarantees import tensors
from tests.models import bert, build, run, same_bits, t5, tokens

HALF = (torch.float16, torch.bfloat16)


def wrappers(model):
    return [m for m in model.modules() if isinstance(m, Wrapper)]


# --- row 40 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("norm", ["autonorm", *sorted(BRANCHES.keys() - {"film", "identity"})])
def test_a_zero_row_in_half_precision_is_finite(norm, dtype):
    """1e-12 is 0 in fp16: a padding row of zeros would give 0/0."""
    model, plain = bert(layer_norm_eps=1e-12).to(dtype), bert(layer_norm_eps=1e-12).to(dtype)
    finite = {}
    for one in (plain, patch(model, norm)):
        with torch.no_grad():
            for table in (m for m in one.modules() if isinstance(m, nn.Embedding)):
                table.weight.zero_()
        output = run(one.train(), tokens())[0]
        output.float().square().sum().backward()
        assert output.dtype == dtype and output.isfinite().all()
        finite[one] = all(p.grad is None or p.grad.isfinite().all() for p in one.parameters())
    assert finite[model] or not finite[plain]  # 1/sqrt(1e-12) times a gradient is more than fp16 holds


# --- row 41 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [e for e in zoo.sample(7) if e.name != "test_vit"], ids=str)
def test_a_model_may_change_its_dtype_before_and_after_the_patch(entry):
    model, inputs = entry.build()
    model = model.to(torch.bfloat16)
    dtypes = {name: t.dtype for name, t in model.state_dict().items()}
    patch(model, linear="affine_like") if entry.name != "test_resnet" else patch(model, None, conv="affine_like")
    layers = wrappers(model)
    assert layers and all(p.dtype == torch.bfloat16 for w in layers for p in w.new_parameters())
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        model = model.to(dtype)
        floats = {k: v.to(dtype) for k, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
        with torch.no_grad():
            outputs = tensors(model(**{**inputs, **floats}))
        assert outputs[0].dtype == dtype
        assert all(w.strength.dtype == torch.float32 and w.scalar("strength") == 1 for w in layers)
    assert {name.replace("original.", "") for name in model.state_dict()} >= dtypes.keys()


# --- row 45 ----------------------------------------------------------------------------------------------------------


class Overwriting(BertForSequenceClassification):
    """Its `_init_weights` writes without asking, by class and by name, as much third-party code does."""

    def _init_weights(self, module):
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data.fill_(0.123 if "bias" not in name else 0.0)
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            module.weight.data.fill_(1.0)


@pytest.mark.parametrize("door", ["ours", "stock", "overwriting"])
@pytest.mark.parametrize("norm", ["autonorm", "derf"])
def test_loaded_tensors_are_not_initialised_again(norm, door, tmp_path):
    model = bert()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(3.0)
    patch(model, norm, linear="affine_like")
    with torch.no_grad():
        for layer in wrappers(model):
            for p in layer.new_parameters():
                p.fill_(9.0)
    save_pretrained(model, tmp_path, card=False)
    cls = Overwriting if door == "overwriting" else BertForSequenceClassification
    loaded = from_pretrained(tmp_path) if door == "ours" else cls.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(same_bits(t, loaded.state_dict()[k]) for k, t in model.state_dict().items())


# --- row 46 ----------------------------------------------------------------------------------------------------------


def test_a_plain_checkpoint_does_not_fill_a_patched_config(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path)
    config = patch(bert()).config
    with pytest.raises(ValueError, match="tensors of the patch are not in the checkpoint"):
        BertForSequenceClassification.from_pretrained(tmp_path, config=config)


# --- row 47 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["autonorm", *sorted(BRANCHES.keys() - {"identity"})])
def test_nothing_that_a_patch_adds_is_a_scalar_without_a_dimension(norm):
    for make in (bert, *([t5] if norm != "film" else []), lambda: build("convnext")[0]):
        for layer in wrappers(patch(make(), norm)):
            assert all(t.dim() >= 1 for t in (*layer.new_parameters(), *layer.buffers()))


# --- rows 48 and 49 --------------------------------------------------------------------------------------------------


def test_a_freeze_flips_no_flag_in_any_block():
    """FSDP's flat parameters need one `requires_grad` a block."""
    model, _ = build("bert")
    patch(model)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    for layer in (m for m in wrappers(model) if isinstance(m, AutoNorm)):
        layer.freeze()
    for block in model.bert.encoder.layer:
        assert {p.requires_grad for p in block.parameters()} == {True}
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("linear", ["affine_like", "norm_like"])
def test_a_forward_of_a_replica_leaves_the_layer_as_it_is(train, linear):
    """DataParallel runs shallow copies and throws them away."""
    model, inputs = build("bert")
    patch(model, linear=linear).train(train)
    x = torch.randn(2, 5, 32)

    def plain_state(module):
        return {k: (id(v), repr(v)) for k, v in vars(module).items() if not isinstance(v, (torch.Tensor, dict))}

    run(model, inputs)
    for layer in wrappers(model):
        if layer.weight.shape[-1] != 32:
            continue
        before = plain_state(layer)
        replica = copy.copy(layer)
        replica(x), layer(x)
        assert plain_state(layer) == before


def test_a_config_without_a_patch_is_untouched_by_the_import():
    assert not hasattr(BertConfig(), "quantization_config")
