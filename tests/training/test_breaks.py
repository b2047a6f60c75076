"""A run that is killed goes on from its last whole checkpoint, to the same bits."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("datasets")
pytest.importorskip("evaluate")
pytest.importorskip("timm")

from tests.training.made_data import cifar10
from training.checkpoints import find_checkpoint
from training.models import vit_lite
from training.train import main


def test_same_bits_after_a_kill(root, tmp_path, monkeypatch):
    """Augmented, mixed, accumulated, averaged, with gates that freeze; epochs of three steps, killed within the
    second, one step after checkpoint 4. A newer checkpoint that was cut short is passed over."""
    monkeypatch.setitem(vit_lite.SIZES, "depth", 2)
    data = tmp_path / "data"
    data.mkdir()
    cifar10(data)
    command = f"""
        --config {root}/training/recipes/cifar10.yaml --data_dir {data} --use_cpu true --disable_tqdm true
        --variant autonorm_s --freeze_epoch 1 --mixup 0.5 --cutmix 1.0 --ema_decay 0.9
        --max_steps 7 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --max_eval_samples 4
        --save_strategy steps --save_steps 2 --eval_strategy steps --eval_steps 2 --save_total_limit 9
    """.split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = main([*command, f"--output_dir={whole}"])
    assert expected["freeze_decision"]["step"] == 3 and (whole / "checkpoint-4" / "ema.safetensors").exists()

    launch = f"-m accelerate.commands.launch --config_file {root}/training/accelerate/single.yaml".split()
    script = [f"{root}/tests/training/killed.py", "5", *command, f"--output_dir={killed}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, *script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-3000:]
    assert sorted(path.name for path in killed.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    shutil.copytree(killed / "checkpoint-4", killed / "checkpoint-6")
    (killed / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 2.')

    with pytest.warns(UserWarning, match="checkpoint-6 was not written to its end"):
        results = main([*command, f"--output_dir={killed}", "--resume_from_checkpoint=last"])
    for name in ("model.safetensors", "checkpoint-6/model.safetensors", "checkpoint-6/ema.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert results["freeze_decision"] == expected["freeze_decision"]
    assert results["gate_history"] == expected["gate_history"]
    for split in ("validation", "test"):
        assert results["metrics"][split]["loss"] == expected["metrics"][split]["loss"]


def write_checkpoint(folder, processes: int, with_ema: bool = False) -> None:
    folder.mkdir(parents=True)
    for name in [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]:
        with zipfile.ZipFile(folder / name, "w") as file:
            file.writestr("data.pkl", b"0" * 1000)
    if with_ema:
        (folder / "ema.safetensors").write_bytes(b"")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))


@pytest.mark.parametrize("processes", [1, 3])
def test_the_newest_whole_checkpoint_is_found(tmp_path, processes):
    for step in (2, 9, 10, 100):
        write_checkpoint(tmp_path / f"checkpoint-{step}", processes)
    (tmp_path / "checkpoint-best").mkdir()
    last = (str(tmp_path), processes, False)
    assert find_checkpoint("last", *last) == str(tmp_path / "checkpoint-100")  # by number, not by name

    (tmp_path / "checkpoint-100" / "trainer_state.json").unlink()
    state = next((tmp_path / "checkpoint-10").glob("rng_state*"))
    state.write_bytes(state.read_bytes()[:-20])
    with pytest.warns(UserWarning) as warned:
        assert find_checkpoint("last", *last) == str(tmp_path / "checkpoint-9")
    assert ["checkpoint-100" in str(warned[0].message), "checkpoint-10 " in str(warned[1].message)] == [True, True]
    with pytest.warns(UserWarning, match="starts from the beginning"):
        assert find_checkpoint("last", str(tmp_path), processes, True) is None  # no average was kept
    write_checkpoint(tmp_path / "checkpoint-11", processes, with_ema=True)
    with pytest.warns(UserWarning, match="checkpoint-100 "):
        assert find_checkpoint("last", str(tmp_path), processes, True) == str(tmp_path / "checkpoint-11")


def test_a_named_checkpoint_is_taken_as_it_is(tmp_path):
    assert find_checkpoint("some/folder", str(tmp_path), 1, True) == "some/folder"
    assert find_checkpoint(None, str(tmp_path), 1, True) is None


@pytest.mark.parametrize("other", ["autonorm_hard", "dyt", "ln", "autonorm --seed 1"])
def test_a_checkpoint_of_another_run_is_refused(other, root, tiny_bert, tmp_path):
    """Two kinds of gate have the same parameters: Trainer would load all, and mix two runs without a word."""
    pytest.importorskip("vaderSentiment")
    command = f"""
        --config {root}/training/recipes/word_sentiment.yaml --model_name_or_path {tiny_bert} --use_cpu true
        --max_train_samples 16 --max_eval_samples 4 --max_steps 2 --save_steps 1 --save_strategy steps
        --eval_strategy no --disable_tqdm true --output_dir {tmp_path}
    """.split()
    first = main([*command, "--variant", "autonorm"])
    assert first["train_loss"] > 0
    with pytest.raises(ValueError, match="checkpoint-2 is of another run: patch(.*), here"):
        main([*command, "--resume_from_checkpoint", "last", "--variant", *other.split()])
    again = main([*command, "--resume_from_checkpoint", "last", "--variant", "autonorm"])
    assert again["metrics"]["test"]["loss"] == first["metrics"]["test"]["loss"]
    assert again["train_loss"] is None  # of no step since the checkpoint; Trainer says 0
