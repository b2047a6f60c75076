"""Accuracy on a folder in CIFAR-10-C's format: the right images to the right severity, resumed, reported."""

import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")

from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from transformers import AutoImageProcessor, AutoModelForImageClassification

from training.models.vit_lite import vit_lite
from training.robustness import accuracy, corrupted, load, main

SIZE, EACH = 16, 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("robustness")
    torch.manual_seed(0)
    for name in ("one", "two"):
        model = vit_lite(["dark", "light"], image_size=SIZE, channels=3)
        torch.nn.init.normal_(model.timm_model.head.weight)
        model.save_pretrained(root / name)
        AutoImageProcessor.from_pretrained(root / name).save_pretrained(root / name)
    draw = np.random.default_rng(0)
    (root / "c").mkdir()
    for name in ("fog", "snow"):
        np.save(root / "c" / f"{name}.npy", draw.integers(0, 256, (5 * EACH, SIZE, SIZE, 3), dtype=np.uint8))
    np.save(root / "c" / "labels.npy", np.tile(draw.integers(0, 2, EACH), 5))
    pictures = [Picture.fromarray(image) for image in np.load(root / "c" / "fog.npy")[:EACH]]
    features = Features({"img": Image(), "label": ClassLabel(names=["dark", "light"])})
    (root / "clean").mkdir()
    for split in ("train", "test"):
        rows = Dataset.from_dict({"img": pictures, "label": [0, 1] * (EACH // 2)}, features=features)
        rows.to_parquet(str(root / "clean" / f"{split}.parquet"))
    return root


def test_each_severity_by_itself_and_no_line_twice(folders, tmp_path):
    arguments = [
        "--models", str(folders / "one"), str(folders / "two"), "--corrupted", str(folders / "c"),
        "--data_dir", str(folders / "clean"), "--output_dir", str(tmp_path), "--batch_size", "4",
    ]  # fmt: skip
    report = main(arguments).read_text()
    lines = (tmp_path / "accuracy.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * (1 + 2 * 5) and {record["source"] for record in records} == {"CIFAR-10-C"}

    model = AutoModelForImageClassification.from_pretrained(folders / "one").eval()
    images, labels = np.load(folders / "c" / "snow.npy"), np.load(folders / "c" / "labels.npy")
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
    with torch.no_grad():
        right = (model(pixel_values=pixels).logits.argmax(-1).numpy() == labels).reshape(5, EACH).mean(1)
    measured = {
        r["severity"]: r["accuracy"] for r in records if r["corruption"] == "snow" and r["model"].endswith("one")
    }
    assert [measured[severity] for severity in range(1, 6)] == pytest.approx(right)
    assert f"{right.mean():.4f}" in report and "mean of all corruptions" in report

    (tmp_path / "accuracy.jsonl").write_text("\n".join(lines[:9]) + "\n")
    main(arguments)
    again = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert sorted(map(str, again)) == sorted(map(str, records))


def test_other_data_is_measured_anew_and_labels_are_numbered_as_in_training(folders, tmp_path):
    """A local copy whose labels are words, its columns named otherwise."""
    names = np.array(["dark", "light"])
    for split in ("train", "test"):
        rows = Dataset.from_parquet(str(folders / "clean" / f"{split}.parquet"))
        words = names[np.array(rows["label"])].tolist()
        rows = rows.remove_columns("label").add_column("kind", words).rename_column("img", "picture")
        (tmp_path / "words").mkdir(exist_ok=True)
        rows.to_parquet(str(tmp_path / "words" / f"{split}.parquet"))
    arguments = ["--models", str(folders / "one"), "--corrupted", str(folders / "c"), "--output_dir", str(tmp_path)]
    main([*arguments, "--data_dir", str(folders / "clean")])
    report = main([*arguments, "--data_dir", str(tmp_path / "words"), "--label_column", "kind"]).read_text()
    records = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    scores = {name: [r["accuracy"] for r in records if r["data"] == name] for name in ("clean", "words")}
    assert scores["words"] == scores["clean"] and len(scores["clean"]) == 1 + 2 * 5
    assert "Images: clean, " in report and "Images: words, " in report


def test_corruptions_made_here(folders, tmp_path):
    pytest.importorskip("imagecorruptions", reason="pip install hf_autonorm[robustness]", exc_type=ImportError)
    from imagecorruptions import get_corruption_names

    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for name in get_corruption_names("all"):
        for severity in (1, 5):
            once, again = (corrupted(images, name, severity) for _ in range(2))
            assert once.shape == images.shape and once.dtype == np.uint8
            assert np.array_equal(once, again), name
            assert not np.array_equal(once, images), name


def test_without_the_library_the_way_to_it_is_named(folders, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ValueError, match="pip install"):
        main(["--models", str(folders / "one"), "--data_dir", str(folders / "clean"), "--output_dir", str(tmp_path)])


def test_accuracy_of_known_predictions():
    class Bright(torch.nn.Module):
        def forward(self, pixel_values):
            mean = pixel_values.mean((1, 2, 3))
            return type("Output", (), {"logits": torch.stack([-mean, mean], -1)})

    images = np.zeros((5, 4, 4, 3), dtype=np.uint8)
    images[2:] = 255
    score = accuracy(Bright(), lambda pixels: pixels.float() - 127, images, np.array([0, 1, 1, 1, 0]), batch_size=2)
    assert score == pytest.approx(3 / 5)


def test_a_folder_of_something_else(tmp_path):
    with pytest.raises(ValueError, match="labels.npy"):
        main(["--models", "x", "--corrupted", str(tmp_path)])


def test_the_saved_processor_says_how_images_are_shown(folders):
    _, transform = load(str(folders / "one"))
    shown = transform(torch.full((1, 3, SIZE, SIZE), 255, dtype=torch.uint8))
    assert shown.shape == (1, 3, SIZE, SIZE) and torch.equal(shown, torch.ones_like(shown))
