"""The experiments of the affine divergence paper: equal starts, whole plans, resuming, and numbers of known answer."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from training import affine_divergence, divergence_report, divergence_statistics, estimates
from training.affine_divergence import SCALES, as_run, cells, main, next_runs
from training.divergence_training import METHODS, Run, affine_maps, build_net, load_images, train

RUN = Run("fc", "tanh", "none", 8, 2, 16, 0.1, 0, 1, 64, 32, 32, "cifar10")


@pytest.fixture(scope="module")
def tiny_cifar(tmp_path_factory):
    """A folder in the format of uoft-cs/cifar10: random images, the label is how bright they are."""
    from datasets import ClassLabel, Dataset, Features, Image

    folder = tmp_path_factory.mktemp("tiny_cifar")
    noise = np.random.default_rng(0)
    features = Features({"img": Image(), "label": ClassLabel(names=list("abcdefghij"))})
    for split, count in (("train", 120), ("test", 40)):
        labels = [i % 10 for i in range(count)]
        images = [noise.integers(20 * label, 20 * label + 60, (32, 32, 3), dtype=np.uint8) for label in labels]
        rows = Dataset.from_dict({"img": images, "label": labels}, features=features)
        rows.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return folder


@pytest.fixture(scope="module")
def images(tiny_cifar, tmp_path_factory):
    counts = {"train": 64, "validation": 32, "test": 32}
    return load_images(str(tiny_cifar), counts, tmp_path_factory.mktemp("cache") / "images.pt")


@pytest.fixture(scope="module")
def smoke(tiny_cifar, tmp_path_factory, root):
    """The output folder of the smoke scale, run as a user runs it."""
    folder = tmp_path_factory.mktemp("smoke")
    command = "training/affine_divergence.py --scale smoke --workers 2 --data_dir"
    done = subprocess.run(
        [sys.executable, *command.split(), str(tiny_cifar), "--output_dir", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.rstrip().endswith((folder / "report.md").read_text().rstrip())
    return folder


def records_of(folder):
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


# --- one run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["fc", "conv"])
@pytest.mark.parametrize("activation", ["tanh", "leaky_relu"])
def test_every_method_starts_from_the_same_weights_and_adds_none(family, activation):
    run = dataclasses.replace(RUN, family=family, activation=activation, depth=3)
    plain = [p.detach() for p in build_net(run).parameters()]
    assert len(plain) == 2 * (run.depth + 1)
    for method in METHODS:
        own = list(build_net(dataclasses.replace(run, method=method)).parameters())
        assert [p.shape for p in own] == [p.shape for p in plain]
        assert all(torch.equal(p, q) for p, q in zip(own, plain))
    other = list(build_net(dataclasses.replace(run, seed=1)).parameters())
    assert not torch.equal(other[0], plain[0])


@pytest.mark.parametrize("family", ["fc", "conv"])
@pytest.mark.parametrize("method", METHODS)
def test_every_affine_map_is_corrected_as_the_formula_says(family, method):
    """Each net against one written out by hand, layer by layer."""
    run = dataclasses.replace(RUN, family=family, method=method, activation="tanh")
    net = build_net(run).double().train()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # a bias of zero would hide where it stands
    weights = [p.detach() for p in net.parameters()]
    x = torch.randn(5, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    h = x if family == "conv" else x.flatten(1)
    for index, (_, layer) in enumerate(affine_maps(run)):
        weight, bias = weights[2 * index : 2 * index + 2]
        if isinstance(layer, torch.nn.Linear):
            h = h.flatten(1)
            patches = h.unsqueeze(-1)  # (n, inputs, 1)
        axes = {"batch_norm": [0, *range(2, h.dim())]}.get(method, list(range(1, h.dim())))
        if method in ("batch_norm", "layer_norm"):
            h = (h - h.mean(axes, keepdim=True)) / (h.var(axes, keepdim=True, unbiased=False) + 1e-5).sqrt()
        elif method == "rms_norm":
            h = h / h.square().mean(axes, keepdim=True).sqrt()
        if not isinstance(layer, torch.nn.Linear):
            patches = torch.nn.functional.unfold(h, 3, padding=1, stride=2)
        elif method in ("batch_norm", "layer_norm", "rms_norm"):
            patches = h.unsqueeze(-1)
        squares = patches.square().sum(1, keepdim=True)
        y, b = weight.flatten(1) @ patches, bias.view(-1, 1)
        if method == "affine_like":
            y = (y + b) / (squares + 1).sqrt()
        elif method.startswith("norm_like"):
            y = y / squares.sqrt() + b
        else:
            y = y + b
        side = round(y.shape[-1] ** 0.5)
        h = y.unflatten(-1, (side, side)) if not isinstance(layer, torch.nn.Linear) else y.squeeze(-1)
        if index < run.depth:
            h = torch.tanh(h)
    torch.testing.assert_close(net(x), h, rtol=1e-6, atol=1e-6)


def test_a_run_is_repeatable_and_learns(images):
    data = images.to_float("cpu")
    run = dataclasses.replace(RUN, activation="leaky_relu", width=32, epochs=20, lr=0.03)
    one, two = train(run, data), train(run, data)
    one.pop("seconds"), two.pop("seconds")
    assert one == two and not one["diverged"]
    assert one["test_accuracy"] > 0.3  # brightness gives the label away; chance is 0.1
    assert train(dataclasses.replace(run, seed=1), data)["train_loss"] != one["train_loss"]


def test_all_methods_see_the_same_batches(images, monkeypatch):
    data = images.to_float("cpu")
    seen = []

    class Watched(torch.nn.Module):
        def forward(self, x):
            if self.training:
                seen.append(x.sum().item())
            return x

    def watched(run):
        return torch.nn.Sequential(Watched(), build_net(run))

    monkeypatch.setattr("training.divergence_training.build_net", watched)
    orders = []
    for method in METHODS:
        seen.clear()
        train(dataclasses.replace(RUN, method=method, epochs=2), data)
        orders.append(list(seen))
    assert len(orders[0]) == 2 * 4 and len(set(orders[0])) == 8
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("lr, method", [(1e30, "none"), (1e30, "batch_norm"), (1e38, "affine_like")])
def test_a_run_that_diverges_counts_with_chance(images, lr, method):
    run = dataclasses.replace(RUN, activation="leaky_relu", method=method, lr=lr, epochs=3)
    outcome = train(run, images.to_float("cpu"))
    assert outcome["diverged"] and outcome["train_loss"] is None
    assert outcome["test_accuracy"] == outcome["validation_accuracy"] == 0.1


def test_images_are_split_whole_and_normalised(images, tiny_cifar, tmp_path):
    assert {name: len(labels) for name, (_, labels) in images.splits.items()} == images_counts(images)
    pixels = torch.cat([images.splits[name][0] for name in ("train", "validation")]).flatten(1)
    assert len(torch.unique(pixels, dim=0)) == 64 + 32  # no image in both
    for pictures, labels in images.splits.values():
        assert pictures.dtype == torch.uint8 and pictures.shape[1:] == (3, 32, 32)
        assert torch.equal((pictures.float().mean((1, 2, 3)) / 20 - 1.475).round().long(), labels)  # still paired
    train_images = images.to_float("cpu")["train"][0]
    assert train_images.mean((0, 2, 3)).abs().max() < 1e-4
    assert (train_images.std((0, 2, 3)) - 1).abs().max() < 1e-4
    cache = tmp_path / "images.pt"
    for counts in ({"train": 64, "validation": 32, "test": 32}, {"train": 32, "validation": 64, "test": 8}):
        for _ in ("decoded", "from the cache, which must not be that of other counts"):
            assert images_counts(load_images(str(tiny_cifar), counts, cache)) == counts


def images_counts(images):
    return {name: count for name, count in images.source[1:]}


def test_too_few_or_other_rows_are_named(tiny_cifar, tmp_path):
    with pytest.raises(ValueError, match="has 120 train rows, 130 are needed.*--scale"):
        load_images(str(tiny_cifar), {"train": 100, "validation": 30, "test": 10}, tmp_path / "images.pt")
    from datasets import Dataset

    for split in ("train", "test"):
        Dataset.from_dict({"image": [1], "label": [0]}).to_parquet(str(tmp_path / f"{split}-00000-of-00001.parquet"))
    with pytest.raises(ValueError, match="columns.*image.*CIFAR-10 has 'img'"):
        load_images(str(tmp_path), {"train": 1, "validation": 0, "test": 1}, tmp_path / "images.pt")
    assert not (tmp_path / "images.pt").exists()


# --- the plan -------------------------------------------------------------------------------------


def play(scale, best_of):
    """All runs of a plan, and the records of it, where `best_of(run)` is the learning rate at which accuracy peaks."""
    done = {}
    while runs := next_runs(scale, "x", done):
        assert not set(runs) & set(done) and len(set(runs)) == len(runs)
        for run in runs:
            distance = abs(np.log(run.lr / best_of(run)))
            done[run] = {"validation_accuracy": 1 / (1 + distance), "lr": run.lr, "seed": run.seed}
    return done


@pytest.mark.parametrize("name", ["smoke", "cpu", "full"])
def test_the_plan_ends_and_has_every_method_at_every_seed(name):
    scale = SCALES[name]
    shift = {method: scale.rates[i % len(scale.rates)] for i, method in enumerate(METHODS)}
    done = play(scale, lambda run: shift[run.method])
    by_cell = Counter(dataclasses.replace(run, lr=0.0, seed=0) for run in done if run.seed == 1)
    assert by_cell == Counter(cells(scale, "x"))
    for run in done:
        if run.seed:
            expected = shift["affine_like"] / 2 if run.method == "norm_like_half" else shift[run.method]
            assert run.lr == expected  # found from the same start wherever in the grid it lies
    sizes = {run.batch_size for run in done}
    assert scale.counts["train"] % max(sizes) == 0
    if name != "smoke":
        assert {16, 1024} <= sizes


@pytest.mark.parametrize("name, by_net", [("cpu", False), ("full", True)])
def test_rates_are_chosen_anew_for_each_batch_size_and_by_net_only_at_full_scale(name, by_net):
    scale = SCALES[name]
    done = play(scale, lambda run: scale.rates[3 + (run.batch_size > 64) + (run.depth > 4)])
    rates = {(r.family, r.width, r.depth, r.batch_size): r.lr for r in done if r.seed and r.method == "layer_norm"}
    width, depth = scale.fc.middle
    assert rates["fc", width, depth, 64] == scale.rates[3]
    assert rates["fc", width, depth, 1024] == scale.rates[4]
    assert rates["fc", width, 8, 64] == scale.rates[4 if by_net else 3]


# --- the whole, at smoke scale --------------------------------------------------------------------


def test_smoke_writes_every_run_once_and_the_report(smoke):
    records = records_of(smoke)
    runs = [as_run(record) for record in records]
    assert len(set(runs)) == len(runs)
    assert not next_runs(SCALES["smoke"], runs[0].data, dict(zip(runs, records)))
    for record in records:
        assert (
            0 <= record["test_accuracy"] <= 1
            and record["seconds"] > 0
            and record["steps"] == 64 // record["batch_size"]
        )
    text = (smoke / "report.md").read_text()
    assert "64 of 50,000 training images" in text and "2 seeds" in text
    for label in divergence_report.LABELS.values():
        assert f"| {label} |" in text
    for picture in ("accuracy_by_size.png", "accuracy_by_batch_size.png"):
        assert (smoke / picture).read_bytes().startswith(b"\x89PNG")
    assert not list(smoke.glob("*.tmp"))


def test_report_needs_the_lines_alone(smoke, tmp_path, capsys):
    lines = (smoke / "runs.jsonl").read_text()
    (tmp_path / "runs.jsonl").write_text(lines)
    main(["--report", "--output_dir", str(tmp_path)])
    assert (tmp_path / "report.md").read_text() == (smoke / "report.md").read_text()
    assert (tmp_path / "accuracy_by_size.png").exists()
    assert (tmp_path / "runs.jsonl").read_text() == lines
    # And of a run that was stopped at any moment.
    for keep in (1, 20, 60):
        (tmp_path / "runs.jsonl").write_text("".join(line + "\n" for line in lines.splitlines()[:keep]))
        main(["--report", "--output_dir", str(tmp_path)])
    with pytest.raises(ValueError, match="run without --report"):
        main(["--report", "--output_dir", str(tmp_path / "elsewhere")])


def test_resumes_where_it_was_torn(smoke, tiny_cifar, tmp_path, monkeypatch):
    whole = records_of(smoke)
    lines = (smoke / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:-3]) + lines[-3][:40])
    trained = []

    def counted(run, data):
        trained.append(run)
        return train(run, data)

    monkeypatch.setattr(affine_divergence, "train", counted)
    arguments = ["--scale", "smoke", "--data_dir", str(tiny_cifar), "--output_dir", str(tmp_path)]
    main(arguments)
    assert {as_run(record) for record in whole[-3:]} == set(trained)
    again = records_of(tmp_path)
    for records in (whole, again):
        for record in records:
            record.pop("seconds")
        records.sort(key=str)
    assert again == whole  # the same numbers in one process as in two
    trained.clear()
    main(arguments)
    assert not trained


@pytest.mark.parametrize("options", [["--workers", "0"], ["--workers", "2", "--device", "cuda"]])
def test_workers_that_cannot_be_are_refused_before_anything_is_written(options, tmp_path):
    with pytest.raises(ValueError, match="workers="):
        main([*options, "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_lines_of_other_settings_are_not_mixed_in_a_report(smoke, tmp_path):
    records = records_of(smoke)
    records[3]["epochs"] = 7
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ValueError, match="differ in epochs: .1, 7."):
        main(["--report", "--output_dir", str(tmp_path)])


# --- numbers of known answer ----------------------------------------------------------------------


def made_up(accuracy, seeds=4, batches=(16, 64, 256, 1024)):
    """Records whose test accuracy is `accuracy(setting, method, seed)`, with a worse rate that was tried, too."""
    nets = [(w, 4, 64) for w in (32, 128, 512)] + [(128, d, 64) for d in (2, 8)] + [(128, 4, b) for b in batches]
    records = []
    for width, depth, batch in dict.fromkeys(nets):
        for family in ("fc", "conv"):
            setting = divergence_statistics.Setting(family, "leaky_relu", width, depth, batch)
            for method in METHODS:
                for seed in range(seeds):
                    record = setting._asdict() | {"method": method, "seed": seed, "diverged": False, "seconds": 1.0}
                    record |= {"epochs": 1, "train_images": 64, "validation_images": 32, "test_images": 32}
                    record |= {"lr": 0.1, "validation_accuracy": 0.5, "data": "x"}
                    records.append(record | {"test_accuracy": accuracy(setting, method, seed)})
                worse = {"lr": 0.3, "seed": 0, "validation_accuracy": 0.4, "test_accuracy": 0.99}
                records.append(records[-1] | worse)
    return records


def verdicts(records):
    rows = divergence_report.claims(divergence_statistics.scores_of(divergence_statistics.final_runs(records)))
    return {claim: (float(points), outcome) for claim, _, points, *_, outcome in rows}


def noise(setting, method, seed):
    return float(np.random.default_rng([seed, setting.width, setting.depth, setting.batch_size, len(method)]).normal())


def test_effects_that_are_there_are_found():
    def accuracy(setting, method, seed):
        value = 0.4 + 0.0005 * noise(setting, method, seed) + 0.01 * seed  # pairing takes the seed's share out
        if method == "affine_like":
            value += 0.03 + 0.01 * np.log2(setting.width / 128) + 0.02 * np.log2(setting.depth / 4)
            value -= 0.005 * np.log2(setting.batch_size / 64)
        if method == "norm_like":
            value -= 0.02
        return value

    found = verdicts(made_up(accuracy))
    for claim, points, outcome in (
        ("fc: affine-like ≥ norm-like", 5, "holds"),
        ("fc: affine-like ≥ LayerNorm", 3, "holds"),
        ("fc: norm-like ≥ LayerNorm", -2, "does not hold: the opposite does"),
        ("fc: lead of affine-like over LayerNorm grows with width", 1, "holds"),
        ("fc: lead of affine-like over LayerNorm grows with depth", 2, "holds"),
        ("fc: affine-like loses with batch size", -0.5, "holds"),
        ("fc: affine-like loses more than none", -0.5, "holds"),
        ("conv: PatchNorm (norm-like) on par with BatchNorm (within 1 point)", -2, "does not hold"),
        ("conv: PatchNorm (affine-like) on par with LayerNorm (within 1 point)", 2.75, "holds"),
    ):
        assert found[claim][1] == outcome, (claim, found[claim])
        assert found[claim][0] == pytest.approx(points, abs=0.2), claim


def test_effects_that_are_not_there_are_rarely_found():
    outcomes = Counter()
    for repeat in range(0, 20_000, 1000):
        records = made_up(lambda s, m, seed, repeat=repeat: 0.4 + 0.02 * noise(s, m, repeat + seed))
        found = [outcome for claim, (_, outcome) in verdicts(records).items() if "on par" not in claim]
        outcomes += Counter(outcome != "undecided" for outcome in found)
    assert outcomes.total() == 20 * 20
    assert outcomes[True] / outcomes.total() < 0.12  # tests that are right find 5 %


def test_slope_and_interval_are_scipys():
    records = made_up(lambda s, m, seed: 0.4 - 0.01 * np.log2(s.batch_size) + 0.01 * noise(s, m, seed))
    scores = divergence_statistics.scores_of(divergence_statistics.final_runs(records))
    fit = divergence_statistics.batch_slope(scores, "fc", "layer_norm")
    points = [
        (np.log2(r["batch_size"]), r["test_accuracy"])
        for r in records
        if (r["family"], r["method"], r["width"], r["depth"], r["lr"]) == ("fc", "layer_norm", 128, 4, 0.1)
    ]
    expected = stats.linregress(*zip(*points))
    assert len(points) == 16
    assert (fit.slope, fit.pvalue) == pytest.approx((expected.slope, expected.pvalue))
    values = [0.1, 0.4, 0.35, 0.2]
    e = estimates.estimate(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert e[:3] == pytest.approx((np.mean(values), low, high))
    assert e.p == pytest.approx(stats.ttest_rel(values, [0] * 4).pvalue)


def test_runs_of_another_scale_are_refused_before_any_is_made(smoke, tiny_cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(affine_divergence, "load_images", lambda *_: pytest.fail("it began"))
    shutil.copy(smoke / "runs.jsonl", tmp_path)
    for other in (["--scale", "cpu", "--data_dir", str(tiny_cifar)], ["--scale", "smoke"]):  # the Hub's images
        with pytest.raises(ValueError, match="Give another --output_dir"):
            main([*other, "--output_dir", str(tmp_path)])
    assert [file.name for file in tmp_path.iterdir()] == ["runs.jsonl"]
