"""The command line: folders in, folders out, JSON for machines, one line for an error."""

import io
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import hf_autonorm
import hf_autonorm_cli as cli
from hf_autonorm import from_pretrained
from hf_autonorm.nn.branches import BRANCHES
from hf_autonorm.patching.record import wrappers
from hf_autonorm.tables import pattern
from tests.hub.small import same_state, tiny_bert

ROOT = Path(__file__).parents[1]


def run(capsys, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        cli.main([str(a) for a in arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("stock") / "bert"
    tiny_bert(patched=False).save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a b a\nb b c\n\nd a\n")
    return path


def test_the_whole_way(capsys, stock, texts, tmp_path):
    code, out, _ = run(capsys, "plan", stock, "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 5 and all(row["reason"] is None for row in rows)

    code, out, _ = run(capsys, "patch", stock, tmp_path / "p", "--norm", "autonorm", "--norm-weight", 0.8, "--json")
    assert code == 0 and json.loads(out)["output"] == str(tmp_path / "p")
    assert (tmp_path / "p" / "tokenizer.json").exists() and (tmp_path / "p" / "README.md").exists()
    assert len(wrappers(AutoModelForSequenceClassification.from_pretrained(tmp_path / "p"))) == 5

    code, out, _ = run(capsys, "calibrate", tmp_path / "p", tmp_path / "c", "--texts", texts, "--json")
    report = json.loads(out)
    assert code == 0 and len(report["rows"]) == 5 and report["cosine_after"] <= 1.000001

    code, out, _ = run(capsys, "gates", tmp_path / "c", "--plot", tmp_path / "g.png", "--json")
    rows = json.loads(out)
    assert code == 0 and (tmp_path / "g.png").exists()
    assert rows[0]["weights"] == pytest.approx({"norm": 0.8, "dyt": 0.2}) and rows[0]["r2"] is not None

    code, out, _ = run(capsys, "unpatch", tmp_path / "c", tmp_path / "u")
    assert code == 0 and same_state(from_pretrained(tmp_path / "u"), from_pretrained(stock))


def test_patch_at_strength_zero_is_the_original(capsys, stock, texts, tmp_path):
    run(
        capsys,
        "patch",
        stock,
        tmp_path / "p",
        "--norm",
        "dyt",
        "--strength",
        0,
        "--include",
        ".*layer.1.*",
        "--texts",
        texts,
    )
    patched, original = from_pretrained(tmp_path / "p"), from_pretrained(stock)
    ids = torch.tensor([[2, 3, 2]])
    assert len(wrappers(patched)) == 2 and torch.equal(patched(ids).logits, original(ids).logits)


def test_fold(capsys, stock, texts, tmp_path):
    run(capsys, "patch", stock, tmp_path / "p", "--norm-weight", 0.9)
    code, out, _ = run(capsys, "fold", tmp_path / "p", tmp_path / "f", "--json")
    assert code == 0 and json.loads(out)["patched_after"] == 5
    run(capsys, "patch", stock, tmp_path / "s", "--strength", 0)
    code, out, _ = run(capsys, "fold", tmp_path / "s", tmp_path / "f", "--texts", texts)
    assert code == 0 and "Of 5 patched modules 5 are the original again, 0 became one branch." in out
    assert same_state(from_pretrained(tmp_path / "f"), from_pretrained(stock))
    assert (tmp_path / "f" / "tokenizer.json").exists()


def test_card(capsys, stock, tmp_path):
    run(capsys, "patch", stock, tmp_path / "p")
    readme = tmp_path / "p" / "README.md"
    readme.write_text("Mine.\n\n" + readme.read_text().split("---", 2)[2])
    facts = ["--metric", "accuracy=0.9", "--baseline", "accuracy=0.8", "--dataset", "nyu-mll/glue", "--license", "mit"]
    code, out, _ = run(capsys, "card", tmp_path / "p", *facts, "--base-model", "owner/base", "--json")
    metadata = json.loads(out)["metadata"]
    assert code == 0 and metadata["base_model"] == "owner/base" and metadata["model-index"][0]["name"] == "p"
    assert "Mine." in readme.read_text() and "| accuracy | 0.9 | 0.8 | +0.1 |" in readme.read_text()


@pytest.mark.parametrize("dataset", ["nyu-mll/glue", "Word ratings", None])
def test_a_card_keeps_the_results_that_it_is_not_told_anew(capsys, stock, tmp_path, dataset):
    """The weights are the same: a license is added, a number corrected, and the rest of the table stays."""
    run(capsys, "patch", stock, tmp_path / "p")
    facts = ["--metric", "accuracy=0.9", "--metric", "f1=0.5", "--baseline", "accuracy=0.8"]
    run(capsys, "card", tmp_path / "p", *facts, *(["--dataset", dataset] if dataset else []))
    readme = tmp_path / "p" / "README.md"
    before = readme.read_text()
    run(capsys, "card", tmp_path / "p")
    assert readme.read_text() == before
    run(capsys, "card", tmp_path / "p", "--license", "mit", "--metric", "f1=0.75")
    assert readme.read_text().replace("license: mit\n", "").replace("0.75", "0.5") == before


def test_diagnose(capsys, stock, texts, tmp_path):
    code, out, _ = run(capsys, "diagnose", stock, "--texts", texts, "--plot", tmp_path / "d.png", "--json")
    found = json.loads(out)
    assert code == 0 and (tmp_path / "d.png").exists() and len(found["norms"]) == 5
    layers = [row["name"] for row in found["layers"]]
    assert "bert.encoder.layer.0.attention.self.query" in layers and "classifier" in layers
    code, out, _ = run(capsys, "diagnose", stock, "--texts", texts)
    assert code == 0 and "Divergence" in out and "Dytness" in out


def test_tables_for_people(capsys, stock):
    code, out, _ = run(capsys, "plan", stock, "--exclude", ".*embeddings.*")
    assert code == 0 and "4 modules to patch" in out and "left alone" in out


@pytest.mark.parametrize("verb", ["plan", "gates", "diagnose"])
def test_tables_of_a_narrow_terminal_name_every_module(capsys, monkeypatch, stock, texts, tmp_path, verb):
    """A name that is cut short cannot be told from its neighbour's, nor be copied into --include."""
    run(capsys, "patch", stock, tmp_path / "p")
    monkeypatch.setenv("COLUMNS", "80")
    names = [row["name"] for row in json.loads(run(capsys, "plan", tmp_path / "p", "--json")[1])]
    code, out, _ = run(capsys, verb, tmp_path / "p", *(["--texts", texts] if verb == "diagnose" else []))
    column = "".join(line[1:].split("│")[0].strip() for line in out.splitlines() if line.startswith("│"))
    assert code == 0 and len(names) == 5
    assert all(name in column or (verb == "plan" and pattern(name) in column) for name in names)


def test_what_it_prints_stands_as_it_is_named(capsys, stock, tmp_path):
    for name in ("run [old]", "run[/b]", "run[red]"):
        code, out, _ = run(capsys, "patch", stock, tmp_path / name)
        assert code == 0 and out == f"Written: {tmp_path / name}\n"


def test_an_output_that_cannot_show_a_letter_shows_another(monkeypatch, stock, texts, tmp_path):
    """A pipe on Windows (cp1252), or LC_ALL=C: the work is done by then, and only its words are poorer."""
    for encoding in ("ascii", "cp1252"):
        screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", screen)
            cli_stops(["patch", stock, tmp_path / "p", "--texts", texts])
        screen.flush()
        assert "Written: " in screen.buffer.getvalue().decode(encoding)


def cli_stops(arguments) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(a) for a in arguments])
    assert not stop.value.code


def test_a_model_without_a_tokenizer_reads_no_texts(capsys, texts, tmp_path):
    """transformers makes up a tokenizer that knows no word: fits and measures on it would be of noise."""
    tiny_bert(patched=False).save_pretrained(tmp_path / "bert")
    vit = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    ViTModel(vit).save_pretrained(tmp_path / "vit")
    gpt = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=16)
    GPT2LMHeadModel(gpt).save_pretrained(tmp_path / "gpt")
    wav = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    wav |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_size": 8}
    Wav2Vec2Model(Wav2Vec2Config(**wav, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path / "wav")
    for name in ("bert", "vit", "gpt", "wav"):
        for verb in (["patch", tmp_path / name, tmp_path / "out"], ["diagnose", tmp_path / name]):
            code, out, err = run(capsys, *verb, "--texts", texts)
            assert code == 1 and out == "" and f"{tmp_path / name} holds no tokenizer" in err
    assert not (tmp_path / "out").exists()


def test_an_encoder_and_its_decoder_read_the_texts(capsys, stock, texts, tmp_path):
    shape = {"d_model": 8, "d_ff": 8, "num_layers": 2, "num_heads": 2, "d_kv": 4, "vocab_size": 20}
    T5ForConditionalGeneration(T5Config(**shape)).save_pretrained(tmp_path / "t5")
    for file in stock.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "t5")
    code, out, err = run(capsys, "patch", tmp_path / "t5", tmp_path / "p", "--texts", texts, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert len(report["rows"]) == 12 and not report["never_called"]  # 2 × 2 norms, 2 × 3, and one at each end
    for verb in ("gates", "diagnose"):
        code, _, err = run(capsys, verb, tmp_path / "p", "--texts", texts)
        assert code == 0, err


def test_texts_are_cut_to_what_the_model_has_positions_for(capsys, stock, tmp_path):
    folder = shutil.copytree(stock, tmp_path / "bert")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("model_max_length")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "long.txt").write_text("a b " * 500)
    code, _, err = run(capsys, "patch", folder, tmp_path / "out", "--texts", tmp_path / "long.txt")
    assert code == 0, err


def test_a_mark_of_the_encoding_is_no_text(stock, tmp_path):
    file = tmp_path / "texts.txt"
    file.write_bytes(b"\xef\xbb\xbfa b\r\n\r\nb\r\n")
    (batch,) = cli.parts.batches(tiny_bert(patched=False), str(stock), file)
    assert batch["input_ids"].tolist() == [[2, 3], [3, 0]]


@pytest.mark.parametrize("file", ["picture", "picture.foo", "no/such/folder/picture.png", "."])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(capsys, monkeypatch, stock, texts, tmp_path, file):
    monkeypatch.setattr(cli.parts, "load", lambda path: pytest.fail("the work began"))
    for verb in ("gates", "diagnose"):
        code, out, err = run(capsys, verb, stock, "--texts", texts, "--plot", tmp_path / file)
        assert code == 2 and out == "" and "--plot" in err
    assert list(tmp_path.iterdir()) == [texts]


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf_autonorm_cli", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("hf_autonorm_cli", run_name="__main__")
    assert "hf-autonorm demo" in capsys.readouterr().out


def test_env(capsys):
    code, out, _ = run(capsys, "env", "--json")
    assert code == 0 and json.loads(out)["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["plan", "/no/such/folder"], 1, "error: there is no folder /no/such/folder"),
        (["plan", "STOCK", "--norm", "dty"], 1, "nearest: 'dyt'"),
        (["plan", "STOCK", "--include", "nothing"], 1, "matches none"),
        (["gates", "STOCK"], 1, "call patch(model) first"),
        (["card", "STOCK", "--metric", "accuracy"], 2, "name=value"),
        (["calibrate", "STOCK", "OUT"], 2, "--texts"),
        (["diagnose", "STOCK"], 2, "--texts"),
        (["fold", "STOCK", "OUT"], 1, "nothing to fold"),
        (["fold", "STOCK", "OUT", "--tolerance", "0.7"], 1, "tolerance"),
        (["push", "/no/such/folder", "me/model"], 1, "there is no folder /no/such/folder to push"),
        (["push", "STOCK", "a/b/c"], 1, "no name of a repository"),
        (["push", "STOCK", "me/model"], 1, "HF_HUB_OFFLINE"),
        (["push", "STOCK"], 2, "REPO"),
        (["plann"], 2, "plan"),
        (["plan"], 2, "MODEL"),
    ],
)
def test_errors(capsys, stock, tmp_path, arguments, code, words):
    names = {"STOCK": stock, "OUT": tmp_path / "out"}
    got, out, err = run(capsys, *(names.get(a, a) for a in arguments))
    assert got == code and words in err and "Traceback" not in err and out == ""
    if code == 1:
        assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "does not exist"),
        (b"", "holds no text"),
        (b"\xff\xfe\x00", "no UTF-8 text"),
        ("folder", "is a directory"),
    ],
)
def test_a_text_file_that_cannot_be_read_is_named(capsys, stock, tmp_path, content, words):
    file = tmp_path / "my texts.txt"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    code, _, err = run(capsys, "patch", stock, tmp_path / "out", "--texts", file)
    assert code in (1, 2) and "--texts" in err and not (tmp_path / "out").exists()
    told = "".join(word for line in err.splitlines() for word in line.strip("│ ").split())  # typer frames its errors
    assert "".join(words.split()) in told and file.name.replace(" ", "") in told


def test_debug_shows_the_traceback(stock):
    with pytest.raises(ValueError, match="matches none"):
        cli.main(["plan", str(stock), "--include", "nothing", "--debug"])


@pytest.mark.parametrize(
    "verb",
    [
        "",
        "plan",
        "patch",
        "calibrate",
        "gates",
        "diagnose",
        "fold",
        "unpatch",
        "report",
        "push",
        "card",
        "demo",
        "env",
    ],
)
def test_help_teaches(capsys, verb):
    code, out, _ = run(capsys, *([verb] if verb else []), "--help")
    assert code == 0 and ("Example:" in out or not verb) and f"hf-autonorm {verb}".strip() in " ".join(out.split())


def new_modules(before: str, then: str) -> set[str]:
    """The top-level packages that a new process imports by `then`, after `before`."""
    script = f"import contextlib, sys\n{before}\nold = set(sys.modules)\n{then}\n"
    script += "print(*{name.split('.')[0] for name in set(sys.modules) - old})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_help_imports_no_library():
    """So that it answers at once, whatever the commands need."""
    new = new_modules("", "import hf_autonorm_cli as c\nwith contextlib.suppress(SystemExit):\n    c.main(['--help'])")
    assert "typer" in new
    assert not new & {"torch", "transformers", "numpy", "hf_autonorm", "huggingface_hub", "jinja2", "matplotlib"}


def test_importing_the_package_costs_little_beyond_the_models_that_it_patches():
    """Not what Trainer imports (peft, datasets, …), nor what a single function needs."""
    new = new_modules("from transformers import BertModel", "import hf_autonorm")
    assert "hf_autonorm" in new
    assert not new & {"peft", "datasets", "pandas", "sklearn", "evaluate", "timm", "matplotlib", "jinja2", "typer"}


def test_a_branch_of_ones_own_on_the_command_line(capsys, stock, tmp_path, monkeypatch):
    """From a file or by a module's name; without it the saved model says what is missing."""
    lines = "from hf_autonorm import register_branch\nfrom hf_autonorm.nn import PointwiseBranch\n\n"
    for name in ("curve_a", "curve_b"):
        branch = f"@register_branch('{name}')\nclass Curve(PointwiseBranch):\n"
        (tmp_path / f"{name}.py").write_text(f"{lines}{branch}    def curve(self, z):\n        return z.sin()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = dict(BRANCHES)
    try:
        for name, given in (("curve_a", tmp_path / "curve_a.py"), ("curve_b", "curve_b")):
            code, _, said = run(capsys, "plan", stock, "--norm", name)
            assert code == 1 and "--import FILE" in said
            for command in (("patch", stock, name, "--norm", name), ("gates", name)):
                code, out, said = run(capsys, "--import", given, *command)
                assert code == 0, said
            assert f"w({name})" in out
            del BRANCHES[name], sys.modules[name]
    finally:
        BRANCHES.clear()
        BRANCHES.update(kept)
    (tmp_path / "random.py").write_text("")
    for given, words in (("no_such.py", "no such file"), ("random.py", "module random already")):
        code, _, said = run(capsys, "--import", given, "env")
        assert code == 2 and words in said


def test_what_would_be_a_surprise_is_said(capsys, stock, tmp_path):
    for options, warned in ((), True), (("--strength", "0"), False):
        code, out, said = run(capsys, "patch", stock, tmp_path / f"m{len(options)}", "--norm", "dyt", *options)
        assert code == 0 and ("not calibrated" in said) == warned and "UserWarning" not in said
    code, out, said = run(capsys, "patch", tmp_path / "m0", tmp_path / "again", "--norm", "dyt")
    assert code == 0 and "patched in this way already" in said
    code, _, said = run(capsys, "calibrate", stock, tmp_path / "c", "--texts", __file__)
    assert code == 1 and "hf-autonorm patch MODEL OUT" in said
    code, out, _ = run(capsys, "--version")
    assert code == 0 and out.strip() == hf_autonorm.__version__


def test_a_card_of_somebody_else_stays(capsys, stock, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(stock, folder)
    (folder / "README.md").write_text("# Theirs\n")
    code, _, said = run(capsys, "card", folder)
    assert code == 1 and "not patched" in said and (folder / "README.md").read_text() == "# Theirs\n"
