"""Under `torch.compile` and `torch.export`: one graph a phase, no stale phase, no noise where none belongs."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hf_autonorm import GateConfig, patch, set_strength
from hf_autonorm.nn import AutoNorm
from tests.models import build, perturb_gates, run, same_bits
from tests.nn.test_autonorm import make

D = 6
GATES = {
    "gumbel": {},
    "layer": {"granularity": "layer"},
    "sequence": {"granularity": "sequence"},
    "softmax": {"kind": "softmax"},
    "hard": {"kind": "hard"},
    "random": {"kind": "random"},
    "fixed": {"kind": "fixed", "value": 0.4},
    "alone": {"kind": "fixed", "value": 0.0},
}
NOISE = ("rand", "exponential", "bernoulli", "multinomial", "normal_", "dropout")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(layer, **options):
    counter = CompileCounter()
    return torch.compile(layer, backend=counter, fullgraph=True, **options), counter


def seeded(layer, x):
    torch.manual_seed(3)
    return layer(x)


PHASES = [(gate, phase) for gate in sorted(GATES) for phase in ("train", "eval")]
PHASES += [("gumbel", "frozen"), ("hard", "frozen"), ("gumbel", "strength 0"), ("alone", "strength 0")]
PHASES += [("gumbel", "half strength"), ("alone", "half strength")]


@pytest.mark.parametrize("gate, phase", PHASES)
def test_one_graph_in_every_phase(gate, phase):
    layer = make(branches=("dyt", "derf", "rms_norm"), **GATES[gate]).train(phase != "eval")
    layer.set_scalar("frozen", float(phase == "frozen"))
    layer.set_scalar("strength", {"strength 0": 0.0, "half strength": 0.5}.get(phase, 1.0))
    fast, counter = compiled(layer)
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(seeded(fast, x), seeded(layer, x))
    assert counter.frame_count == 1
    gradients = []
    for module in (layer, fast):
        layer.zero_grad()
        seeded(module, x).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    if phase == "strength 0":
        assert same_bits(fast(x), layer.original(x))


@pytest.mark.parametrize("gate", ["gumbel", "sequence", "alone"])
def test_other_lengths_cost_one_more_compilation(gate):
    layer = make(**GATES[gate]).train()
    fast, counter = compiled(layer)
    for length in (5, 7, 9, 11, 4):
        x = torch.randn(2, length, D)
        torch.testing.assert_close(seeded(fast, x), seeded(layer, x))
    assert counter.frame_count <= 2


def test_changing_the_strength_within_a_phase_costs_none_and_is_seen():
    layer = make().train()
    fast, counter = compiled(layer)
    x = torch.randn(2, 5, D)
    for strength in (0.1, 0.25, 0.5, 0.75, 0.9):
        layer.set_scalar("strength", strength)
        torch.testing.assert_close(seeded(fast, x), seeded(layer, x))
    assert counter.frame_count == 1


def test_a_phase_change_is_seen_by_compiled_code():
    """Noisy, frozen, unfrozen, eval, strength 0 and back: compiled code never keeps the old branch."""
    layer = make().train()
    fast, counter = compiled(layer)
    x = torch.randn(2, 5, D)
    phases = [
        lambda: None,
        layer.freeze,
        layer.unfreeze,
        layer.eval,
        layer.train,
        lambda: layer.set_scalar("strength", 0.0),
        lambda: layer.set_scalar("strength", 0.5),
        layer.freeze,
        lambda: layer.set_scalar("strength", 1.0),
        lambda: layer.load_state_dict(make(strength=0.0).state_dict()),
        layer.eval,
        layer.train,
    ]
    for change in phases * 2:
        change()
        torch.testing.assert_close(seeded(fast, x), seeded(layer, x))
    assert counter.frame_count <= 8


def test_statistics_are_kept_by_compiled_code():
    layer, x = make().train(), torch.randn(2, 5, D)
    fast, _ = compiled(layer)
    seeded(fast, x)
    found = layer.statistics.clone()
    seeded(layer, x)
    torch.testing.assert_close(found, layer.statistics)


@pytest.mark.parametrize("family", ["llama", "timm_vit"])
def test_whole_models_compile_in_one_graph(family):
    model, inputs = build(family)
    perturb_gates(patch(model))
    inputs.pop("attention_mask", None)
    fast, counter = compiled(model)
    for strength in (1.0, 0.5, 0.0):
        set_strength(model, strength)
        for a, b in zip(run(fast, inputs), run(model, inputs)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 3
    assert not any(key.startswith("_orig_mod") for key in model.state_dict())


@pytest.mark.parametrize("gate", sorted(GATES))
def test_export_has_no_noise(gate):
    layer = make(**GATES[gate]).eval()
    x = torch.randn(2, 5, D)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets and not any(word in target for target in targets for word in NOISE)
    for length in (5, 9):
        x = torch.randn(2, length, D)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_export_of_a_frozen_gate_in_training_has_no_noise():
    layer = make().train()
    layer.freeze()
    program = torch.export.export(layer, (torch.randn(2, 5, D),))
    assert not any(word in str(node.target) for node in program.graph.nodes for word in NOISE)


def test_activation_checkpointing_replays_the_noise():
    from torch.utils.checkpoint import checkpoint

    layer = AutoNorm(torch.nn.LayerNorm(D), gate=GateConfig(init_norm_weight=0.5)).train()
    gradients = []
    for wrap in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 4 * D).view(4, D).requires_grad_()
        layer.zero_grad()
        wrap(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(family, reentrant):
    results = []
    for checkpointing in (False, True):
        model, inputs = build(family)
        patch(model)
        for name, p in model.named_parameters():  # case 60: everything old is frozen
            p.requires_grad_("bias_" in name)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        torch.manual_seed(0)
        model.train()(**inputs)["logits"].square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys() and len(results[0]) > 10
    if not reentrant:
        for name, gradient in results[0].items():
            torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-5)
