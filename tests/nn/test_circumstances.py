"""The layers in odd circumstances: traced, batched, replicated, on meta, among hooks, where Dynamo gives up."""

import copy
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_autonorm import GateConfig
from hf_autonorm.nn import AffineLike, AutoNorm, NormLike, PatchNorm, functional, fused
from tests.nn.test_autonorm import NORMS, make, sample


@pytest.fixture(autouse=True)
def op_by_op(monkeypatch):
    monkeypatch.setenv("HF_AUTONORM_FUSED", "0")


LAYERS = {
    "autonorm": lambda: make(kind="softmax"),
    "replaced": lambda: make(kind="fixed", value=0.0),
    "affine_like": lambda: AffineLike(nn.Linear(6, 6)),
    "norm_like": lambda: NormLike(nn.Linear(6, 6)),
    "patchnorm": lambda: PatchNorm(nn.Conv1d(6, 6, 3, padding=1)),
}


def general(layer):
    """A copy that takes the general path: a hook wants to see the original."""
    layer = copy.deepcopy(layer)
    layer.original.register_forward_hook(lambda *args: None)
    return layer


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_traced_layer_can_be_saved_and_takes_other_sizes(name, tmp_path):
    layer = LAYERS[name]().eval()
    x = torch.randn(2, 6, 6)
    torch.jit.trace(layer, (x,)).save(tmp_path / "traced.pt")
    y = torch.randn(5, 6, 6)
    torch.testing.assert_close(torch.jit.load(tmp_path / "traced.pt")(y), layer(y))


@pytest.mark.parametrize("name", LAYERS)
def test_meta_tensors_go_through(name):
    layer = LAYERS[name]().to("meta")
    y = layer(torch.empty(2, 6, 6, device="meta"))
    assert y.is_meta and y.shape == (2, 6, 6)


@pytest.mark.parametrize("name", LAYERS)
def test_several_gradients_at_once(name):
    layer = LAYERS[name]().double().eval()
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    loss = lambda x: layer(x).square().sum()  # noqa: E731
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    torch.testing.assert_close(jacobian(layer, x, vectorize=True), jacobian(layer, x))
    torch.testing.assert_close(hessian(loss, x, vectorize=True), hessian(loss, x))


def test_several_gradients_at_once_where_blocks_are_run(monkeypatch):
    layer, x = make(kind="softmax").eval(), sample(shape=(8, 9)).requires_grad_()
    monkeypatch.setattr(fused, "_PLAIN_BLOCK", 8)
    y = layer(x)
    directions = torch.randn(3, *y.shape)
    expected = torch.stack([torch.autograd.grad(y, x, d, retain_graph=True)[0] for d in directions])
    (found,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, expected)
    mapped = torch.func.vmap(lambda d: torch.autograd.grad(y, x, d, retain_graph=True)[0])(directions)
    torch.testing.assert_close(mapped, expected)


@pytest.mark.parametrize("part", ["bias_gate", "bias_branches.0"])
@pytest.mark.parametrize("way", ["backward hook", "own forward"])
def test_who_looks_at_gate_or_branch_sees_it(part, way):
    layer, seen = make(kind="softmax").train(), []
    inner = layer.get_submodule(part)
    if way == "backward hook":
        inner.register_full_backward_hook(lambda *args: seen.append(1))
    else:
        forward = inner.forward
        inner.forward = lambda *args, **kwargs: seen.append(1) or forward(*args, **kwargs)
    layer(sample().requires_grad_()).sum().backward()
    assert seen


def replica(module):
    """As nn.DataParallel makes one: its tensors are attributes, no parameters."""
    found = module._replicate_for_data_parallel()
    for name, p in module._parameters.items():
        found._parameters[name] = None
        if p is not None:
            del found._parameters[name]
            setattr(found, name, p.view_as(p))
    for name, child in module._modules.items():
        setattr(found, name, replica(child))
    return found


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_a_replica_without_parameters_computes_the_same(norm):
    layer, x = make(norm, kind="softmax").train(), sample(norm)
    found = []
    for m in (layer, replica(layer)):
        layer.zero_grad()
        y = m(x)
        y.sum().backward()
        found.append([y, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found)


def test_a_second_derivative_where_only_a_frozen_gate_learns():
    layer = make(kind="softmax").train()
    layer.freeze()
    for name, p in layer.named_parameters():
        p.requires_grad_("gate" in name)
    found = torch.autograd.grad(layer(sample()).sum(), layer.bias_gate.parameters(), create_graph=True)
    assert all(not d.any() for d in found)


@pytest.mark.parametrize("size", [8.0, 30.0, 1e3, 1e5, 1e30])
def test_the_compiled_curve_is_flat_where_tanh_is(size, monkeypatch):
    """What is left of 1 − tanh² is multiplied by x: massive activations would move the slope."""
    monkeypatch.setattr(functional.torch.compiler, "is_compiling", lambda: True)
    curve, derivative = functional.CURVES["dyt"]
    z = torch.tensor([size, -size, 0.1, float("nan")])
    c = curve(z)
    assert c[0] == 1 and c[1] == -1 and c[3].isnan() and not derivative(z, c)[:2].any()
    torch.testing.assert_close(c[2], torch.tanh(z[2]))


# --- Dynamo ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """Compiles what it can, without Inductor."""
    monkeypatch.setenv("HF_AUTONORM_FUSED", "1")
    monkeypatch.setattr(fused, "_engines", {})
    compile = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(fused.torch, "compile", lambda *args, options=None, **kwargs: compile(*args, **kwargs))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch._dynamo.config.patch(recompile_limit=1)
def test_training_goes_on_where_dynamo_refuses_one_more_compilation(compiled):
    layer = make(kind="softmax").train()
    expected = general(layer)
    layer(sample(shape=(4, 5))).sum().backward()
    torch.use_deterministic_algorithms(True)  # Dynamo compiles anew for it
    try:
        x = sample(shape=(4, 6))
        with pytest.warns(UserWarning, match="go on unfused"):
            torch.testing.assert_close(layer(x), expected(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer.zero_grad()
            for m in (layer, expected):
                m(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for p, q in zip(layer.parameters(), expected.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_who_watches_every_function_sees_them(compiled):
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **kwargs or {})

    layer = make(kind="softmax").eval()
    with Watch(), torch.no_grad():
        layer(sample(shape=(4, 5)))
    assert "tanh" in seen and not fused._engines


def test_a_trace_does_not_keep_later_calls_from_being_compiled(compiled):
    layer = AutoNorm(nn.LayerNorm(6), gate=GateConfig(kind="softmax")).eval()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AutoNorm")
        torch.jit.trace(layer, (sample(shape=(4, 5)),), check_trace=False)
    assert not fused._engines
