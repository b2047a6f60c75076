"""`hf-autonorm report`: tells what the run's files hold, loads nothing, works in a browser and on a phone."""

import html
import json
import math
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hf_autonorm.config import PatchConfig
from hf_autonorm.errors import ConfigError
from hf_autonorm.report import collect, write_report

LAYERS = [f"encoder.layer.{i}.{part}.LayerNorm" for i in range(4) for part in ("attention.output", "output")]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
EPOCHS = 6


def weight(epoch: int, layer: int) -> float:
    return 0.9 - 0.05 * layer * epoch / EPOCHS


def made_run(folder: Path, hostile: str = "") -> Path:
    """A folder as training/train.py leaves it, a baseline beside it, a diagnosis in it; `hostile` is in every text."""
    history = [
        {
            "epoch": float(epoch), "step": 10 * epoch, "strength": epoch / EPOCHS,
            "layers": {n + hostile: {"weights": [weight(epoch, i), 1 - weight(epoch, i)], "entropy": 0.3 + epoch / 100}
                       for i, n in enumerate(LAYERS)},
        }
        for epoch in range(1, EPOCHS + 1)
    ]  # fmt: skip
    decision = {"frozen": [name + hostile for name in LAYERS], "layers": len(LAYERS), "entropy": 0.325, "epoch": 3.0}
    decision |= {"step": 30, "rule": "paper", "threshold": 0.1}
    results = {
        "task": "word_sentiment" + hostile, "variant": "autonorm_s", "seed": 7, "gate_history": history,
        "metrics": {"validation": {"loss": 0.5, "accuracy": 0.8125, "runtime": 99.9, "samples_per_second": 3.0},
                    "test": {"loss": 0.75, "accuracy": 0.625, "runtime": 88.8}},
        "freeze_decision": decision, "rows": {"train": 1234, "test": 56}, "epochs": 6.0, "steps": 60, "seconds": 12.5,
        "processes": 1, "train_loss": 0.6, "parameters": {"total": 22804505, "added": 90519},
        "stationarity": {"drift": [{"epoch": 2.0, "mean": 0.125, "layers": {"a": 0.1, "b": 0.25}}],
                         "distance": {"1.0": 0.4375, "2.0": 0.0}, "moved": 0.4, "advice": "Exploring pays" + hostile},
        "settings": {"baseline": "runs/ln-7", "max_length": 32, "data_dir": None}, "versions": {"torch": "2.0"},
        "command": "accelerate launch training/train.py --variant autonorm_s" + hostile,
    }  # fmt: skip
    log = [{"step": 10 * i, "epoch": i, "loss": 1 / i, "gates_frozen": float(i > 2)} for i in range(1, 7)]
    log += [
        {"step": 10 * i, "epoch": i, "eval_loss": 2 / i, "eval_accuracy": i / 8, "eval_runtime": 77.7} for i in (3, 6)
    ]
    spec = PatchConfig().to_dict()
    spec["branches"] = ["dyt"]
    record = {"quant_method": "autonorm", "patches": [{"spec": spec, "modules": [name + hostile for name in LAYERS]}]}
    row = {"layer": "Linear", "factor": 12.5, "spread": 0.5, "cosine": 0.9, "scale": 1.0, "interference": 2.0}
    diagnosis = {
        "loss": "the model's own" + hostile,
        "layers": [row | {"name": f"{name}.dense{hostile}", "divergence": value}
                   for name, value in (("low", 0.1875), ("high", 0.6875))],
        "norms": [{"name": LAYERS[0], "layer": "LayerNorm", "r2": 0.984375, "alpha": 0.5}],
    }  # fmt: skip
    for name, content in {
        "run/results.json": results,
        "run/checkpoint-9/trainer_state.json": {"log_history": [{"step": 1, "loss": 9.0}]},
        "run/checkpoint-60/trainer_state.json": {"log_history": log, "global_step": 60},
        "run/config.json": {"quantization_config": record}, "run/diagnosis.json": diagnosis,
        "ln-7/results.json": {"metrics": {"test": {"loss": 0.5, "accuracy": 0.5, "runtime": 1.0}}},
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder / "run"


def page_data(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL).group(1))


def addresses(text: str) -> list[str]:
    """What the page's elements point at or load."""
    found, parser = [], HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.extend(
        value for name, value in attributes if name in ("src", "href", "srcset", "action", "data", "poster")
    )
    parser.feed(text)
    return found


def words_of(text: str) -> str:
    """What a reader sees of the HTML, as one line."""
    return " ".join(html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)).split())


def test_the_page_tells_what_the_files_hold(tmp_path):
    run = made_run(tmp_path)
    page = write_report(run)
    assert page == run / "report.html" and not list(run.glob("*.tmp"))
    text = page.read_text(encoding="utf-8")
    words = words_of(text)
    for said in (
        "word_sentiment · variant autonorm_s · seed 7", "22,804,505", "90,519", "60 steps, 6 epochs", "train 1,234",
        "accuracy 0.8125 0.625 0.5 +0.125", "loss 0.5 0.75 0.5 +0.25",  # validation, test, baseline, difference
        "8 of 8 gates frozen at epoch 3 (step 30): mean gate entropy 0.3250 nats ≥ threshold 0.1, rule “paper”.",
        "Exploring pays", "2 0.125 0.25 0", "patch(model)", "encoder.layer.*.output.LayerNorm 4",
        "accelerate launch training/train.py --variant autonorm_s", "max_length 32", "0.98438",
    ):  # fmt: skip
        assert said in words, said
    assert words.index("high.dense") < words.index("low.dense")  # ranked
    assert "99.9" not in words and "77.7" not in text and "data_dir" not in words  # no timing, no unset setting

    data = page_data(text)
    gates = data["gates"]
    assert gates["layers"] == LAYERS and gates["branches"] == ["the original norm", "dyt"] and data["frozenStep"] == 30
    for e, epoch in enumerate(gates["epochs"]):
        expected = [weight(int(epoch), i) for i in range(len(LAYERS))]
        assert [w[0] for w in gates["weights"][e]] == pytest.approx(expected, abs=1e-6)
    loss, accuracy, frozen = data["curves"]
    assert [c["name"] for c in data["curves"]] == ["loss", "accuracy", "gates_frozen"]
    assert [s["name"] for s in loss["series"]] == ["training", "evaluation"] and loss["series"][0]["points"][1] == [
        20,
        0.5,
    ]
    assert accuracy["series"][0]["points"] == [[30, 0.375], [60, 0.75]]


def test_nothing_comes_from_elsewhere_and_no_text_gets_out_of_its_place(tmp_path):
    hostile = "</script><script>alert(1)</script><img src=http://x.y onerror=alert(2)>\" ' & {{ 7 * 7 }}"
    text = write_report(made_run(tmp_path, hostile)).read_text(encoding="utf-8")
    assert text.count("<script") == 2 and "<img" not in text and "alert(1)</script>" not in text
    assert page_data(text)["gates"]["layers"][0] == LAYERS[0] + hostile
    assert hostile in html.unescape(text)
    assert "url(" not in text and "@import" not in text
    assert all(address.startswith(("#", "data:")) for address in addresses(text)) and len(addresses(text)) > 5
    assert "default-src 'none'" in text


def test_a_run_of_any_trainer_has_gates_and_curves_too(tmp_path):
    """No results.json: the state of the newest checkpoint holds what GateFreezeCallback noted."""
    whole = collect(made_run(tmp_path))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "run" / "config.json").rename(tmp_path / "run" / "checkpoint-60" / "config.json")
    path = tmp_path / "run" / "checkpoint-60" / "trainer_state.json"
    state = json.loads(path.read_text())
    attributes = {"decision": results["freeze_decision"], "history": results["gate_history"]}
    noted = {"args": {}, "attributes": attributes}
    for name, saved in (("GateFreezeCallback", noted), ("GateFreezeCallback", [noted]), ("ClassMadeFromIt", noted)):
        ramp = {"StrengthRampCallback": {"args": {}, "attributes": {"starts": [0.0]}}}
        path.write_text(json.dumps(state | {"stateful_callbacks": ramp | {name: saved}}))
        alone = collect(tmp_path / "run")
        assert alone["data"] == whole["data"] and alone["decided"] == whole["decided"] and alone["steps"] == 60
        assert alone["patches"] == whole["patches"] != []
        assert "Results" not in words_of(write_report(tmp_path / "run").read_text(encoding="utf-8"))


def test_an_unpatched_run_and_one_that_diverged(tmp_path):
    (tmp_path / "results.json").write_text('{"metrics": {"test": {"loss": NaN, "accuracy": 0.1}}, "gate_history": []}')
    log = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": math.inf}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert page_data(text)["curves"][0]["series"][0]["points"] == [[1, 1.0], [2, None], [3, None]]
    words = words_of(text)
    assert "Nothing: this is the model as it is." in words and "No freeze decision was reached." in words
    assert "loss –" in words and page_data(text)["gates"] is None


def without_numbers(value):
    """`value` with NaN for every float in it."""
    if isinstance(value, dict):
        return {name: without_numbers(v) for name, v in value.items()}
    if isinstance(value, list):
        return [without_numbers(v) for v in value]
    return math.nan if isinstance(value, float) else value


@pytest.mark.parametrize("part", ["metrics", "train_loss", "gate_history", "freeze_decision", "stationarity"])
def test_a_run_whose_numbers_are_none_still_has_its_page(part, tmp_path):
    """A run that diverged is the one whose page is wanted most."""
    run = made_run(tmp_path)
    results = json.loads((run / "results.json").read_text())
    results[part] = without_numbers(results[part])
    if part in ("gate_history", "freeze_decision"):  # these two go by epochs; the threshold is a setting
        for entry, epoch in zip(results["gate_history"], range(1, EPOCHS + 1)):
            entry["epoch"] = float(epoch)
        results["freeze_decision"] |= {"epoch": 3.0, "threshold": 0.1}
    if part == "stationarity":
        results[part]["drift"][0] |= {"epoch": 2.0, "layers": {"a": 0.1, "b": math.nan}}
    (run / "results.json").write_text(json.dumps(results))
    words = words_of(write_report(run).read_text(encoding="utf-8"))
    assert "nan" not in words.lower() and "None" not in words


def test_what_is_logged_and_is_no_number_has_no_curve(tmp_path):
    """Freeze decisions (several, of the rule "converged"), scores by class and confusion matrices are logged, too."""
    log = []
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 1.0 / step})
        log.append({"step": step, "gate_decision": {"frozen": ["a"], "entropy": 0.05}})
        log.append({"step": step, "eval_f1": [0.5, 0.25], "eval_confusion": [[1, 2], [3, 4]], "eval_name": "x"})
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    metrics = {"test": {"accuracy": 0.5, "f1": [0.5, 0.25], "by_class": {"a": 1.0}}}
    (tmp_path / "results.json").write_text(json.dumps({"metrics": metrics}))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert [curve["name"] for curve in page_data(text)["curves"]] == ["loss"]
    assert "accuracy 0.5" in words_of(text) and "f1" not in words_of(text)


@pytest.mark.parametrize("length", [1, 2, 299, 300, 301, 5000])
def test_long_runs_are_thinned_to_what_a_screen_shows(tmp_path, length):
    log = [{"step": step, "loss": float(step)} for step in range(1, length + 1)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    curves = collect(tmp_path)["data"]["curves"]
    assert bool(curves) == (length > 1)
    if curves:
        points = curves[0]["series"][0]["points"]
        assert len(points) <= 300 and points[-1] == [length, length] and len(points) == min(length, len(points))
        assert len({b[0] - a[0] for a, b in zip(points, points[1:])}) == 1


def test_what_is_missing_or_broken_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="neither results.json nor a trainer_state.json"):
        write_report(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ConfigError, match="results.json is no JSON"):
        write_report(tmp_path, tmp_path / "page.html")
    (tmp_path / "results.json").write_text('{"accuracy": {"AutoNorm-S": 0.9}, "seconds": {"AutoNorm-S": 3}}')
    with pytest.raises(ConfigError, match="has no metrics"):
        write_report(tmp_path)
    assert not list(tmp_path.glob("*.html*"))


# --- in a browser ----------------------------------------------------------------------------------------------------

DRIVER = """<!doctype html><body style="margin:0">
<iframe src="report.html" style="border:0;width:390px;height:2400px"></iframe>
<iframe src="report.html" style="border:0;width:1280px;height:2400px"></iframe>
<pre id="found"></pre><script>
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, $ = id => page.getElementById(id), seen = {};
    const bar = i => [...$("bars").children[i].querySelectorAll("i")].map(part => parseFloat(part.style.width));
    const slide = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("input")); };
    seen.overflow = page.documentElement.scrollWidth - frame.clientWidth;
    const right = e => e.getBoundingClientRect().right;
    seen.tooWide = [...page.querySelectorAll("section *, header *")].filter(e =>
      e.checkVisibility() && right(e) > right(e.closest("section, header"))).map(e => e.outerHTML);
    seen.tooSmall = [...page.querySelectorAll("body *")].filter(e => e.checkVisibility() && e.childElementCount === 0
      && e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12 && e.tagName !== "SCRIPT").length;
    seen.curves = page.querySelectorAll("#curve-list svg path").length;
    seen.last = [$("epoch-said").textContent, bar(7)];
    slide("epoch", 0);
    seen.first = [$("epoch-said").textContent, bar(7)];
    slide("layer", 5);
    seen.layer = [$("layer-said").textContent, $("layer-weights").querySelectorAll("path").length];
    const before = $("layer-weights").innerHTML;
    $("bars").children[7].click();
    seen.clicked = [$("layer").value, $("layer-weights").innerHTML !== before];
    return seen;
  });
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("CHROME") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed, and $CHROME names none")

    def run(page: Path, *options: str) -> str:
        command = [
            found,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={page.parent}/b",
        ]
        command += ["--allow-file-access-from-files", *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout

    return run


def test_the_sliders_work_and_a_phone_shows_all_of_it(browser, tmp_path):
    write_report(made_run(tmp_path), tmp_path / "report.html")
    (tmp_path / "driver.html").write_text(DRIVER)
    dom = browser(tmp_path / "driver.html", "--window-size=1700,2500", "--dump-dom")
    phone, desktop = json.loads(html.unescape(re.search(r'<pre id="found">(.+?)</pre>', dom).group(1)))
    for seen in (phone, desktop):
        assert seen["overflow"] <= 0 and seen["tooWide"] == [] and seen["tooSmall"] == 0
        assert seen["curves"] == 4  # two of loss, one of accuracy, one of the frozen share
        assert seen["last"][0] == "epoch 6, step 60, strength 1; 8 frozen" and seen["first"][0].startswith(
            "epoch 1, step 10"
        )
        assert seen["last"][1] == pytest.approx([100 * weight(6, 7), 100 - 100 * weight(6, 7)], abs=0.01)
        assert seen["first"][1] == pytest.approx([100 * weight(1, 7), 100 - 100 * weight(1, 7)], abs=0.01)
        assert seen["layer"] == [LAYERS[5], 2] and seen["clicked"] == ["7", True]


def test_screenshots_show_the_charts(browser, tmp_path):
    """At the width of a phone (in a frame: no window is so narrow) and of a desktop; in the colours of the lines."""
    from PIL import Image

    write_report(made_run(tmp_path), tmp_path / "report.html")
    frame = '<body style="margin:0"><iframe src="report.html" style="border:0;width:390px;height:3400px"></iframe>'
    (tmp_path / "phone.html").write_text(frame)
    for page, width, height in (("phone", 500, 3400), ("report", 1280, 2600)):
        picture = tmp_path / f"{page}.png"
        browser(tmp_path / f"{page}.html", f"--window-size={width},{height}", f"--screenshot={picture}")
        image = Image.open(picture).convert("RGB")
        assert image.size == (width, height)
        colours = dict((colour, count) for count, colour in image.getcolors(1 << 24))
        for colour in ((0, 0x72, 0xB2), (0xE6, 0x9F, 0)):
            assert colours.get(colour, 0) > 500, (page, colour)


@pytest.mark.parametrize(
    "name, content",
    [
        ("results.json", "metrics"),
        ("results.json", {"metrics": None}),
        ("results.json", {"metrics": {"accuracy": 0.5}}),
        ("results.json", {"metrics": {}, "freeze_decision": {"frozen": []}}),
        ("results.json", {"metrics": {}, "gate_history": [{"epoch": 1, "step": 1, "layers": {}}]}),
        ("trainer_state.json", {"log_history": None}),
        ("trainer_state.json", {"stateful_callbacks": {"GateFreezeCallback": [3]}}),
        ("config.json", {"quantization_config": {"quant_method": "autonorm", "patches": [{"modules": ["a"]}]}}),
        ("diagnosis.json", ["layer"]),
    ],
)
def test_files_of_another_shape_are_a_clear_error_and_nothing_is_written(name, content, tmp_path):
    run = made_run(tmp_path)
    (run / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"results\.json"):
        write_report(run)
    assert not list(run.glob("report.html*"))


def test_an_output_that_is_a_folder_is_refused(tmp_path):
    run = made_run(tmp_path)
    (run / "report.html").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        write_report(run)
    assert not list(run.glob("*.tmp"))


def test_layers_with_different_branches_are_not_called_by_one_of_them(tmp_path):
    run = made_run(tmp_path)
    config = json.loads((run / "config.json").read_text())
    (entry,) = config["quantization_config"]["patches"]
    other = {"spec": entry["spec"] | {"branches": ["rms_norm"]}, "modules": entry["modules"][:1]}
    config["quantization_config"]["patches"] = [other, entry | {"modules": entry["modules"][1:]}]
    (run / "config.json").write_text(json.dumps(config))
    assert collect(run)["data"]["gates"]["branches"] == ["the original norm", "rms_norm / dyt"]
