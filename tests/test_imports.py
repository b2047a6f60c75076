"""Who may import whom: nn ← patching ← callbacks ← diagnostics ← hub ← report, demo ← the command line."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the ground up; a module may import what stands in its own line or above it. The longest prefix decides.
LAYERS = (
    ("hf_autonorm.errors", "hf_autonorm.tables", "hf_autonorm.decision", "hf_autonorm.version"),
    ("hf_autonorm.config", "hf_autonorm.nn"),  # settings know the registry of branches
    ("hf_autonorm.patching",),
    ("hf_autonorm.callbacks",),
    ("hf_autonorm.diagnostics",),
    ("hf_autonorm.hub",),
    ("hf_autonorm.report", "hf_autonorm.demo", "hf_autonorm.demo_task"),
    ("hf_autonorm",),
    ("hf_autonorm_cli",),
    ("training",),
    ("benchmarks",),
)
# The demo shows the way a user walks; `remote` lies in saved folders, and tries whether the package is there.
AS_A_USER = ("hf_autonorm.demo", "hf_autonorm.hub.remote")
HEIGHTS = {name: height for height, names in enumerate(LAYERS) for name in names}
FILES = sorted(p for top in ("hf_autonorm", "hf_autonorm_cli", "training") for p in (ROOT / top).rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> set[str]:
    """Absolute names of all modules that a file imports, inside functions too, but not for type checkers alone."""
    module, found = module_of(file).split("."), set()
    package = module if file.name == "__init__.py" else module[:-1]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
                if node.level
                else [node.module]
            )
            # `from .hub import loading` means the module, `from .config import PatchConfig` a thing in one
            for alias in node.names:
                below = ROOT.joinpath(*base, alias.name)
                is_module = below.is_dir() or below.with_suffix(".py").is_file()
                found.add(".".join([*base, alias.name] if is_module else base))
    return found


def height(module: str) -> int | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((HEIGHTS[name] for name in prefixes if name in HEIGHTS), None)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_run_one_way(file):
    own = height(module_of(file))
    too_high = {name for name in imports_of(file) if (height(name) or 0) > own}
    assert not too_high - ({"hf_autonorm"} if module_of(file) in AS_A_USER else set())


def test_layers_of_the_net_know_torch_alone():
    for file in FILES:
        if module_of(file).startswith("hf_autonorm.nn"):
            assert not {name.split(".")[0] for name in imports_of(file)} & {
                "transformers",
                "timm",
                "accelerate",
                "peft",
            }


def test_a_wrong_import_is_found(tmp_path, monkeypatch):
    """The checks can fail: each kind of import statement, relative or not, inside a function or not."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "hf_autonorm" / "nn").mkdir(parents=True)
    (tmp_path / "hf_autonorm" / "hub").mkdir()
    (tmp_path / "hf_autonorm" / "hub" / "saving.py").touch()
    file = tmp_path / "hf_autonorm" / "nn" / "layer.py"
    for line in (
        "from ..hub.saving import save", "from ..hub import saving", "from .. import hub", "from .. import patch",
        "import hf_autonorm.hub.saving", "from hf_autonorm.hub.saving import save",
        "def f():\n    from ..hub.saving import save",
    ):  # fmt: skip
        file.write_text(line)
        assert any((height(name) or 0) > height("hf_autonorm.nn") for name in imports_of(file)), line
    file.write_text(
        "from typing import TYPE_CHECKING\nfrom .wrapper import W\nif TYPE_CHECKING:\n    from ..hub import saving"
    )
    assert all((height(name) or 0) <= height("hf_autonorm.nn") for name in imports_of(file))
