"""The card says what happened, its metadata is valid, its snippet runs, and the user's own words stay."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import PreTrainedTokenizerFast

from hf_autonorm import GateFreezeCallback, calibrate, patch, save_pretrained, unpatch
from hf_autonorm.hub import cards
from hf_autonorm.hub.metadata import CardError, check_metadata
from hf_autonorm.hub.snippets import auto_class
from tests.hub.small import tiny_bert, tiny_net

ROOT = Path(__file__).resolve().parents[2]
FACTS = {
    "metrics": {"eval_accuracy": 0.91, "f1": torch.tensor(0.5), "nan": float("nan")},
    "baseline": {"eval_accuracy": 0.9},
    "base_model": "owner/base",
    "dataset": {"type": "nyu-mll/glue", "name": "GLUE", "config": "sst2", "split": "validation"},
    "command": "accelerate launch train.py --variant autonorm_s | tee log",
    "license": "mit",
}


def metadata(folder) -> dict:
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def test_the_card_says_what_happened(tmp_path):
    model = tiny_bert()
    calibrate(model, [{"input_ids": torch.randint(0, 64, (8, 12))}])
    callback = GateFreezeCallback(freeze_epoch=1)
    name = "bert.encoder.layer.0.output.LayerNorm"
    callback.decision = {
        "frozen": [name], "layers": 5, "entropy": 0.3, "epoch": 1.0, "step": 7, "rule": "paper", "threshold": 0.1,
    }  # fmt: skip
    layer = {name: {"weights": [0.9, 0.1], "entropy": 0.3}}
    callback.history = [{"epoch": e, "step": e, "strength": 1.0, "layers": layer} for e in (1, 2)]
    folder = save_pretrained(model, tmp_path / "my-model", callbacks=[callback], **FACTS)
    text = (folder / "README.md").read_text()
    for words in (
        "# my-model",
        "| `bert.encoder.layer.*.output.LayerNorm` | 2 | LayerNorm | AutoNorm(LayerNorm \\| dyt) |",
        "| accuracy | 0.91 | 0.9 | +0.01 |",
        "1 of 5 gates frozen at epoch 1 (step 7): mean gate entropy 0.3000 nats ≥ threshold 0.1",
        FACTS["command"],
        f"torch {torch.__version__.split('+')[0]}",
        "On GLUE, split “validation”",
        "R²",
        "2607.10593",
    ):
        assert words in text, words
    for plot in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (folder / plot).stat().st_size > 1000
    assert text.count("![") == 2
    assert str(tmp_path) not in text

    data = metadata(folder)
    check_metadata(data)
    assert data["base_model"] == "owner/base" and data["license"] == "mit" and data["library_name"] == "hf_autonorm"
    assert data["pipeline_tag"] == "text-classification" and data["datasets"] == ["nyu-mll/glue"]
    assert {"autonorm", "dyt", "bert"} <= set(data["tags"])
    results = ModelCard.load(folder / "README.md").data.eval_results
    read_back = {(r.metric_type, r.metric_name): r.metric_value for r in results}
    assert read_back == {
        ("accuracy", "accuracy (patched)"): 0.91,
        ("accuracy", "accuracy (baseline, not patched)"): 0.9,
        ("f1", "f1 (patched)"): 0.5,
    }
    assert {r.dataset_config for r in results} == {"sst2"} and ModelCard.load(folder / "README.md").data.model_name


def test_a_card_without_any_fact(tmp_path):
    for model, name in ((tiny_bert(), "a"), (patch(tiny_net()), "b"), (tiny_bert(patched=False), "c")):
        folder = save_pretrained(model, tmp_path / name)
        data = metadata(folder)
        check_metadata(data)
        text = (folder / "README.md").read_text()
        assert "model-index" not in data and "base_model" not in data and "None" not in text and "{{" not in text
        assert "\n\n\n" not in text
    assert metadata(tmp_path / "c")["library_name"] == "transformers" and "a baseline" in text


def test_metrics_need_no_dataset_and_no_name(tmp_path):
    folder = save_pretrained(tiny_bert(), tmp_path / "model", metrics={"accuracy": 1})
    (result,) = ModelCard.load(folder / "README.md").data.eval_results
    assert result.metric_value == 1 and result.dataset_name == "not stated"


def test_measures_are_paired_by_name_whatever_trainer_calls_them(tmp_path):
    model = tiny_bert()
    folder = save_pretrained(model, tmp_path / "a", metrics={"eval_f1": 0.9}, baseline={"test_f1": 0.75, "loss": 1})
    assert "| f1 | 0.9 | 0.75 | +0.15 |" in (folder / "README.md").read_text()
    folder = save_pretrained(model, tmp_path / "b", metrics={"eval_f1": 0.9, "test_f1": 0.8})
    values = {r.metric_value for r in ModelCard.load(folder / "README.md").data.eval_results}
    assert values == {0.9, 0.8}
    with pytest.warns(UserWarning, match=r"share no name \(accuracy; acc\)"):
        save_pretrained(model, tmp_path / "c", metrics={"accuracy": 0.9}, baseline={"acc": 0.8})


def test_random_weights_are_not_said_to_come_from_the_hub(tmp_path):
    """timm writes the id of pretrained weights into every model of the architecture."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=1, pretrained=False)
    folder = save_pretrained(patch(model), tmp_path / "vit")
    card = ModelCard.load(folder / "README.md")
    assert model.pretrained_cfg["hf_hub_id"] and card.data.base_model is None
    assert "A `VisionTransformer` (vit_tiny_patch16_224)" in card.text
    again = save_pretrained(model, tmp_path / "given", base_model="timm/some.model")
    assert ModelCard.load(again / "README.md").data.base_model == "timm/some.model"


def test_own_words_and_metadata_stay(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    own = (
        "---\nlanguage: [en, de]\nlicense: gpl-3.0\nlibrary_name: transformers\ntags:\n- mine\nwidget:\n- text: hi\n"
        "datasets:\n- null\nmodel-index:\n- name: old\n  results:\n  - task: {type: other}\n"
        "    dataset: {name: D, type: d}\n    metrics: [{type: bleu, value: 3}]\n---\n# My title\n\nMy words \\1.\n"
    )
    (folder / "README.md").write_text(own)
    save_pretrained(tiny_bert(), folder, metrics={"accuracy": 0.1})
    save_pretrained(tiny_bert(), folder, metrics={"accuracy": 0.2}, dataset="mine/data")
    path = folder / "README.md"
    path.write_text(path.read_text() + "\nWords below.\n")
    save_pretrained(tiny_bert(), folder, metrics={"accuracy": 0.3}, dataset="mine/data")
    text, data = path.read_text(), metadata(folder)
    assert "# My title\n\nMy words \\1.\n" in text and text.endswith("\nWords below.\n")
    assert text.count(cards.BEGIN) == 1 and "# model\n" not in text
    assert data["language"] == ["en", "de"] and data["license"] == "gpl-3.0" and data["widget"] == [{"text": "hi"}]
    assert data["library_name"] == "hf_autonorm" and data["tags"][0] == "mine" and data["datasets"] == ["mine/data"]
    values = {(r.dataset_type, r.metric_type): r.metric_value for r in ModelCard.load(path).data.eval_results}
    assert values == {("d", "bleu"): 3, ("mine/data", "accuracy"): 0.3}  # 0.1 and 0.2 were earlier weights'
    check_metadata(data)


@pytest.mark.parametrize("text", ["Just words.\n", "", "\ufeff---\nlicense: mit\n---\r\nWords.\r\n"])
def test_odd_readmes(tmp_path, text):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_bytes(text.encode())
    for _ in range(2):
        save_pretrained(tiny_bert(), folder)
    after = (folder / "README.md").read_bytes().decode()
    assert text.strip("\ufeff").split("---")[-1].strip() in after and after.count(cards.BEGIN) == 1


def test_unreadable_metadata_is_an_error_and_stays(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_text("---\n: [\n---\nWords.\n")
    with pytest.raises(CardError, match="cannot be read"):
        save_pretrained(tiny_bert(), tmp_path / "model")
    assert (tmp_path / "model" / "README.md").read_text().endswith("Words.\n")
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"tags": "word"}, {"datasets": [None]}, {"license": ["a", None]}, {"widget": {}}, {"language": []},
        {"model-index": [{"results": []}]}, {"extra": {"a": [None]}},
        {"model-index": [{"name": "m", "results": [{"dataset": {"config": ["a"]}}]}]},
    ],
)  # fmt: skip
def test_invalid_metadata_is_named(wrong):
    with pytest.raises(CardError, match=list(wrong)[0]):
        check_metadata(wrong)


def test_license_of_a_local_base_is_known(tmp_path):
    base = tmp_path / "base"
    tiny_bert(patched=False).save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nBase.\n")
    from transformers import AutoModelForSequenceClassification

    model = patch(AutoModelForSequenceClassification.from_pretrained(base))
    data = metadata(save_pretrained(model, tmp_path / "model"))
    assert data["license"] == "apache-2.0" and "base_model" not in data


def test_the_snippet_runs(tmp_path):
    """Extracted from README.md, run as it stands, offline, in a new process: it prints the model's own logits."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "A", "sentence", "to", "try", "it", "on", "."])}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    model = tiny_bert(norm="dyt")
    folder = save_pretrained(model, tmp_path / "my-model", tokenizer=tokenizer)
    bare = save_pretrained(tiny_bert(), tmp_path / "bare")
    code = [
        re.search(r"```python\n(.*?)```", (f / "README.md").read_text(), re.DOTALL).group(1) for f in (folder, bare)
    ]
    assert all("AutoModelForSequenceClassification.from_pretrained" in lines for lines in code)
    assert "tokenizer" in code[0] and "tokenizer" not in code[1]  # nobody saved one
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(**tokenizer("A sentence to try it on.", return_tensors="pt")).logits
    assert str(expected) in done.stdout


def test_auto_classes():
    assert auto_class("BertForTokenClassification") == "AutoModelForTokenClassification"
    assert auto_class("GPT2LMHeadModel") == "AutoModelForCausalLM"
    assert auto_class("BertModel") == "AutoModel"
    assert auto_class("T5ForConditionalGeneration") == "T5ForConditionalGeneration"


def test_template_is_where_the_wheel_takes_it_from():
    assert cards.template() == (ROOT / "model_cards" / "template.md").read_text(encoding="utf-8")
    assert '"model_cards/template.md" = "hf_autonorm/hub/template.md"' in (ROOT / "pyproject.toml").read_text()


def test_no_matplotlib_no_plot(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = save_pretrained(tiny_bert(), tmp_path / "model")
    assert "![" not in (folder / "README.md").read_text() and not (folder / "assets").exists()


def test_record_is_json(tmp_path):
    folder = save_pretrained(patch(tiny_net()), tmp_path / "net")
    record = json.loads((folder / "autonorm_config.json").read_text())
    assert record["quant_method"] == "autonorm" and record["patches"][0]["modules"] == ["1", "3"]


def test_a_model_patched_twice(tmp_path):
    """Layers without a gate are no gates, and the calls stand in the order in which they lead to this model again."""
    model = unpatch(tiny_bert())
    patch(model, norm="dyt", include=r".*layer\.0\..*")
    patch(model)
    for folder in ("saved", "again"):
        text = (save_pretrained(model, tmp_path / folder) / "README.md").read_text()
        assert "3 gates: mean weight of the original norm 0.9000" in text and "0 of 3 gates are frozen" in text
        first, second = re.search(r"```text\n(.*?)```", text, re.DOTALL).group(1).splitlines()
        assert first.startswith("patch(model, norm='dyt', include=") and second == "patch(model)"
        model = type(model).from_pretrained(tmp_path / folder)
    fresh = unpatch(tiny_bert())
    for call in (first, second):
        eval(call, {"patch": patch, "model": fresh})
    assert fresh.state_dict().keys() == model.state_dict().keys()


def test_the_card_of_a_model_without_a_patch_does_not_speak_of_one(tmp_path):
    folder = save_pretrained(unpatch(tiny_bert()), tmp_path / "stock")
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL).group(1)
    assert "hf_autonorm" not in code and "AutoModelForSequenceClassification.from_pretrained" in code
