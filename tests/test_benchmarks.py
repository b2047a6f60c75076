"""The benchmarks run, at sizes where no time means anything, and judge what they measured rightly."""

import json
import math
import time

import pytest
import torch
from rich.console import Console
from torch import nn

from benchmarks import __main__ as bench
from benchmarks import budgets, cuda, layers, memory, models, timing
from benchmarks.timing import Section, measure


@pytest.fixture(scope="module")
def results():
    """Every section but the one that starts processes; nothing compiled, which would take longer than all of it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layers, "compiled", lambda layer: layer)
        patched.setattr(timing, "FUSED", "HF_AUTONORM_FUSED_IN_ANOTHER_RUN")  # layers go on choosing for themselves
        return bench.run(
            [name for name in bench.SECTIONS if name != "imports"], tiny=True, console=Console(quiet=True)
        )


def test_every_row_is_measured(results):
    sections = [result for result in results.values() if isinstance(result, Section)]
    assert len(sections) >= 15
    for section in sections:
        assert section.reference in section.samples
        rounds = {len(samples) for samples in section.samples.values()}
        assert len(rounds) == 1 and rounds.pop() >= 3
        assert all(t > 0 for samples in section.samples.values() for t in samples)
        ratio = section.ratio(section.reference)
        assert ratio.low == ratio.value == ratio.high == 1


def test_files(results, tmp_path):
    judged = budgets.verdicts(results)
    bench.write(results, judged, tmp_path)
    facts = json.loads((tmp_path / "results.json").read_text())
    assert set(facts["results"]) == set(results) and len(facts["budgets"]) == len(judged)
    tables = (tmp_path / "tables.txt").read_text()
    assert all(result.title[:30] in tables for result in results.values() if isinstance(result, Section))
    assert bench.picture(results, tmp_path).stat().st_size > 10_000
    assert not list(tmp_path.glob("*.part"))


def test_a_budget_for_every_row(results):
    """What was measured has a number and a word; what was not says how to."""
    for row in budgets.verdicts(results):
        assert row.note and (row.measured is None) == (row.met is None)
        if row.measured is None:
            assert "CUDA" in row.work or "import" in row.work
        else:
            assert math.isfinite(row.measured) and row.met == (round(row.measured, 2) <= row.limit)
    assert all(row.met is None or "fold" in row.work for row in budgets.verdicts({}))


def test_import_time():
    (found,) = bench.run(["imports"], tiny=True, console=Console(quiet=True)).values()
    assert found.median > 0 and len(found.ours) == len(found.ours_cpu) == 1


def test_folding_gives_the_stock_model_and_patching_does_not():
    model = models.encoder(1, 32, 2, 64)
    found = models.variants(model, {"linear": "affine_like"})
    same = [name for name, other in found.items() if models.is_the_same(model, other)]
    assert same == [models.UNPATCHED, models.FOLDED] and budgets.folds_to_stock()


def test_ratios_of_paired_rounds_are_blind_to_a_machine_that_slows_down():
    slowing = [1.0 * 1.1**k for k in range(20)]
    section = Section("", "a", {"a": slowing, "b": [2 * t for t in slowing]})
    assert section.ratio("b").value == pytest.approx(2) and section.ratio("a", "b").value == pytest.approx(0.5)


def test_rounds_call_every_piece_equally_often():
    calls = {"a": 0, "b": 0, "c": 0}

    def piece(name):
        def run():
            calls[name] += 1
            time.sleep(0.006)

        return run

    measure("", "a", {name: piece(name) for name in calls}, 0.1)
    assert len(set(calls.values())) == 1


@pytest.mark.parametrize("width, tokens", [(8, 5), (32, 64)])
def test_saved_bytes_by_hand(width, tokens):
    """x → Linear → tanh → sum keeps the linear's output alone: the input and the weight are left out."""
    layer, x = nn.Linear(width, width), torch.randn(tokens, width, requires_grad=True)
    found = memory.saved_bytes(lambda: torch.tanh(layer(x)).sum(), [*layer.parameters(), x])
    assert found == 4 * tokens * width
    twice = memory.saved_bytes(lambda: sum(torch.tanh(y := layer(x)) * y).sum(), [*layer.parameters(), x])
    assert twice >= 2 * 4 * tokens * width


@pytest.mark.parametrize("name", ["unpatched", "AutoNorm, eager", "naive AutoNorm", "Dynamic Tanh"])
def test_nothing_is_kept_that_the_count_does_not_see(name):
    """The profiler's allocations that outlive the forward pass are the saved tensors, and little beside them."""
    torch.manual_seed(0)
    model, _ = memory.variants(models.vision_transformer(1))[name]
    x = torch.randn(4, 3, 32, 32)
    step = lambda: model.train()(x).sum()  # noqa: E731
    step()
    counted = memory.saved_bytes(step, [*model.parameters(), *model.buffers(), x])
    allocated = memory.allocated_bytes(step)
    assert counted <= 1.02 * allocated and allocated <= 1.05 * counted + 100_000


def test_without_a_gpu_the_cuda_script_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["cuda"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        cuda.main()


def test_an_unknown_section_is_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["layer"])
    assert "unknown section 'layer'" in capsys.readouterr().err
