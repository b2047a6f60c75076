"""training/train.py under `accelerate launch` with two ranks on the CPU, without the network."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("evaluate")

import torch
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file

from training.tasks import take


@pytest.fixture(scope="module")
def launch(root, tiny_bert, tagged_words, tmp_path_factory):
    """Runs a script of tests/training/ on two ranks: from strength 0 up the ramp, through a freeze at step 4, to step
    8; and again from the first checkpoint. Returns the folders of both runs."""

    def launch(script: str, *options: str, save_steps: int) -> tuple[Path, Path]:
        whole = tmp_path_factory.mktemp(script) / "run"
        command = f"""
            -m accelerate.commands.launch {" ".join(options)} {root}/tests/training/{script}.py checkpoint-{save_steps}
            --config {root}/training/recipes/pos_ewt.yaml --data_dir {tagged_words} --model_name_or_path {tiny_bert}
            --output_dir {whole} --use_cpu true --ddp_backend gloo --disable_tqdm true
            --variant autonorm_s --calibrate 1 --strength 0 --strength_ramp_ratio 0.375 --freeze_epoch 1
            --max_steps 8 --per_device_train_batch_size 2 --learning_rate 0.01 --weight_decay 0.1
            --eval_strategy no --save_strategy steps --save_steps {save_steps} --save_total_limit 9
            --max_eval_samples 7 --per_device_eval_batch_size 3
        """
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
        threads = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            [sys.executable, *command.split()],
            env=os.environ | offline | threads,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return whole, whole.with_name("run-resumed")

    return launch


@pytest.fixture(scope="module")
def ddp(launch, root):
    return launch("two_ranks", f"--config_file {root}/training/accelerate/ddp.yaml", save_steps=2)


def test_two_ranks_freeze_resume_and_score_every_word_once(ddp):
    whole, resumed = ddp
    results = json.loads((whole / "results.json").read_text())
    assert (results["processes"], results["steps"]) == (2, 8)
    decision = results["freeze_decision"]
    assert decision["step"] == 4 and len(decision["frozen"]) == decision["layers"] == 3

    # Seven rows do not divide by two ranks of three: the filling must not be counted.
    lengths = take(DatasetDict(test=Dataset.from_dict({"words": [6, 3] * 8})), None, 7)["test"]["words"]
    assert results["metrics"]["test"]["words"] == sum(lengths)

    # Losses of batches of unequal length are averaged, so not more nearly; twice as much would be one a rank.
    for scores in results["metrics"].values():
        assert scores["loss"] == pytest.approx(math.log(scores["perplexity"]), rel=0.2)

    # Selectors learn until the freeze and keep every bit after it; the rest goes on learning.
    after = {step: load_file(whole / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4, 6, 8)}
    after["end"] = load_file(whole / "model.safetensors")
    gates = [name for name in after[2] if ".bias_gate." in name]
    branches = [name for name in after[2] if ".bias_branches." in name and not name.endswith("alpha_scale")]
    assert len(gates) == 3 * 4 and len(branches) == 3 * 3
    assert not any(torch.equal(after[2][name], after[4][name]) for name in gates)
    for step in (6, 8, "end"):
        assert all(torch.equal(after[4][name], after[step][name]) for name in gates)
        assert all(after[step][name].item() == 1 for name in after[step] if name.endswith((".frozen", ".strength")))
    assert not any(torch.equal(after[4][name], after[8][name]) for name in branches)

    ranks = [torch.load(whole / f"rank{rank}.pt") for rank in (0, 1)]
    assert gates[0] in ranks[0] and ranks[0].keys() == ranks[1].keys()
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])

    assert json.loads((resumed / "results.json").read_text())["freeze_decision"] == decision
    assert not (resumed / "checkpoint-2").exists()
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_fsdp2_learns_what_ddp_learns(ddp, launch, root):
    """Weights, gradients and optimizer state cut up, layer by layer; through the freeze, checkpoints and a resume.

    Few checkpoints, since over gloo each one takes as long as many steps."""
    wrap = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap BertLayer"
    config = f"--config_file {root}/training/accelerate/fsdp2.yaml"
    whole, resumed = launch("fsdp_ranks", config, wrap, save_steps=4)
    for step in ("checkpoint-4", "checkpoint-8", "."):
        expected, found = (load_file(folder / step / "model.safetensors") for folder in (ddp[0], whole))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-4), (step, name)
    gates = [name for name in found if ".bias_gate." in name]
    at_freeze = load_file(whole / "checkpoint-4" / "model.safetensors")
    assert gates and all(torch.equal(at_freeze[name], found[name]) for name in gates)
    again = load_file(resumed / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in found.items())
    decisions = [json.loads((folder / "results.json").read_text())["freeze_decision"] for folder in (whole, *ddp)]
    assert decisions[0]["step"] == decisions[1]["step"] == 4
    assert decisions[0]["entropy"] == pytest.approx(decisions[1]["entropy"], abs=1e-5)
