"""training/train.py under `accelerate launch` with two ranks on the CPU, without the network."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("datasets")
pytest.importorskip("evaluate")

from datasets import Dataset, DatasetDict

from training.tasks import take


def test_two_ranks_train_and_score_every_word_once(root, tiny_bert, tagged_words, tmp_path):
    command = f"""
        -m accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0 {root}/training/train.py
        --config {root}/training/recipes/pos_ewt.yaml --data_dir {tagged_words} --model_name_or_path {tiny_bert}
        --output_dir {tmp_path} --variant ln --use_cpu true --ddp_backend gloo --max_steps 3 --max_eval_samples 7
        --per_device_train_batch_size 2 --per_device_eval_batch_size 3 --eval_strategy no --disable_tqdm true
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
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["processes"] == 2 and results["steps"] == 3
    # Seven rows do not divide by two ranks of three: the filling must not be counted.
    lengths = take(DatasetDict(test=Dataset.from_dict({"words": [6, 3] * 8})), None, 7)["test"]["words"]
    assert results["metrics"]["test"]["words"] == sum(lengths)
    assert (tmp_path / "model.safetensors").exists()
