"""Tiny patched models of many families: pushed by one process, loaded by another one through every door that applies.

python -m tests.hub.families FOLDER    # in a fresh process with an empty cache: load, compare bits, print JSON
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.zoo import build, build_timm, float_outputs, run_forward

WORDS = ["[PAD]", "[UNK]", "a", "b", "c"]


class Family(NamedTuple):
    """A model of the zoo (transformers model type and head, or a timm architecture), its patch and its doors."""

    name: str
    head: str
    patch: dict[str, Any]
    doors: tuple[str, ...]  # classes of transformers; or "pipeline:TASK", "ours", "sentence_transformers"

    @property
    def repo(self) -> str:
        return f"me/{self.name}-{self.head}".replace("_", "-")


IMAGES = "AutoModelForImageClassification"
BOTH = {"linear": "affine_like", "branches": ["dyt", "rms_norm"]}
FAMILIES = [
    Family("bert", "seq_cls", {}, ("AutoModelForSequenceClassification", "ours", "pipeline:text-classification")),
    Family("distilbert", "masked_lm", BOTH, ("AutoModelForMaskedLM", "ours")),
    Family("roberta", "token_cls", {"norm": "dyt", "strength": 0.5}, ("AutoModelForTokenClassification", "ours")),
    Family("gpt2", "causal_lm", {"norm": None, "linear": "norm_like"}, ("AutoModelForCausalLM", "ours")),
    Family("llama", "causal_lm", BOTH, ("AutoModelForCausalLM", "ours")),
    Family("gemma2", "causal_lm", {"norm": "rms_norm"}, ("AutoModelForCausalLM", "ours")),
    Family("t5", "seq2seq_lm", {"linear": "affine_like"}, ("AutoModelForSeq2SeqLM", "ours")),
    Family("bart", "seq_cls", {"norm": "dyt"}, ("AutoModelForSequenceClassification", "ours")),
    Family("vit", "image_cls", {"conv": "norm_like"}, (IMAGES, "ours", "pipeline:image-classification")),
    Family("convnext", "image_cls", {"conv": "affine_like"}, (IMAGES, "ours")),
    Family("test_vit", "timm_wrapper", {}, (IMAGES, "ours")),
    Family("whisper", "speech_seq2seq", {"conv": "norm_like"}, ("AutoModelForSpeechSeq2Seq", "ours")),
    Family("wav2vec2", "ctc", {"linear": "norm_like"}, ("AutoModelForCTC", "ours")),
    Family("test_vit", "timm", {"linear": "affine_like"}, ("ours",)),
    Family("test_convnext", "timm", {"conv": "norm_like"}, ("ours",)),
    Family("bert", "base", {}, ("AutoModel", "ours", "sentence_transformers")),
]  # fmt: skip


def made(family: Family) -> tuple[nn.Module, dict]:
    """The model, not patched, and its inputs."""
    if family.head == "timm":
        return build_timm(family.name)
    if family.head != "timm_wrapper":
        return build(family.name, family.head)
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    model, inputs = build_timm(family.name)
    wrapper = TimmWrapperForImageClassification(TimmWrapperConfig(architecture=family.name, num_labels=3)).eval()
    return wrapper, {"pixel_values": inputs["x"]}


@torch.no_grad()
def trained(model: nn.Module) -> nn.Module:
    """Gates and branches as training might leave them."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "bias_gate" in name or "bias_branches" in name:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def outputs(model: nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    return dict(float_outputs(run_forward(model.eval(), inputs)))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8)


def answer_of(pipeline: Any, task: str, size: int) -> Any:
    from PIL import Image

    return pipeline("a b c" if task.startswith("text") else Image.new("RGB", (size, size), (200, 30, 90)))


def push(folder: Path) -> None:
    """Builds, patches, runs and pushes them; what came out goes into `folder`."""
    import transformers

    from hf_autonorm import patch, push_to_hub

    for family in FAMILIES:
        model, inputs = made(family)
        model = trained(patch(model, **family.patch))
        place = folder / family.repo.split("/")[1]
        place.mkdir()
        result = {"inputs": inputs, "outputs": outputs(model, inputs), "state": model.state_dict(), "answer": None}
        options: dict[str, Any] = {}
        for door in family.doors:
            kind, _, task = door.partition(":")
            if kind == "pipeline":
                size = getattr(model.config, "image_size", 0)
                processor = (
                    tokenizer()
                    if task.startswith("text")
                    else transformers.ViTImageProcessor(size={"height": size, "width": size})
                )
                options["tokenizer"] = processor
                part = {"tokenizer" if task.startswith("text") else "image_processor": processor}
                pipeline = transformers.pipeline(task, model=model, device="cpu", **part)
                result["answer"] = answer_of(pipeline, task, size)
            elif kind == "sentence_transformers":
                options["files_from"], result["answer"] = sentences(model, place)
        torch.save(result, place / "expected.pt")
        push_to_hub(model, family.repo, **options)


def sentences(model: nn.Module, place: Path) -> tuple[Path, torch.Tensor]:
    """(the folder of a SentenceTransformer with this model inside, its embeddings)"""
    from sentence_transformers import SentenceTransformer, models

    source = place / "source"
    model.save_pretrained(source / "bert")
    tokenizer().save_pretrained(source / "bert")
    word = models.Transformer(str(source / "bert"))
    whole = SentenceTransformer(modules=[word, models.Pooling(model.config.hidden_size)], device="cpu")
    whole.save(str(source / "whole"))
    return source / "whole", whole.encode(["a b", "c a b"], convert_to_tensor=True)


def load(folder: Path) -> dict[str, str]:
    """door of a repository → "equal", or what is different"""
    import transformers

    import hf_autonorm

    results = {}
    for family in FAMILIES:
        expected = torch.load(folder / family.repo.split("/")[1] / "expected.pt", weights_only=False)
        for door in family.doors:
            kind, _, task = door.partition(":")
            if kind == "pipeline":
                pipeline = transformers.pipeline(task, model=family.repo, device="cpu")
                size = getattr(pipeline.model.config, "image_size", 0)
                same = answer_of(pipeline, task, size) == expected["answer"]
                results[f"{family.repo} {door}"] = "equal" if same else "another answer"
                continue
            if kind == "sentence_transformers":
                from sentence_transformers import SentenceTransformer

                seen = SentenceTransformer(family.repo, device="cpu").encode(["a b", "c a b"], convert_to_tensor=True)
                same = torch.equal(seen, expected["answer"])
                results[f"{family.repo} {door}"] = "equal" if same else "other embeddings"
                continue
            loader = hf_autonorm.from_pretrained if kind == "ours" else getattr(transformers, kind).from_pretrained
            results[f"{family.repo} {door}"] = compare(loader(family.repo), expected)
    return results


def compare(model: nn.Module, expected: dict[str, Any]) -> str:
    state = model.state_dict()
    if state.keys() != expected["state"].keys():
        return f"other names: {sorted(state.keys() ^ expected['state'].keys())[:3]}"
    different = [name for name, tensor in state.items() if not torch.equal(tensor, expected["state"][name])]
    if different:
        return f"other bits in {different[:3]}"
    seen = outputs(model, expected["inputs"])
    different = [name for name, tensor in expected["outputs"].items() if not torch.equal(seen[name], tensor)]
    return "equal" if not different and seen.keys() == expected["outputs"].keys() else f"other outputs: {different}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(load(Path(sys.argv[1]))))
