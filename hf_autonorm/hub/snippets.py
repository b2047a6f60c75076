"""The Python lines of a model card that load the model; they run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from ..patching.record import wrappers

_IMPORT = "import hf_autonorm  # makes stock `from_pretrained` know the patch\n"
_LOAD = """import torch

{ours}from transformers import {names}

path = "{path}"  # the folder, or the model's id on the Hub
{processor_name} = {processor}.from_pretrained(path)
model = {cls}.from_pretrained(path).eval()
{inputs}
with torch.no_grad():
    outputs = model(**inputs)
print({shown})"""

_STOCK = """{ours}from transformers import {cls}

model = {cls}.from_pretrained("{path}").eval()  # the folder, or the model's id on the Hub
print(model)"""

_BARE = """import hf_autonorm

model = hf_autonorm.from_pretrained("{path}")  # the folder, or the model's id on the Hub
print(model)"""


def snippet(model: nn.Module, folder: Path, path: str) -> str | None:
    """Lines that load the model of this folder; None for a module whose class only its author has."""
    import transformers

    from .saving import is_timm, is_transformers

    if is_timm(model):
        return _BARE.format(path=path)
    if not is_transformers(model):
        return None
    ours = _IMPORT if wrappers(model) else ""
    cls, kind = auto_class(type(model).__name__), getattr(model, "main_input_name", None)
    decoder_inputs = getattr(model.config, "is_encoder_decoder", False)
    if kind == "input_ids" and not decoder_inputs and (folder / "tokenizer_config.json").exists():
        processor, processor_name = "AutoTokenizer", "tokenizer"
        inputs = 'inputs = tokenizer("A sentence to try it on.", return_tensors="pt")'
    elif kind == "pixel_values" and (folder / "preprocessor_config.json").exists():
        processor, processor_name = "AutoImageProcessor", "processor"
        inputs = 'inputs = processor(Image.new("RGB", (640, 480)), return_tensors="pt")'
    else:
        return (_STOCK if hasattr(transformers, cls) else _BARE).format(path=path, cls=cls, ours=ours)
    shown = "outputs.logits" if re.search(r"For[A-Z]|LMHead", type(model).__name__) else "outputs[0]"
    names = ", ".join(sorted({cls, processor}))
    text = _LOAD.format(
        names=names, path=path, processor_name=processor_name, processor=processor, cls=cls, inputs=inputs,
        shown=shown, ours=ours,
    )  # fmt: skip
    return text.replace("import torch\n", "import torch\nfrom PIL import Image\n", 1) if "Image.new" in text else text


def auto_class(name: str) -> str:
    """`BertForTokenClassification` → `AutoModelForTokenClassification`; the own name where no auto class fits."""
    import transformers

    ending = re.search(r"For[A-Z]\w*$", name)
    if ending and hasattr(transformers, "AutoModel" + ending.group(0)):
        return "AutoModel" + ending.group(0)
    if name.endswith("LMHeadModel"):
        return "AutoModelForCausalLM"
    return "AutoModel" if re.fullmatch(r"[A-Za-z0-9]+Model", name) else name
