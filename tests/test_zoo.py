"""The zoo builds, runs, gives finite numbers, and gives the same bits again: here and in a fresh process."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import zoo

ROOT = Path(__file__).resolve().parent.parent
FLOOR_TYPES, FLOOR_HEADS, FLOOR_TIMM = 729, 1600, 104


def fingerprint(entry: zoo.Entry, seed: int = 0) -> str:
    """A digest of the weights and of the inputs."""
    model, inputs = entry.build(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **inputs}
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
                      if tensor.ndim else f"{name}{tensor.item()}".encode())  # fmt: skip
    return digest.hexdigest()


@pytest.mark.parametrize("entry", zoo.sample(), ids=str)
def test_sample_builds_and_runs_the_same_twice(entry: zoo.Entry) -> None:
    first, inputs = entry.build()
    second, same_inputs = entry.build()
    outputs = zoo.float_outputs(zoo.run_forward(first, inputs))
    again = zoo.float_outputs(zoo.run_forward(second, same_inputs))
    assert outputs and all(t.isfinite().all() for _, t in outputs)
    assert [path for path, _ in outputs] == [path for path, _ in again]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(outputs, again))
    assert not first.training and all(p.dtype == torch.float32 for p in first.parameters() if p.is_floating_point())


def test_a_fresh_process_builds_the_same_bits() -> None:
    code = "from tests.test_zoo import *; print(*[fingerprint(e) for e in zoo.sample(6)])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [fingerprint(entry) for entry in zoo.sample(6)]


def test_seeds_differ_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    entries = zoo.Entry("transformers", "bert", "base"), zoo.Entry("timm", "test_vit")
    for entry in entries:
        assert fingerprint(entry, seed=0) != fingerprint(entry, seed=1)
        zoo.run_forward(*entry.build())
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_heads_have_distinct_classes_and_aliases() -> None:
    heads = zoo.heads_of("bert")
    assert {"base", "causal_lm", "seq_cls", "token_cls", "masked_lm", "question_answering"} <= set(heads)
    assert len({type(zoo.build("bert", head)[0]) for head in heads}) == len(heads)
    assert type(zoo.build("gpt2", "pretraining")[0]) is type(zoo.build("gpt2", "causal_lm")[0])


def test_errors_tell_what_is_wrong() -> None:
    with pytest.raises(LookupError, match="no model type 'brt'"):
        zoo.build("brt")
    with pytest.raises(LookupError, match="no head 'image_cls', only base"):
        zoo.build("bert", "image_cls")
    name, head = next(iter(zoo.unbuilt()))
    with pytest.raises(zoo.UnbuiltError, match=name):
        zoo.build(name, head)
    with pytest.raises(LookupError, match="resnet999"):
        zoo.build_timm("resnet999")


def test_every_model_has_a_recipe_or_a_reason() -> None:
    known = {(n, h) for n in zoo.transformers_names(components=True) for h in zoo.heads_of(n)}
    built = {(e.name, e.head) for e in zoo.every() if e.library == "transformers"}
    assert built | set(zoo.unbuilt()) == known
    assert not built & set(zoo.unbuilt())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_everything_builds() -> None:
    failed, types, heads = {}, set(), 0
    for entry in zoo.every():
        try:
            outputs = zoo.float_outputs(zoo.run_forward(*entry.build()))
            assert outputs and not any(t.isnan().any() for _, t in outputs), "NaN"
        except Exception as error:  # noqa: BLE001 (the test reports all failures at once)
            failed[str(entry)] = f"{type(error).__name__}: {error}"
            continue
        if entry.library == "transformers":
            types.add(entry.name)
            heads += 1
    timm = [e for e in zoo.every() if e.library == "timm" and str(e) not in failed]
    print(f"{len(types)} model types, {heads} heads, {len(timm)} timm models")
    assert not failed
    assert len(types) >= FLOOR_TYPES and heads >= FLOOR_HEADS and len(timm) >= FLOOR_TIMM
