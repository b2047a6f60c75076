"""Recipes, data and runs of training/train.py."""

import html
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("evaluate")

from datasets import ClassLabel, Dataset, DatasetDict, Sequence
from huggingface_hub import ModelCard
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
)

from hf_autonorm.report import write_report
from training.arguments import parse_args
from training.metrics import load_metric
from training.models import resolve_model
from training.tasks import TASKS, take
from training.tasks.pos_tagging import encoder, with_string_tags
from training.tasks.word_sentiment import load_lexicon, split_by_family, split_of
from training.train import SCORES, main

RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").glob("*.yaml"))


def write_recipe(folder: Path, text: str) -> list[str]:
    (folder / "recipe.yaml").write_text(text)
    return ["--config", str(folder / "recipe.yaml")]


# --- Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses(recipe):
    data, variant, training = parse_args(["--config", str(recipe), "--variant", "ln", "--seed", "7"])
    assert data.task in TASKS
    assert (variant.variant, training.seed) == ("ln", 7)
    assert training.output_dir.endswith("ln-7")


def test_command_line_overrides_recipe(tmp_path):
    recipe = write_recipe(
        tmp_path,
        """
        task: word_sentiment
        output_dir: runs/x
        learning_rate: 1e-3  # a string to YAML
        bf16: false
        gradient_checkpointing: true
        label_names: [labels, more]
        lr_scheduler_kwargs: {num_cycles: 2}
        max_train_samples: null
        """,
    )
    data, _, training = parse_args(recipe)
    assert training.learning_rate == 1e-3
    assert training.gradient_checkpointing is True and training.bf16 is False
    assert training.label_names == ["labels", "more"]
    assert training.lr_scheduler_kwargs == {"num_cycles": 2}
    assert data.max_train_samples is None

    data, _, training = parse_args(
        [*recipe, "--learning_rate", "0.5", "--gradient_checkpointing", "false", "--max_train_samples", "3"]
    )
    assert (training.learning_rate, training.gradient_checkpointing, data.max_train_samples) == (0.5, False, 3)


def test_a_strategy_of_no_is_no_in_yaml_too(tmp_path):
    strategies = ("eval_strategy", "save_strategy", "logging_strategy")
    recipe = write_recipe(tmp_path, "task: word_sentiment\n" + "".join(f"{name}: no\n" for name in strategies))
    _, _, training = parse_args(recipe)
    assert [getattr(training, name) for name in strategies] == ["no"] * 3


@pytest.mark.parametrize("field, nearest", [("learnig_rate", "learning_rate"), ("varient", "variant")])
def test_unknown_field_names_the_nearest(tmp_path, field, nearest):
    recipe = write_recipe(tmp_path, f"task: word_sentiment\n{field}: 1")
    with pytest.raises(ValueError, match=rf"'{field}' in .*recipe\.yaml.*'{nearest}'"):
        parse_args(recipe)
    with pytest.raises(ValueError, match=rf"'{field}' in the command line.*'{nearest}'"):
        parse_args(["--task", "word_sentiment", f"--{field}", "1"])


def test_wrong_values_are_refused(tmp_path, capsys):
    for text in ("task: word_sentimental", "task: word_sentiment\nvariant: layernorm", "seed: many"):
        with pytest.raises(SystemExit):
            parse_args(write_recipe(tmp_path, text))
        assert "invalid" in capsys.readouterr().err
    with pytest.raises(ValueError, match="No task"):
        parse_args([])
    with pytest.raises(ValueError, match="holds the current directory"):
        parse_args(["--task", "word_sentiment", "--output_dir", "."])
    with pytest.raises(ValueError, match=r"braces are for \{variant\}"):
        parse_args(["--task", "word_sentiment", "--output_dir", "runs/{model}"])


@pytest.mark.parametrize("option", ["max_train_samples", "max_eval_samples", "max_length", "calibrate", "mixup"])
def test_counts_below_what_can_be_are_refused(option):
    with pytest.raises(ValueError, match=f"{option}=-1.* must be at least"):
        parse_args(["--task", "word_sentiment", f"--{option}", "-1"])


# --- Data -----------------------------------------------------------------------------------------------------------


def test_word_splits_keep_families_together_and_lose_no_row():
    lexicon = load_lexicon()
    splits = split_by_family(lexicon)
    assert len(lexicon) == 7520 and not any(rating == 0 for rating in lexicon["rating"][:])
    assert Counter(word for split in splits.values() for word in split["word"][:]) == Counter(lexicon["word"][:])
    families = {name: {word.lower()[:4] for word in split["word"][:]} for name, split in splits.items()}
    assert not families["train"] & families["validation"]
    assert not families["train"] & families["test"]
    assert not families["validation"] & families["test"]
    assert 0.65 < len(splits["train"]) / len(lexicon) < 0.75
    assert all(len(splits[name]) > 1000 for name in ("validation", "test"))
    assert split_of("LOL") == split_of("lol")


def test_limits_draw_the_same_rows_from_everywhere():
    def splits():
        return DatasetDict({name: Dataset.from_dict({"x": list(range(500))}) for name in ("train", "validation")})

    first, second = take(splits(), 50, 20), take(splits(), 50, 20)
    assert len(first["train"]) == 50 and len(first["validation"]) == 20
    assert first["train"]["x"] == second["train"]["x"]
    assert max(first["train"]["x"]) > 250  # not the head of a sorted file
    assert len(take(splits(), None, 10_000)["validation"]) == 500


TAGS = {"NOUN": 0, "VERB": 1, "PUNCT": 2}
WORDS = ["dog", "unbelievableness", "n't", "e-mail@example.com", "ßtraße", "日本", "...", "\u200d", "", "\n"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_length", [None, 12])
def test_each_word_is_labelled_once_on_its_first_sub_token(seed, max_length):
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("minilm"))
    sentences = [[rng.choice(WORDS) for _ in range(rng.randint(1, 20))] for _ in range(30)]
    tags = [[rng.choice(list(TAGS)) for _ in sentence] for sentence in sentences]
    encoded = encoder(tokenizer, "words", "tags", TAGS, max_length)({"words": sentences, "tags": tags})
    for row, sentence in enumerate(sentences):
        words, labels = encoded.word_ids(row), encoded["labels"][row]
        assert len(labels) == len(words) == len(encoded["input_ids"][row])
        labelled = [word for word, label in zip(words, labels) if label != -100]
        assert labelled == sorted({word for word in words if word is not None})  # each once, in order
        for word in labelled:
            assert labels[words.index(word)] == TAGS[tags[row][word]]
        if max_length is None:  # only what the tokenizer itself drops has no label
            assert labelled == [i for i, word in enumerate(sentence) if tokenizer.tokenize(word)]

    rows = [{key: encoded[key][row] for key in encoded} for row in range(30)]
    batch = DataCollatorForTokenClassification(tokenizer)(rows)
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert (batch["labels"] != -100).sum() == sum(label != -100 for row in encoded["labels"] for label in row)


def test_tags_may_be_class_labels():
    strings = DatasetDict(train=Dataset.from_dict({"tokens": [["a", "b"], ["c"]], "upos": [["X", "NOUN"], ["X"]]}))
    features = strings["train"].features.copy()
    features["upos"] = Sequence(ClassLabel(names=["NOUN", "X"]))
    classes = DatasetDict(
        train=Dataset.from_dict({"tokens": [["a", "b"], ["c"]], "upos": [[1, 0], [1]]}, features=features)
    )
    assert with_string_tags(classes, "upos")["train"].to_list() == strings["train"].to_list()
    assert with_string_tags(strings, "upos") is strings


def test_metrics_load_from_the_repo():
    predictions, references = [0, 0, 1, 2], [0, 1, 1, 1]
    assert load_metric("accuracy").compute(predictions=predictions, references=references) == {"accuracy": 0.5}
    f1 = load_metric("f1")
    for average, value in {"micro": 0.5, "macro": (2 / 3 + 1 / 2 + 0) / 3}.items():
        assert f1.compute(predictions=predictions, references=references, average=average)["f1"] == pytest.approx(
            value
        )


# --- Runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(root, tiny_bert, tagged_words, tmp_path, monkeypatch):
    def run(recipe: str, *options: str, out: str = "run") -> tuple[dict, Path]:
        if recipe == "pos_ewt":
            options = (f"--data_dir={tagged_words}", *options)
        command = f"--config {root}/training/recipes/{recipe}.yaml --model_name_or_path {tiny_bert} --use_cpu true"
        command += f" --output_dir {tmp_path / out} --max_steps 3 --per_device_train_batch_size 4"
        command += " --max_train_samples 64 --max_eval_samples 16 --eval_strategy no --save_strategy no"
        return main([*command.split(), "--disable_tqdm=true", *options]), tmp_path / out

    return run


@pytest.mark.parametrize(
    "recipe, variant, auto_class",
    [
        ("word_sentiment", "ln", AutoModelForSequenceClassification),
        ("word_sentiment", "autonorm_s", AutoModelForSequenceClassification),
        ("pos_ewt", "dyt", AutoModelForTokenClassification),
    ],
)
def test_three_steps_of_a_recipe(run, recipe, variant, auto_class, monkeypatch, capsys):
    results, folder = run(recipe, f"--variant={variant}", "--eval_strategy=epoch")
    assert json.loads((folder / "results.json").read_text()) == results
    assert (results["variant"], results["seed"], results["steps"], results["processes"]) == (variant, 42, 3, 1)
    assert (results["parameters"]["added"] > 0) == (variant != "ln") and results["freeze_decision"] is None
    for split in ("validation", "test"):
        assert 0 <= results["metrics"][split]["accuracy"] <= 1
        assert {"f1_macro", "loss"} <= results["metrics"][split].keys()

    # What was saved predicts what was scored, through the stock classes.
    model, tokenizer = auto_class.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == results["parameters"]["total"]
    if recipe == "pos_ewt":
        assert results["metrics"]["test"]["words"] == 8 * (6 + 3)
        sentence = ["I", "do", "n't", "like", "antidisestablishmentarianism", "."]
        inputs = tokenizer(sentence, is_split_into_words=True, return_tensors="pt")
        tag = model.config.id2label[int(model(**inputs).logits[0, 1].argmax())]
        assert tag in {"PRON", "AUX", "PART", "VERB", "NOUN", "PUNCT"}
    else:
        assert model.config.label2id == {"negative": 0, "positive": 1}
        words = take(split_by_family(load_lexicon()), None, 16)["test"]
        with torch.no_grad():
            logits = model(**tokenizer(list(words["word"]), padding=True, return_tensors="pt")).logits
        right = logits.argmax(-1) == torch.tensor([rating > 0 for rating in words["rating"]])
        assert float(right.double().mean()) == results["metrics"]["test"]["accuracy"]

    if variant != "ln":
        check_card(folder, results)
        monkeypatch.chdir(folder.parent)
        exec(re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL).group(1), {})
        assert "tensor(" in capsys.readouterr().out


def check_card(folder: Path, results: dict) -> None:
    """Its numbers are those of results.json."""
    text, test = (folder / "README.md").read_text(), results["metrics"]["test"]
    scored = {n: v for n, v in test.items() if n.startswith(SCORES)}
    found = {r.metric_name: r.metric_value for r in ModelCard.load(folder / "README.md").data.eval_results}
    assert found == {f"{name} (patched)": value for name, value in scored.items()}
    for name, value in scored.items():
        assert f"| {name} | {value:.6g} |" in text
    assert results["command"] in text and "| seed | 42 |" in text and "| train_batch_size | 4 |" in text
    assert f"Trained on {results['rows']['train']} examples in " in text
    assert re.search(
        rf"^\| [\d.]+ \| {results['steps']} \| .* {results['metrics']['validation']['loss']:.6g} \|", text, re.M
    )


def test_same_bits_after_a_break(run):
    """Epochs have three steps: checkpoint 4 lies within the second one, 6 at its end; the gates freeze at 6."""
    options = ("--variant=autonorm_s", "--max_steps=7", "--max_train_samples=12", "--freeze_epoch=2")
    options += ("--save_strategy=steps", "--save_steps=2", "--save_total_limit=9")
    options += ("--eval_strategy=steps", "--eval_steps=2")
    expected, whole = run("pos_ewt", *options, out="whole")
    assert expected["freeze_decision"]["step"] == 6 and (whole / "checkpoint-6").exists()
    for step in (4, 6):
        checkpoint = f"checkpoint-{step}"
        results, resumed = run(
            "pos_ewt", *options, f"--resume_from_checkpoint={whole / checkpoint}", out=f"from{step}"
        )
        assert not (resumed / checkpoint).exists()
        assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert results["freeze_decision"] == expected["freeze_decision"]
        assert results["gate_history"] == expected["gate_history"]


def test_at_strength_zero_a_patched_model_trains_like_the_original(run):
    """Calibration included: neither it nor the patch draws a random number, or the dropout would differ."""
    original, baseline = run("word_sentiment", "--variant=ln", out="original")
    for variant in ("autonorm_s", "dyt"):
        options = (f"--variant={variant}", "--strength=0", "--calibrate=2", f"--baseline={baseline}")
        patched, folder = run("word_sentiment", *options, out=variant)
        assert patched["parameters"]["added"] > 0
        assert patched["train_loss"] == original["train_loss"]
        for split in ("validation", "test"):
            assert patched["metrics"][split]["loss"] == original["metrics"][split]["loss"]
        accuracy = f"{original['metrics']['test']['accuracy']:.6g}"
        assert f"accuracy | {accuracy} | {accuracy} | +0 |" in (folder / "README.md").read_text()
    other, _ = run("word_sentiment", "--variant=ln", "--seed=1", out="other")
    assert other["train_loss"] != original["train_loss"]


def test_wrong_baselines_are_refused_before_training(run, tmp_path):
    with pytest.raises(ValueError, match="no results.json.*--variant ln"):
        run("word_sentiment", f"--baseline={tmp_path}")
    settings = {"task": "pos_tagging"}
    for variant, message in (("dyt", "variant='dyt', not 'ln'"), ("ln", "task='pos_tagging', not 'word_sentiment'")):
        (tmp_path / "results.json").write_text(json.dumps({"variant": variant, "settings": settings}))
        with pytest.raises(ValueError, match=message):
            run("word_sentiment", f"--baseline={tmp_path}")
    for other in ('{"variant": "ln", "set', '{"accuracy": 0.5}', "[]"):  # torn, or of another program
        (tmp_path / "results.json").write_text(other)
        with pytest.raises(ValueError, match="not as training/train.py writes it"):
            run("word_sentiment", f"--baseline={tmp_path}")


def test_real_treebank(ewt, run):
    results, _ = run("pos_ewt", "--variant=ln", f"--data_dir={ewt}", "--max_length=64")
    assert results["rows"] == {"train": 64, "validation": 16, "test": 16}
    assert results["metrics"]["test"]["words"] > 100


def test_the_monitor_says_what_earlier_freezes_would_have_changed(tiny_bert, tagged_words, root, tmp_path):
    arguments = [
        "--config", str(root / "training" / "recipes" / "pos_ewt.yaml"), "--data_dir", str(tagged_words),
        "--model_name_or_path", str(tiny_bert), "--variant", "autonorm", "--output_dir", str(tmp_path),
        "--num_train_epochs", "3", "--learning_rate", "0.01", "--use_cpu", "true", "--save_strategy", "no",
        "--monitor_every", "1", "--try_earlier_freezes", "true", "--disable_tqdm", "true", "--report_to", "none",
    ]  # fmt: skip
    results = main(arguments)
    said = results["stationarity"]
    assert [entry["epoch"] for entry in said["drift"]] == [2, 3] and said["moved"] > 0 and said["advice"]
    assert set(said["frozen_at"]) == {1, 2, 3}
    # The gates of the last epoch are those of the trained model.
    final, same = results["metrics"]["validation"], said["frozen_at"][3]
    assert same["accuracy"] == final["accuracy"] and same["loss"] == pytest.approx(final["loss"], abs=1e-6)
    assert json.loads((tmp_path / "results.json").read_text())["stationarity"]["moved"] == said["moved"]
    page = html.unescape(write_report(tmp_path).read_text(encoding="utf-8"))
    assert said["advice"] in page and results["command"] in page and (tmp_path / "trainer_state.json").is_file()
