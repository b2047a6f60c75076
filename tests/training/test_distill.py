"""The distillation experiment on a tiny encoder and a few sentences: runs, resumes, reports what it measured."""

import json
import math
import shutil

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from training import distill
from training.distill import PATCHES, WAYS, best_rate, main


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("distill")
    words = ["[PAD]", "[UNK]", *"abcdefgh"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(root / "model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    BertModel(config).save_pretrained(root / "model")
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Dataset:
        draws = torch.randint(0, 8, (count, 7), generator=generator)
        return Dataset.from_dict({"sentence": [" ".join("abcdefgh"[i] for i in row) for row in draws]})

    data = DatasetDict({"train": split(80), "validation": split(20), "test": split(20)})
    for name, rows in data.items():
        (root / "data").mkdir(exist_ok=True)
        rows.to_parquet(root / "data" / f"{name}.parquet")
    return root


def test_runs_resumes_and_reports(folders, tmp_path, capsys):
    arguments = [
        "--model", str(folders / "model"), "--data_dir", str(folders / "data"), "--output_dir", str(tmp_path),
        "--patches", "affine_like", "--steps", "6", "--batch_size", "4", "--calibration_texts", "8", "--unseen", "20",
        "--learning_rates", "1e-3", "1e-2", "--seeds", "0", "1",
    ]  # fmt: skip
    runs = main(arguments)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == runs
    assert len(runs) == len(WAYS) * 3  # two learning rates on one seed, the better one on the other
    for run in runs:
        assert all(-1 <= run[name] <= 1.0001 for name in ("at_start", "held_out", "unseen", "worst_on_the_way"))
        assert math.isfinite(run["loss"]) and len(run["on_the_way"]) == 6
    by_way = {way: [run for run in runs if (run["start"], run["walk"]) == way] for way in WAYS}
    for way, mine in by_way.items():
        assert mine[-1]["lr"] == best_rate(runs, {"start": way[0], "walk": way[1]})
    assert by_way["calibrated", "abrupt"][0]["at_start"] > by_way["uncalibrated", "abrupt"][0]["at_start"]
    # At the same strength the same function: where the ramp begins, the model is nearly the original.
    assert by_way["uncalibrated", "ramp"][0]["on_the_way"][0] > by_way["uncalibrated", "abrupt"][0]["on_the_way"][0]

    kept = lines[:5]
    (tmp_path / "runs.jsonl").write_text("\n".join(kept) + "\n")
    again = main(arguments)  # goes on after the fifth
    assert [run["unseen"] for run in again] == pytest.approx([run["unseen"] for run in runs], abs=1e-6)

    capsys.readouterr()
    assert main(["--output_dir", str(tmp_path), "--report"]) == again
    assert "affine_like" in capsys.readouterr().out


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_is_put_on_as_its_variant_says(folders, patch, monkeypatch):
    """Its gate too: else `autonorm_softmax` would be a second run of `autonorm`."""

    class Stop(Exception):
        pass

    def look(student, config):
        variant = distill.VARIANTS[patch]
        fields = {"norm": "autonorm"} | variant.patch
        assert {name: getattr(config, name) for name in fields} == fields
        assert {name: getattr(config.gate, name) for name in variant.gate} == variant.gate
        raise Stop

    monkeypatch.setattr(distill, "patch", look)
    with pytest.raises(Stop):
        distill.distill({"model": str(folders / "model"), "patch": patch, "seed": 0}, {})


def test_runs_of_other_settings_are_made_anew(folders, tmp_path, monkeypatch):
    scores = {"at_start": 0.0, "held_out": 0.5, "unseen": 0.5, "worst_on_the_way": 0.0}
    made = []
    monkeypatch.setattr(distill, "distill", lambda setting, texts: made.append(setting) or scores)
    arguments = {"--model": folders / "model", "--data_dir": folders / "data", "--output_dir": tmp_path}
    arguments |= {"--patches": "dyt", "--steps": 2, "--batch_size": 4, "--learning_rates": 0.1, "--seeds": 0}
    arguments |= {"--calibration_texts": 8, "--unseen": 20}
    other = tmp_path / "other"
    shutil.copytree(folders / "data", other)
    for change in ({}, {"--unseen": 10}, {"--calibration_texts": 4}, {"--data_dir": other}):
        for already in (False, True):
            made.clear()
            main([str(word) for pair in (arguments | change).items() for word in pair])
            assert len(made) == (0 if already else len(WAYS)), (change, already)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--steps": 0}, "at least 1"),
        ({"--steps": 1000}, "training split has 80"),
        ({"--data_dir": "ONE"}, "no split test, validation"),
        ({"--report": None}, "holds no run"),
    ],
)
def test_mistakes_are_named(folders, tmp_path, change, words):
    (tmp_path / "one").mkdir()
    shutil.copy(folders / "data" / "train.parquet", tmp_path / "one")
    arguments = {"--model": folders / "model", "--data_dir": folders / "data", "--output_dir": tmp_path / "out"}
    given = [str(word) for pair in (arguments | change).items() for word in pair if word is not None]
    with pytest.raises(ValueError, match=words):
        main([str(tmp_path / "one") if word == "ONE" else word for word in given])
    assert not (tmp_path / "out" / "runs.jsonl").exists()
