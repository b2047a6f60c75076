"""compare.py: runs in pairs, goes on after a break, and its numbers are those of an independent calculation."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("datasets")

from training import compare
from training.compare import main, parse_args
from training.comparison import publish, rows_of, without_folders, write_report
from training.summary import main as summary

RECIPES = Path(__file__).parents[2] / "training" / "recipes"


def score(record):
    return {name: record["metrics"]["test"][name] for name in ("accuracy", "f1_macro", "loss")}


def test_runs_resumes_and_reports(tmp_path, tiny_bert, tagged_words):
    runs = tmp_path / "runs"
    arguments = [
        "--recipe", str(RECIPES / "pos_ewt.yaml"), "--scale", "smoke", "--seeds", "2",
        "--variants", "autonorm_s+calibrated",
        "--output_dir", str(runs), "--data_dir", str(tagged_words), "--model_name_or_path", str(tiny_bert),
        "--use_cpu", "true",
    ]  # fmt: skip
    report = main(arguments)
    lines = (runs / "runs.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["variant"], r["seed"]) for r in records] == [
        (v, s) for v in ("ln", "autonorm_s+calibrated") for s in (0, 1)
    ]
    text = report.read_text()
    for record in records:
        assert f"`{record['variant']}`" in text
        single = json.loads((runs / f"{record['variant']}-{record['seed']}" / "results.json").read_text())
        assert single["metrics"]["test"]["accuracy"] == record["metrics"]["test"]["accuracy"]
    assert {"results.png", "entropy.png", "norm_weight.png"} <= {path.name for path in runs.iterdir()}
    assert (runs / "autonorm_s+calibrated-0" / "README.md").is_file()  # the card, with ln beside it

    (runs / "runs.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])  # broken off in the last one
    main(arguments)
    again = [json.loads(line) for line in (runs / "runs.jsonl").read_text().splitlines()]
    assert again[:-1] == records[:-1] and score(again[-1]) == score(records[-1])

    published = main([*arguments, "--report", "--cards_dir", str(tmp_path / "cards")])
    assert published.parent == tmp_path / "cards" / "runs"
    assert f"`{tagged_words}`" not in published.read_text() and _table(published) == _table(report)
    card = (published.parent / "best_run.md").read_text()
    best = max((r for r in again if r["variant"] != "ln"), key=lambda r: r["metrics"]["validation"]["accuracy"])
    assert f"--seed {best['seed']}" in card
    for file in published.parent.glob("*.[mj]*"):
        assert str(tmp_path) not in file.read_text()
    with pytest.raises(ValueError, match="other settings"):
        main([*arguments, "--learning_rate", "0.5"])


def _table(report):
    return [line for line in report.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        ("--data_dir /some/where/mnist --x", "--data_dir .../mnist --x"),
        ('"--data_dir=/some/where/mnist"', '"--data_dir=.../mnist"'),
        ("see https://huggingface.co/a/b and owner/name, ../shared/x, 3/4/5", None),
    ],
)
def test_published_text_has_no_absolute_path(text, shortened):
    assert without_folders(text) == (shortened or text)


def made_up(variants=("ln", "dyt", "autonorm"), seeds=5, measure="accuracy"):
    draw = random.Random(0)
    return [
        {
            "variant": variant, "seed": seed, "recipe": "made_up", "overrides": [], "epochs": 2.0, "steps": 10,
            "seconds": 5.0 + draw.random(), "rows": {"train": 10, "validation": 5, "test": 5}, "gate_history": [],
            "freeze_decision": None, "parameters": {"total": 100, "added": len(variant)},
            "settings": {"model_name_or_path": "none"},
            "metrics": {"test": {measure: 0.8 + 0.01 * seed + 0.005 * draw.random(), "loss": 1.0}},
        }
        for variant in variants for seed in range(seeds)
    ]  # fmt: skip


@pytest.mark.parametrize("measure", ["accuracy", "rmse"])
def test_numbers_are_those_of_scipy(measure, tmp_path):
    records = made_up(measure=measure)
    rows = {row.variant: row for row in rows_of(records, measure)}
    score = {v: np.array([r["metrics"]["test"][measure] for r in records if r["variant"] == v]) for v in rows}
    for variant, row in rows.items():
        low, high = stats.t.interval(0.95, 4, score[variant].mean(), stats.sem(score[variant]))
        assert (row.score.low, row.score.high) == pytest.approx((low, high))
        if variant == "ln":
            assert row.against is None
            continue
        assert row.against.p == pytest.approx(stats.ttest_rel(score[variant], score["ln"]).pvalue)
        gap = score[variant] - score["ln"]
        assert row.effect == pytest.approx(gap.mean() / gap.std(ddof=1)) and row.against.mean == pytest.approx(
            gap.mean()
        )
    text = write_report(records, tmp_path).read_text()
    best = (max if measure == "accuracy" else min)(rows.values(), key=lambda row: row.score.mean).variant
    assert next(line for line in text.splitlines() if line.startswith("| `")).startswith(f"| `{best}`")


def test_pairs_are_of_equal_seeds_only():
    records = [r for r in made_up(("ln", "dyt"), seeds=4) if (r["variant"], r["seed"]) not in {("ln", 0), ("dyt", 3)}]
    row = next(row for row in rows_of(records, "accuracy") if row.variant == "dyt")
    score = {(r["variant"], r["seed"]): r["metrics"]["test"]["accuracy"] for r in records}
    assert row.seeds == 3 and row.against.mean == pytest.approx(
        np.mean([score["dyt", seed] - score["ln", seed] for seed in (1, 2)])
    )


def test_one_seed_has_no_interval(tmp_path):
    text = write_report(made_up(seeds=1), tmp_path).read_text()
    assert "nan" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "no.yaml"], "no recipe"),
        (["--recipe", str(RECIPES / "pos_ewt.yaml"), "--variants", "ln,dty"], "'dty'"),
        (["--recipe", str(RECIPES / "pos_ewt.yaml"), "--variants", "dyt+rmap"], "there are .calibrated, .ramp"),
        (["--recipe", str(RECIPES / "pos_ewt.yaml"), "--seed", "3"], "--seeds"),
        (["--recipe", str(RECIPES / "pos_ewt.yaml"), "--seeds", "0"], "at least 1"),
        (["--recipe", str(RECIPES / "pos_ewt.yaml"), "--workers", "0"], "at least 1"),
    ],
)
def test_mistakes_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        parse_args(arguments)


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("fails", [0, 3, 7, None])
def test_a_run_that_fails_ends_it_and_costs_no_other_its_result(at_once, fails, monkeypatch):
    begun = []

    def run(number):
        begun.append(number)
        if number == fails:
            raise ValueError("out of memory")
        return {"number": number}

    monkeypatch.setattr(compare, "run_once", run)
    outcomes = []
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for record in compare.as_they_end(pool, [(number,) for number in range(8)], at_once):
                outcomes.append(record["number"])
        except ValueError as error:
            assert str(error) == "out of memory"
    assert sorted(outcomes) == [number for number in sorted(begun) if number != fails]
    assert len(begun) == 8 if fails is None else fails in begun and len(begun) < fails + 2 * at_once


def test_runs_of_another_recipe_are_not_taken_for_this_ones(tmp_path):
    arguments = ["--recipe", str(RECIPES / "pos_ewt.yaml"), "--scale", "smoke", "--output_dir", str(tmp_path)]
    _, overrides = parse_args(arguments)
    lines = [json.dumps(record | {"overrides": overrides}) + "\n" for record in made_up(seeds=3)]
    (tmp_path / "runs.jsonl").write_text("".join(lines))
    with pytest.raises(ValueError, match="other settings, made_up"):
        main(arguments)


def test_there_is_nothing_to_publish_of_a_run_that_was_broken_off(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"variant": "ln", ')
    with pytest.raises(ValueError, match="no run in"):
        publish(tmp_path, tmp_path / "cards")
    assert not (tmp_path / "cards").exists()


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_run_that_diverged_is_neither_first_nor_the_best(place, tmp_path):
    """A score of NaN compares with nothing: wherever it stands, `max` and `sorted` may go wrong by it."""
    records = made_up(("ln", "dyt", "derf", "film"), seeds=1, measure="rmse")
    variant = records[place]["variant"]
    for record in records:
        record["metrics"]["validation"] = record["metrics"]["test"]
        if record["variant"] == variant:
            record["metrics"]["test"]["rmse"] = math.nan
        (tmp_path / "runs" / f"{record['variant']}-0").mkdir(parents=True)
        (tmp_path / "runs" / f"{record['variant']}-0" / "README.md").write_text(record["variant"])
    (tmp_path / "runs" / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    report = publish(tmp_path / "runs", tmp_path / "cards")
    rows = [line.split("`")[1] for line in _table(report) if line.startswith("| `")]
    finite = [r for r in records if r["variant"] != variant]
    order = [r["variant"] for r in sorted(finite, key=lambda r: r["metrics"]["test"]["rmse"])]
    assert rows == [*order, variant]
    best = next(name for name in order if name != "ln")
    assert (tmp_path / "cards" / "best_run.md").read_text() == best


def test_variants_may_stand_apart():
    args, _ = parse_args(["--recipe", str(RECIPES / "pos_ewt.yaml"), "--variants", " dyt, ln,,autonorm+ramp "])
    assert args.variants == ["ln", "dyt", "autonorm+ramp"]


def test_every_recipe_has_a_cpu_scale_in_which_autonorm_s_decides():
    from training.arguments import parse_args as parse_training

    for recipe in sorted(RECIPES.glob("*.yaml")):
        _, changes = parse_args(["--recipe", str(recipe), "--scale", "cpu"])
        _, variant, training = parse_training(["--config", str(recipe), *changes])
        assert 1 <= variant.freeze_epoch < training.num_train_epochs, recipe.stem


def test_summary_marks_what_differs(tmp_path):
    with pytest.raises(ValueError, match="no comparison"):
        summary(str(tmp_path))
    for name, measure in (("words", "accuracy"), ("prices", "rmse")):
        records = made_up(measure=measure)
        for record in records:
            record["metrics"]["test"][measure] += {"dyt": 0.1, "autonorm": -0.1}.get(record["variant"], 0)
        (tmp_path / name).mkdir()
        (tmp_path / name / "runs.jsonl").write_text("\n".join(map(json.dumps, records)))
    prices, words = (line for line in summary(str(tmp_path)).splitlines() if "↑" in line or "↓" in line)
    assert [cell.split()[1:] for cell in words.split("|")[3:5]] == [["better"], ["worse"]]
    assert [cell.split()[1:] for cell in prices.split("|")[3:5]] == [["worse"], ["better"]]
