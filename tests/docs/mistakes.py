"""Likely mistakes, each with what it says: `docs/errors.md` is written from here.

    python -m tests.docs.mistakes            # writes docs/errors.md anew

A mistake is a line of Python, run as it stands in a namespace of tiny models; the message is the one that comes out.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers import logging as transformers_logging

import hf_autonorm
from hf_autonorm.nn import PointwiseBranch
from hf_autonorm.nn.branches import BRANCHES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"

MISTAKES: dict[str, list[str]] = {
    "Patching": [
        'patch("bert-base-uncased")',
        'patch(model, "LayerNorm")',
        'patch(model, includes=".*attention.*")',
        'patch(model, include="attention")',
        'patch(model, include=["attention.LayerNorm"])',
        'patch(model, include="*.LayerNorm")',
        'patch(model, branches="dyt")',
        'patch(model, branches=["softsign"])',
        'patch(model, gate="softmax")',
        'patch(model, linear="affine-like")',
        'patch(model, None, conv="norm_like")',
        "patch(model, strength=2)",
        'patch(model, config={"norm": "dyt"})',
        "patch(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))",
        "patch(torch.compile(model))",
        "patch(nn.DataParallel(model))",
        'patch(patched, "dyt")',
        'patch(llama, gate=GateConfig(granularity="sequence"))',
        'patch(llama, branches=["dyt", "film"])',
        'patch(get_peft_model(model, LoraConfig(target_modules=["query"])))',
        "unpatch(model)",
    ],
    "Calibrating and looking": [
        "calibrate(model, batches)",
        'calibrate(patched, ["A sentence."])',
        'calibrate(patched, [{"input_ids": [[2, 7, 3]]}])',
        "calibrate(patched, [])",
        "patch(model, calibrate=True)",
        'gates(patch(model, None, linear="affine_like"))',
        "diagnose(model, [])",
    ],
    "Training": [
        "train(model, GateFreezeCallback(freeze_epoch=1))",
        'train(patch(model, "dyt"), GateFreezeCallback(freeze_epoch=1))',
        "train(patched, GateFreezeCallback(freeze_epoch=10))",
        "GateFreezeCallback(freeze_epoch=0)",
        "train(patched, StrengthRampCallback())",
        "t = make_trainer(model, GateFreezeCallback(1))\nt.create_optimizer(); patch(model); t.train()",
    ],
    "Saving, loading, sharing": [
        "patched.load_state_dict(model.state_dict())",
        'from_pretrained("my-net")',
        'from_pretrained("my-nett")',
        'from_pretrained("my-net", model=Net)',
        'from_pretrained("my-net", model=patch(Net()))',
        'from_pretrained("my-net", model=Net(width=16))',
        'AutoModel.from_pretrained("with-my-branch")',
        'save_pretrained(patched, "my-model", metrics={"accuracy": "91 %"})',
        'save_pretrained(patched, "my-model", push_to_hub=True)',
        'push_to_hub(patched, "me/my-model")',
    ],
    "A branch of your own": [
        "@register_branch\nclass Mine(PointwiseBranch): ...",
        'register_branch("dyt")(Mine)',
        'register_branch("mine")(Empty)',
    ],
}

_HEAD = """# When something goes wrong

The mistakes that are easily made, each tried, with what it says: an error before anything is changed, or a
warning. All errors of the package are subclasses of `hf_autonorm.errors.AutoNormError`, and of `ValueError`. (This
page is written by `python -m tests.docs.mistakes`, and a test compares it with what comes out.)

`model` is a `BertForSequenceClassification`, `patched` another one after `patch`, `llama` a causal decoder, `Net` a
module of one's own, saved as `my-net`. `train(model, callback)` stands for
`Trainer(model=model, callbacks=[callback], …).train()` over one epoch.
"""
_TAIL = """
## No error, but not what you wanted

| what you see | why, and what to do |
|---|---|
| `patch(norm_layer)` changed nothing | a bare norm comes back wrapped: `layer = patch(layer)` |
| transformers warns `Unknown quantization type, got autonorm` | `import hf_autonorm` before `from_pretrained`; what was loaded is not the patched model |
| the model got much worse | it is uncalibrated: `calibrate(model, batches)`, or begin at `strength=0.0` and ramp |
| the gates stay at 0.9 | they move slowly (in 63 steps hardly at all, see [results](results.md)): watch them with `GateFreezeCallback(rule="never")`; from scratch begin at `GateConfig(init_norm_weight=0.5)` |
| a norm is not in the table of `gates` | `print(plan(model))` says why it was left alone |
| PEFT says `Target module AffineLike(…) is not supported` | name the layer inside: `target_modules=["query.original"]` |
"""  # noqa: E501


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


class Mine(PointwiseBranch):
    def curve(self, z: torch.Tensor) -> torch.Tensor:
        return torch.sin(z)


class Empty(PointwiseBranch):
    pass


def _bert() -> nn.Module:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=32, **size))


def _llama() -> nn.Module:
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **size))


def _trainer(model: nn.Module, callback: Any) -> Trainer:
    rows = [{"input_ids": torch.arange(2, 10), "labels": torch.tensor(i % 2)} for i in range(4)]
    settings = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "num_train_epochs": 1}
    return Trainer(model=model, args=TrainingArguments("run", **settings), train_dataset=rows, callbacks=[callback])


def _namespace(line: str) -> dict[str, Any]:
    """What a line sees; models are made anew for each."""
    from peft import LoraConfig, get_peft_model

    names = {name: getattr(hf_autonorm, name) for name in hf_autonorm.__all__}
    names |= {"AutoModel": AutoModel, "LoraConfig": LoraConfig, "get_peft_model": get_peft_model}
    names |= {"nn": nn, "torch": torch, "PointwiseBranch": PointwiseBranch, "Net": Net, "Mine": Mine, "Empty": Empty}
    names |= {"make_trainer": _trainer, "train": lambda model, callback: _trainer(model, callback).train()}
    models = {"model": _bert, "patched": lambda: hf_autonorm.patch(_bert()), "llama": _llama}
    names |= {name: make() for name, make in models.items() if name in line}
    return names | {"batches": [{"input_ids": torch.arange(2, 10)[None]}]}


@contextlib.contextmanager
def _scene() -> Iterator[None]:
    """A folder with the saved models of the lines, no network, no token, quiet libraries."""
    from huggingface_hub import constants

    level, before = transformers_logging.get_verbosity(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder, mock.patch("huggingface_hub.get_token", return_value=None):
        os.chdir(folder)
        transformers_logging.set_verbosity_error()
        try:
            hf_autonorm.save_pretrained(hf_autonorm.patch(Net()), "my-net", card=False)
            hf_autonorm.register_branch("mine")(Mine)
            hf_autonorm.save_pretrained(hf_autonorm.patch(_bert(), branches=["mine"]), "with-my-branch", card=False)
            del BRANCHES["mine"]
            with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
                yield
        finally:
            BRANCHES.pop("mine", None)
            transformers_logging.set_verbosity(level)
            os.chdir(before)


def outcome(line: str) -> str:
    """`ErrorClass: message` or `UserWarning: message` of a line; an empty string where nothing is said."""
    from huggingface_hub import constants

    offline = "push_to_hub(patched" not in line  # for this one the token is what is missing
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(constants, "HF_HUB_OFFLINE", offline):
        warnings.simplefilter("always", UserWarning)
        try:
            exec(line, _namespace(line))
        except Exception as error:
            return f"{type(error).__name__}: {_shown(str(error))}"
    return next((f"UserWarning: {w.message}" for w in caught if _is_ours(w)), "")


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return warning.category is UserWarning and any(
        word in str(warning.message) for word in ("Callback", "PEFT", "patch")
    )


def _shown(message: str) -> str:
    """Without what depends on other libraries' versions: torch lists every missing key before the remedy, the Hub's
    client has its own words for what it did not find."""
    message = message.split(" Cannot find an appropriate cached")[0]
    lines = message.split("\n\t")
    return message if len(lines) == 1 else f"{lines[0]} … {lines[-1].strip()}"


def page() -> str:
    parts = [_HEAD]
    with _scene():
        for heading, lines in MISTAKES.items():
            parts.append(f"\n## {heading}\n\n| what was written | what it says |\n|---|---|\n")
            parts += [f"| {_code(line)} | {_code(outcome(line))} |\n" for line in lines]
    return "".join(parts) + _TAIL


def _code(text: str) -> str:
    return "<br>".join(f"`` {line} ``".replace("|", "\\|") for line in text.splitlines())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
