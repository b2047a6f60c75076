"""Every recipe trains on its data as it comes; every variant trains every model from scratch."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("evaluate")
pytest.importorskip("timm")

from datasets import Dataset
from PIL import Image as Picture
from transformers import AutoModel, AutoModelForImageClassification, AutoTokenizer

from hf_autonorm import plan, set_strength
from tests.training.made_data import MADE
from training.arguments import parse_args
from training.models.feature_transformer import FeatureTransformer, FeatureTransformerConfig
from training.models.text_encoder import text_encoder, train_tokenizer
from training.models.vit_lite import vit_lite
from training.tasks import load_task
from training.train import main
from training.variants import VARIANTS, apply_variant

RELOADED = ("mnist", "cifar10", "ptb_pos", "energy_efficiency")
SPLIT_ROWS = {"energy_efficiency": (28, 6, 6), "california_housing": (28, 6, 6), "pos_ewt": (24, 8, 8)}


@pytest.fixture
def run(root, tiny_bert, tmp_path):
    def run(recipe: str, data_dir, *options: str, steps: int = 2) -> dict:
        command = f"--config {root}/training/recipes/{recipe}.yaml --data_dir {data_dir} --use_cpu true"
        command += f" --output_dir {tmp_path / 'run'} --max_steps {steps} --per_device_train_batch_size 4"
        command += " --eval_strategy no --save_strategy no --disable_tqdm true"
        if recipe == "pos_ewt":
            command += f" --model_name_or_path {tiny_bert} --max_length 64"
        return main([*command.split(), *options])

    return run


def check_metrics(recipe: str, scores: dict) -> None:
    names = {"loss"}
    if recipe in ("energy_efficiency", "california_housing"):
        names |= {"rmse", "mae"}
        assert scores["rmse"] >= scores["mae"] > 0
    else:
        names |= {"accuracy", "f1_macro"}
        assert 0 <= scores["accuracy"] <= 1
    if recipe in ("ptb_pos", "pos_ewt"):
        # Both are the mean cross entropy over words (one batch: nothing is averaged over batches of unequal length).
        assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]), rel=1e-4)
    if recipe == "energy_efficiency":
        assert scores["rmse"] == pytest.approx((scores["rmse_Y1"] + scores["rmse_Y2"]) / 2)
    assert names <= scores.keys() and all(math.isfinite(value) for value in scores.values())


@pytest.mark.parametrize("recipe", MADE)
def test_two_steps_of_every_recipe_on_its_own_format(recipe, run, tmp_path):
    write, _ = MADE[recipe]
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder)
    variant = "autonorm" if recipe in RELOADED else "dyt"  # a gate's picture in the card takes a second to draw
    workers = ["--preprocessing_num_workers=2"] if recipe in ("cifar100", "sst2") else []
    results = run(recipe, folder, f"--variant={variant}", *workers)
    check_metrics(recipe, results["metrics"]["test"])
    assert results["steps"] == 2 and math.isfinite(results["train_loss"])
    if recipe in SPLIT_ROWS:
        assert tuple(results["rows"].values()) == SPLIT_ROWS[recipe]
    elif recipe != "ptb_pos":
        assert results["rows"]["test"] == 8 and results["rows"]["train"] + results["rows"]["validation"] == 24
    assert results["command"] in (tmp_path / "run" / "README.md").read_text()
    if recipe in RELOADED:
        check_saved(recipe, tmp_path / "run")


def check_saved(recipe: str, folder) -> None:
    """What was saved is a normal model, with all that belongs to it."""
    if recipe in ("mnist", "cifar10"):
        model = AutoModelForImageClassification.from_pretrained(folder)
        shape = json.loads((folder / "config.json").read_text())["pretrained_cfg"]["input_size"]
        assert shape == ([1, 28, 28] if recipe == "mnist" else [3, 32, 32])
        assert model.config.id2label[9] == ("9" if recipe == "mnist" else "truck")
        assert model(torch.zeros(1, *shape)).logits.shape == (1, 10)
    elif recipe == "energy_efficiency":
        model = AutoModel.from_pretrained(folder)
        assert model.config.targets == ["Y1", "Y2"] and model.config.features == [f"X{i}" for i in range(1, 9)]
        assert (model.target_scale.std > 1).all()  # the data's, not the initial ones
    else:
        model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.config.vocab_size == len(tokenizer)
        assert tokenizer.tokenize("Vinken") == tokenizer.tokenize(["Vinken"], is_split_into_words=True)
        assert "-NONE-" not in model.config.label2id and model.config.label2id.keys() >= {"NNP", "-LRB-", ","}
    assert any(name.endswith("bias_gate.weight_in") for name, _ in model.named_parameters())


@pytest.mark.parametrize("recipe", [recipe for recipe, (_, real) in MADE.items() if real])
def test_two_steps_of_every_recipe_on_real_rows(recipe, run, shared):
    folder = shared / "data" / MADE[recipe][1]
    results = run(recipe, folder, "--variant=ln", "--max_train_samples=8", "--max_eval_samples=8")
    check_metrics(recipe, results["metrics"]["test"])
    assert results["rows"] == {"train": 8, "validation": 8, "test": 8}


def test_california_is_what_scikit_learn_gives(shared):
    """scikit-learn's first row, and its mean target."""
    splits = load_real("california_housing", shared).splits
    rows = torch.cat([split[:]["features"] for split in splits.values()])
    targets = torch.cat([split[:]["labels"] for split in splits.values()])
    first = [8.3252, 41, 6.98412698, 1.02380952, 322, 2.55555556, 37.88, -122.23]
    assert rows.shape == (20640, 8) and targets.mean().item() == pytest.approx(2.0685581690891475, abs=1e-5)
    match = (rows - torch.tensor(first)).abs().amax(1) < 1e-4
    assert targets[match].flatten().tolist() == pytest.approx([4.526])
    assert [len(split) for split in splits.values()] == [14448, 3096, 3096]


def test_xlsx_and_csv_of_one_table_are_one_table(shared):
    folder = shared / "data" / "energy_efficiency"
    first, second = (load_real("energy_efficiency", shared, folder / f"ENB2012_data.{end}") for end in ("xlsx", "csv"))
    for name, split in first.splits.items():
        for column in ("features", "labels"):
            assert torch.equal(split[:][column], second.splits[name][:][column])
    assert [len(split) for split in first.splits.values()] == [538, 115, 115]


def load_real(recipe: str, shared, data_dir=None):
    data_dir = data_dir or shared / "data" / MADE[recipe][1]
    config = f"--config training/recipes/{recipe}.yaml --output_dir unused --use_cpu true --data_dir {data_dir}"
    data, _, training = parse_args(config.split())
    return load_task(data, training)


# --- Variants x models ----------------------------------------------------------------------------------------------


def image_inputs():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}


def text_inputs():
    ids = torch.tensor([[2, 9, 8, 7, 3], [2, 9, 3, 1, 1]])
    return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": torch.tensor([0, 2])}


def table_inputs():
    return {"features": torch.randn(2, 4) * 100, "labels": torch.randn(2, 2) * 10}


def text_model():
    from transformers import AutoModelForSequenceClassification

    return text_encoder(AutoModelForSequenceClassification, train_tokenizer(["a few words"]), num_labels=3)


FAMILIES = {
    "vit_lite": (lambda: vit_lite(["a", "b", "c"], image_size=16, channels=3), image_inputs),
    "text_encoder": (text_model, text_inputs),
    "feature_transformer": (
        lambda: FeatureTransformer(FeatureTransformerConfig(features=list("abcd"), targets=["y", "z"])),
        table_inputs,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_and_linear_can_be_patched(family):
    model = FAMILIES[family][0]()
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)]
    assert sorted(row.name for row in plan(model).patched) == sorted(norms)
    assert len(norms) == {"vit_lite": 17, "text_encoder": 25, "feature_transformer": 25}[family]
    left = plan(model, None, linear="affine_like").left_alone
    assert all("head" in row.reason for row in left if "Linear" in row.old_class), left


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains_every_model(family, name):
    make, inputs = FAMILIES[family]
    _, args, _ = parse_args(["--task", "word_sentiment", "--output_dir", "unused", "--use_cpu", "true"])
    args.variant = name
    torch.manual_seed(0)
    model, batch = make(), inputs()
    model.eval()
    with torch.no_grad():
        original = model(**batch).logits
    model, _ = apply_variant(model, args, [], seed=0)
    model.train()
    model(**batch).loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
    model.eval()
    with torch.no_grad():
        assert model(**batch).logits.isfinite().all()
        if name not in ("ln", "autonorm_hard"):  # a hard gate starts out on the original norm
            assert not torch.equal(model(**batch).logits, original)
        if name != "ln":
            set_strength(model, 0.0)
        assert torch.equal(model(**batch).logits, original)


def test_a_model_of_another_task_is_refused(run, tmp_path):
    MADE["sst2"][0](tmp_path)
    with pytest.raises(ValueError, match="'vit_lite' is not a model of this task"):
        run("sst2", tmp_path, "--model_name_or_path=vit_lite")


SMALL = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


def load(task: str, folder, model: str, *options: str):
    sizes = "depth=1,embed_dim=16" if model == "vit_lite" else SMALL
    given = ["--task", task, "--data_dir", str(folder), "--model_name_or_path", model, "--config_overrides", sizes]
    data, _, training = parse_args([*given, "--output_dir", str(folder / "out"), "--use_cpu", "true", *options])
    return load_task(data, training)


@pytest.mark.parametrize(
    ("task", "model", "columns", "wanted"),
    [
        ("text_classification", "text_encoder", {"text": ["a b", "c"] * 10, "label": [0, 1] * 10}, "label"),
        ("pos_tagging", "text_encoder", {"tokens": [["a", "b"]] * 20, "upos": [["X", "Y"]] * 20}, "upos"),
        ("tabular_regression", "feature_transformer", {"a": [*range(20)], "y": [*range(20)]}, "y"),
        ("image_classification", "vit_lite", {"image": "IMAGES", "label": [0, 1] * 10}, "label"),
    ],
)
@pytest.mark.parametrize("hidden", ["left out", "empty"])
def test_a_test_that_hides_its_answers_is_no_test(task, model, columns, wanted, hidden, tmp_path):
    """As competitions publish it, for every task: the test then comes out of the training rows."""
    if columns.get("image") == "IMAGES":
        columns = columns | {"image": [Picture.new("RGB", (8, 8))] * 20}
    rows = Dataset.from_dict(columns)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    test = rows.remove_columns(wanted)
    if hidden == "empty":
        test = test.add_column(wanted, [None] * 20, feature=rows.features[wanted])
    test.to_parquet(str(tmp_path / "test.parquet"))
    options = ["--target_columns", "y"] if task == "tabular_regression" else []
    splits = load(task, tmp_path, model, *options).splits
    assert {name: len(split) for name, split in splits.items()} == {"train": 14, "validation": 3, "test": 3}


@pytest.mark.parametrize("modes", ["L", "RGB", "L RGB", "RGB L", "P L", "RGBA 1"])
def test_a_grey_picture_among_coloured_ones_takes_no_colour_from_the_others(modes, tmp_path):
    modes = modes.split()
    for index in range(12):
        picture = Picture.new(modes[0] if index == 0 else modes[-1], (8, 8))
        rows = tmp_path / "train" / ("cat" if index % 2 else "dog")
        rows.mkdir(parents=True, exist_ok=True)
        picture.save(rows / f"{index}.png")
    for split in ("validation", "test"):  # so that the first picture is the first of the training rows
        shutil.copytree(tmp_path / "train", tmp_path / split)
    pixels = load("image_classification", tmp_path, "vit_lite").splits["train"][1]["pixel_values"]
    assert pixels.shape == (1 if set(modes) == {"L"} else 3, 8, 8)


def test_images_of_16_bits_are_refused(tmp_path):
    """Pillow turns them into white: all above 255 is cut."""
    for index in range(12):
        place = tmp_path / ("cat" if index % 2 else "dog")
        place.mkdir(exist_ok=True)
        Picture.fromarray(np.full((8, 8), 1000 * index, np.uint16)).save(place / f"{index}.png")
    with pytest.raises(ValueError, match="more than 8 bits"):
        load("image_classification", tmp_path, "vit_lite")


def test_columns_that_are_not_numbers_throughout_are_said_to_be_left_out(tmp_path):
    lines = [f"{i},{i % 2 == 0},{i if i else '?'},{2 * i}" for i in range(20)]
    (tmp_path / "train.csv").write_text("a,flag,b,y\n" + "\n".join(lines) + "\n")
    with pytest.warns(UserWarning, match="not numbers throughout: b"):
        model = load("tabular_regression", tmp_path, "feature_transformer", "--target_columns", "y").model
    assert model.config.features == ["a", "flag"]
    (tmp_path / "train.csv").write_text("a,b,y\n" + "".join(f"{i},,{i}\n" for i in range(20)))
    with pytest.raises(ValueError, match="No row of train has a number in each of the columns a, b, y"):
        load("tabular_regression", tmp_path, "feature_transformer", "--target_columns", "y")


@pytest.mark.parametrize(
    ("tokens", "tags", "words"),
    [
        (["a", "b"], ["X"], "2 words, but 1 tags"),
        (["a"], ["X", "Y"], "1 words, but 2 tags"),
        ("a b", ["X", "Y"], "'tokens' of train holds .*, not lists"),
        (["a", "b"], "X Y", "'upos' of train holds .*, not lists"),
    ],
)
def test_words_and_tags_that_do_not_belong_together_are_refused(tokens, tags, words, tmp_path):
    Dataset.from_dict({"tokens": [tokens] * 9, "upos": [tags] * 9}).to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(ValueError, match=words):
        load("pos_tagging", tmp_path, "text_encoder")


def test_a_pretrained_model_without_a_tokenizer_is_refused(tiny_bert, tmp_path):
    """transformers makes up one that knows no word, and training goes on with it."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_bert / name, tmp_path)
    (tmp_path / "train.csv").write_text("text,label\n" + "a,0\nb,1\n" * 9)
    given = ["--data_dir", str(tmp_path), "--model_name_or_path", str(tmp_path), "--use_cpu", "true"]
    for task in ("text_classification", "word_sentiment"):
        if task == "word_sentiment":
            pytest.importorskip("vaderSentiment")
            given = given[2:]
        data, _, training = parse_args(["--task", task, *given, "--output_dir", str(tmp_path / "out")])
        with pytest.raises(ValueError, match="holds no tokenizer"):
            load_task(data, training)
