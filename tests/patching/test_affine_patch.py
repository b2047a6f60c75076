"""patch(linear=…, conv=…): what is wrapped, what is left alone and why; the rest of the model does not notice."""

import copy

import peft
import pytest
import timm
import torch
import transformers as tf
from safetensors.torch import save_file
from timm.layers import Conv2dSame, StdConv2d
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from hf_autonorm import calibrate, patch, plan, set_strength, unpatch
from hf_autonorm.errors import NoMatchError
from hf_autonorm.nn import AffineLike, AutoNorm, NormLike, PatchNorm
from hf_autonorm.nn.affine import Correction
from hf_autonorm.patching import fit_gain
from tests.models import bert, convnext, gpt2, images, llama, mixtral, t5, timm_convnext, timm_vit, tokens, vit

FORMS = ("affine_like", "norm_like")


def corrections(model: nn.Module) -> dict[str, Correction]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Correction)}


def logits(model: nn.Module, inputs) -> torch.Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, torch.Tensor) else output[0] if isinstance(output, tuple) else output.logits


def reasons(model: nn.Module, **rules) -> dict[str, str | None]:
    return {row.name: row.reason for row in plan(model, norm=None, **rules)}


CASES = {
    "bert": (bert, tokens, {"linear"}),
    "gpt2": (gpt2, tokens, {"linear"}),
    "llama": (llama, tokens, {"linear"}),
    "mixtral": (mixtral, tokens, {"linear"}),
    "vit": (vit, lambda: images(16), {"linear", "conv"}),
    "convnext": (convnext, lambda: images(64), {"linear", "conv"}),
    "timm_vit": (timm_vit, lambda: torch.randn(2, 3, 32, 32), {"linear", "conv"}),
    "timm_convnext": (timm_convnext, lambda: torch.randn(2, 3, 64, 64), {"linear", "conv"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_strength_zero_changes_nothing_and_every_wrapper_is_called(name, form):
    build, inputs, kinds = CASES[name]
    torch.manual_seed(0)
    model, inputs = build().eval(), inputs()
    plain = copy.deepcopy(model)
    expected = logits(plain, inputs)
    expected.square().mean().backward()
    tensors = {id(p) for p in model.parameters()}
    random_state = torch.get_rng_state()
    assert patch(model, strength=0.0, **{kind: form for kind in kinds}) is model
    assert torch.equal(torch.get_rng_state(), random_state)
    assert any(isinstance(m, AutoNorm) for m in model.modules())  # norms in the same call
    found = corrections(model)
    patched = [row.name for row in plan(plain, norm=None, **{kind: form for kind in kinds}).patched]
    assert sorted(found) == sorted(patched) and found
    assert tensors == {id(p) for p in model.parameters()} & tensors
    called = set()
    for key, layer in found.items():
        layer.register_forward_hook(lambda *_, key=key: called.add(key))
    output = logits(model, inputs)
    assert torch.equal(output, expected) and called == set(found)
    output.square().mean().backward()
    theirs = {id(p): q.grad for p, q in zip(unpatch(model).parameters(), plain.parameters())}
    for p in model.parameters():
        assert (p.grad is None) == (theirs[id(p)] is None) and (p.grad is None or torch.equal(p.grad, theirs[id(p)]))
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("form", FORMS)
def test_full_strength_trains(form):
    model = patch(vit().train(), linear=form, conv=form)
    logits(model, images(16)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert patch(model, linear=form, conv=form) is model  # a second call finds all done


def test_bare_modules_come_back_wrapped():
    assert type(patch(nn.Linear(4, 8), norm=None, linear="affine_like")) is AffineLike
    assert type(patch(nn.Linear(4, 8), norm=None, linear="norm_like")) is NormLike
    conv = patch(nn.Conv2d(4, 8, 3), norm=None, conv="affine_like")
    assert type(conv) is PatchNorm and conv.form == "affine_like"
    assert type(unpatch(conv)) is nn.Conv2d
    assert type(patch(Conv1D(4, 8), norm=None, linear="affine_like")) is AffineLike


def test_conv1d_is_read_the_right_way_round():
    """GPT-2's weight is (in, out); the square one of the attention would not even crash."""
    model = patch(gpt2(), norm=None, linear="affine_like")
    for name in ("attn.c_proj", "mlp.c_fc"):
        layer = model.transformer.h[0].get_submodule(name)
        x = torch.randn(3, layer.weight.shape[0])
        expected = (x @ layer.weight + layer.bias) / (x.square().sum(-1, keepdim=True) + 1).sqrt()
        torch.testing.assert_close(layer(x), expected)


# --- what is left alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [gpt2, llama, t5, lambda: gpt2(tie_word_embeddings=False)])
def test_output_embeddings_are_never_patched_and_the_tie_is_kept(build):
    model = build()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert "output embeddings" in reasons(model, linear="affine_like", heads=True)["lm_head"]
    patch(model, linear="affine_like", heads=True)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    model.resize_token_embeddings(70)
    assert model.lm_head.weight.shape[0] == 70


@pytest.mark.parametrize(
    "build, head",
    [
        (bert, "classifier"),
        (vit, "classifier"),
        (timm_vit, "head"),
        (timm_convnext, "head.fc"),
        (lambda: tf.T5ForQuestionAnswering(t5().config), "qa_outputs"),
        (lambda: tf.LlamaForSequenceClassification(llama().config), "score"),
    ],
)
def test_task_heads_only_with_heads(build, head):
    model = build()
    assert "task head" in reasons(model, linear="affine_like")[head]
    assert reasons(model, linear="affine_like", heads=True)[head] is None


def test_plain_modules_have_no_head():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert reasons(model, linear="affine_like") == {"0": None, "2": None}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        dtype = self.called.weight.dtype  # harmless
        return self.called(nn.functional.linear(x, self.read.weight).to(dtype))


class Linear4bit(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)


class BitLinear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.round(), self.weight, self.bias)


class SomeTensor(torch.Tensor):
    pass


def with_tensor_subclass() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(SomeTensor))
    return layer


def shared_weight() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


class HeldOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.layers = [self.fc]


LEFT_ALONE = {
    "read": (Reader, "read", "reads its weight"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "out_proj", "MultiheadAttention"),
    "fused": (lambda: nn.TransformerEncoderLayer(4, 2, 8), "linear1", "TransformerEncoderLayer"),
    "tied": (shared_weight, "0", "tied"),
    "parametrised": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))), "0", "parametrised"),
    "spectral": (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4))), "0", "parametrised"),
    "subclass": (lambda: nn.Sequential(BitLinear(4, 4)), "0", "forward of its own"),
    "packed": (lambda: nn.Sequential(Linear4bit()), "0", "integer or packed"),
    "tensor subclass": (lambda: nn.Sequential(with_tensor_subclass()), "0", "SomeTensor"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "0", "lazy"),
    "held outside": (HeldOutside, "fc", "outside the module tree"),
    "mixer": (
        lambda: tf.Mamba2Model(
            tf.Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, state_size=8, num_hidden_layers=1, vocab_size=9)
        ),
        "layers.0.mixer.out_proj",
        "reads its weight",
    ),
    "beit": (
        lambda: timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=4),
        "blocks.0.attn.qkv",
        "reads its weight",
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_linears_that_are_left_alone_say_why(case):
    build, name, reason = LEFT_ALONE[case]
    assert reason in reasons(build(), linear="affine_like")[name]


@pytest.mark.parametrize(
    "conv, reason",
    [
        (lambda: StdConv2d(4, 4, 3), "forward of its own"),
        (lambda: Conv2dSame(4, 4, 3, stride=2), "forward of its own"),
        (lambda: nn.ConvTranspose2d(4, 4, 3), "transposed"),
        (lambda: nn.LazyConv2d(4, 3), "lazy"),
        (lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), "parametrised"),
    ],
)
def test_convolutions_that_are_left_alone_say_why(conv, reason):
    assert reason in reasons(nn.Sequential(conv()), conv="affine_like")["0"]


def test_packed_layers_do_not_keep_the_norms_from_being_patched():
    model = patch(nn.Sequential(nn.LayerNorm(4), Linear4bit()), linear="affine_like")
    assert isinstance(model[0], AutoNorm) and type(model[1]) is Linear4bit


def test_a_rule_that_matches_nothing_is_an_error():
    with pytest.raises(NoMatchError, match="conv='affine_like'.*no convolution"):
        patch(bert(), conv="affine_like")
    with pytest.raises(NoMatchError, match="nearest"):
        patch(bert(), norm=None, linear="affine_like", include=["intermediate.dens"])
    with pytest.raises(NoMatchError, match="packed"):
        patch(nn.Sequential(Linear4bit()), norm=None, linear="affine_like")


def test_include_and_exclude_choose_linears():
    model = patch(bert(), norm=None, linear="norm_like", include=r".*layer\.0\..*", exclude=["key"])
    assert corrections(model) and all(".0." in name and "key" not in name for name in corrections(model))


# --- PEFT ------------------------------------------------------------------------------------------------------------


def with_lora(model: nn.Module, *names: str) -> nn.Module:
    config = peft.LoraConfig(target_modules=list(names), r=2, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("form", FORMS)
def test_lora_inside_is_corrected_as_a_whole_and_merges_exactly(form):
    torch.manual_seed(0)
    net = with_lora(nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 2, 2)), "0", "1")
    patch(net, norm=None, linear=form, conv=form)
    rows = {row.name: row.reason for row in plan(net, norm=None, linear=form, conv=form)}
    assert set(rows.values()) == {"already patched"}
    inner = net.base_model.model
    assert isinstance(inner[0], Correction) and isinstance(inner[1], PatchNorm)
    x = torch.randn(3, 1, 4, 4)
    before = inner(x)
    n = x.square().sum(-1, keepdim=True)
    whole, bias = inner[0].original(x), inner[0].bias
    expected = whole / (n + 1).sqrt() if form == "affine_like" else (whole - bias) / n.sqrt() + bias
    torch.testing.assert_close(inner[0](x), expected)
    merged = net.merge_and_unload()
    assert type(merged[0].original) is nn.Linear
    torch.testing.assert_close(merged(x), before, rtol=1e-5, atol=1e-5)


def test_lora_around_a_patched_layer_is_refused():
    net = patch(nn.Sequential(nn.Linear(4, 4)), norm=None, linear="affine_like")
    with pytest.raises(ValueError, match="not supported"):
        with_lora(net, "0")


def test_the_parts_of_a_lora_layer_are_left_alone():
    model = with_lora(gpt2(), "c_attn")
    found = reasons(model, linear="affine_like")
    layer = "base_model.model.transformer.h.0.attn.c_attn"
    assert found[layer] is None
    assert all("PEFT" in reason for name, reason in found.items() if name.startswith(layer + "."))


# --- the model around it ---------------------------------------------------------------------------------------------


def test_flags_hooks_and_stored_tensors_are_kept(tmp_path):
    model = gpt2()
    model.transformer.h[0].requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    patch(model, norm=None, linear="affine_like")
    assert {n.replace(".original", ""): p.requires_grad for n, p in model.named_parameters()} == before
    assert all(p.is_contiguous() for p in model.parameters())
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")


def test_t5_reads_the_dtype_of_a_wrapped_weight():
    model = patch(t5().eval(), linear="affine_like")
    assert model.generate(**tokens(), max_new_tokens=3).shape[0] == 2


def test_a_whole_model_is_one_graph():
    model = patch(vit(num_hidden_layers=1).eval(), norm=None, linear="affine_like", conv="norm_like")
    torch._dynamo.reset()
    inputs = images(16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_so(dtype):
    model = patch(gpt2().to(dtype).eval(), linear="affine_like")
    output = logits(model, tokens())
    assert output.dtype == dtype and output.isfinite().all()


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(fit_gain, "_STEPS", 4)


@pytest.mark.parametrize("name, form", [("bert", "affine_like"), ("gpt2", "norm_like"), ("vit", "norm_like")])
def test_calibration_brings_the_output_closer(name, form, few_steps):
    build, inputs, kinds = CASES[name]
    torch.manual_seed(0)
    model, inputs = build().train(), inputs()
    modes = [m.training for m in model.modules()]
    patch(model, norm=None, **{kind: form for kind in kinds})
    parameters = copy.deepcopy(dict(model.named_parameters()))
    report = calibrate(model, [inputs])
    assert report.cosine_after >= report.cosine_before - 1e-6
    found = corrections(model)
    assert {row.name for row in report.rows} == set(found) and not report.never_called
    for row in report.rows:
        assert row.branch == form and row.r2 <= 1 and row.gain == found[row.name].scalar("gain") > 0
        assert not found[row.name].gain.requires_grad
    assert "gain" in str(report)
    for key, p in model.named_parameters():
        assert torch.equal(p, parameters[key]) and p.grad is None
    set_strength(model, 0.0)
    assert [m.training for m in unpatch(model).modules()] == modes


def test_a_layer_with_inputs_of_one_length_is_recovered_exactly():
    """With ‖x‖ constant, the corrected layer with the right gain is the original."""
    x = nn.functional.normalize(torch.randn(64, 6), dim=-1) * 7
    for form, gain in (("affine_like", 50**0.5), ("norm_like", 7.0)):
        layer = patch(nn.Linear(6, 4), norm=None, linear=form)
        report = calibrate(layer, [x])
        assert report.rows[0].gain == pytest.approx(gain, rel=1e-4) and report.rows[0].r2 > 0.9999


def test_padding_does_not_count(few_steps):
    torch.manual_seed(0)
    model, inputs = patch(bert(), norm=None, linear="affine_like"), tokens()
    gains = {row.name: row.gain for row in calibrate(model, [inputs]).rows}
    changed = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 17)}
    again = {row.name: row.gain for row in calibrate(model, [changed]).rows}
    assert again == pytest.approx(gains, rel=1e-4)


def test_in_place_activations_do_not_spoil_the_targets():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3))
    twin = copy.deepcopy(net)
    twin[1].inplace = False
    x = torch.randn(4, 3, 8, 8)
    reports = [calibrate(patch(n, norm=None, conv="affine_like"), [x]) for n in (net, twin)]
    assert [row.gain for row in reports[0].rows] == [row.gain for row in reports[1].rows]


# --- norm="identity" -------------------------------------------------------------------------------------------------


def test_identity_takes_a_norm_away_only_before_corrected_layers():
    torch.manual_seed(0)
    model, inputs = llama().eval(), tokens()
    expected = logits(copy.deepcopy(model), inputs)
    rows = {row.name: row for row in plan(model, norm="identity", linear="affine_like")}
    assert rows["model.layers.0.input_layernorm"].new_class == "identity"
    assert "no corrected layer" in rows["model.norm"].reason  # after it comes the output embedding
    assert all(row.added_parameters == 0 for row in rows.values())
    patch(model, norm="identity", linear="affine_like", strength=0.0)
    assert torch.equal(logits(model, inputs), expected)
    norm, x = model.model.layers[0].input_layernorm, torch.randn(2, 3, 32)
    set_strength(model, 0.25)
    torch.testing.assert_close(norm(x), 0.75 * norm.original(x) + 0.25 * x)
    set_strength(model, 1.0)
    assert torch.equal(norm(x), x)
    with pytest.raises(NoMatchError, match="no corrected layer"):
        patch(llama(), norm="identity")


def test_identity_follows_a_layer_corrected_earlier():
    model = patch(timm_vit(), norm=None, linear="norm_like", include=r"blocks\.0\.mlp\..*")
    found = {row.name for row in plan(model, norm="identity").patched}
    assert found == {"blocks.0.norm2"}
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4))
    assert {row.name for row in plan(net, norm="identity", linear="affine_like").patched} == {"0", "1", "4"}
