"""Find out how each model type builds and which inputs it takes.

    python -m tests.zoo.discover                  # try what has no recipe yet, keep the rest
    python -m tests.zoo.discover --only bert,t5   # these model types, afresh
    python -m tests.zoo.discover --all            # everything, afresh

Writes `recipes.json` and `unbuilt.json` after every model type, so that it can be stopped and started again.
"""

import argparse
import itertools
import json
import re
import time

import torch
from torch import nn
from transformers import PreTrainedConfig

from . import media
from .build import RECIPES, UNBUILT, float_outputs, make_config, make_model, quiet, recipes, run_forward, unbuilt
from .draw import Draw
from .heads import heads_of, model_class, transformers_names
from .inputs import candidates, forward_arguments, make_inputs
from .rules import STRATEGIES, Strategy
from .sizes import Sizes

MOST_PARAMETERS = 64_000_000


class NoRecipe(Exception):
    """Nothing that was tried works; the message is the likeliest reason."""


def discover(name: str, head: str, seconds: float = 15) -> str:
    """The first recipe "strategy|input label" whose model builds, runs and gives floats without NaN."""
    end = time.monotonic() + seconds
    reasons: list[str] = []
    for strategy in STRATEGIES.values():
        try:
            _refuse_large(name, head, strategy)
            model, config = make_model(name, head, strategy)
        except ImportError as error:
            raise NoRecipe(_short("build", error)) from error
        except Exception as error:  # noqa: BLE001 (any error only means: not this way)
            reasons.append(_short("build", error))
            continue
        label = None
        for label in candidates(name, model, config):
            if time.monotonic() > end:
                raise NoRecipe(reasons[0] if reasons else f"forward: no inputs found in {seconds:.0f} s")
            try:
                return f"{strategy.name}|{_try(name, label, model, config)}"
            except Exception as error:  # noqa: BLE001
                reasons.append(_short("forward", error))
        if label is None:
            reasons.append("forward: it takes no argument that the zoo knows how to fill")
    raise NoRecipe(next((r for r in reasons if r.startswith("forward")), reasons[0]))


def _try(name: str, label: str, model: nn.Module, config: PreTrainedConfig) -> str:
    """The label, completed, if the forward takes its inputs."""
    kind = label.partition(":")[0]
    if kind in ("image", "audio"):
        label = f"{label}*{_placeholders(kind, label, model, config)}"
    floats = float_outputs(run_forward(model, make_inputs(name, label, model, config)))
    if not floats:
        raise ValueError("no float tensor in the output")
    if nan := [path for path, tensor in floats if tensor.isnan().any()]:
        raise ValueError(f"NaN in {', '.join(nan[:4])}")
    return label


def _placeholders(kind: str, label: str, model: nn.Module, config: PreTrainedConfig) -> int:
    """How many placeholder tokens the media takes, read off the error that a wrong number raises."""
    sizes, arguments, n = Sizes(model, config), forward_arguments(model), 4
    variant = media.variants(kind, sizes, arguments)[label.partition(":")[2]]
    for _ in range(4):
        draw = Draw(0, f"{label}*{n}")
        try:
            run_forward(model, media.with_text(kind, variant(draw), n, sizes, arguments, draw))
            return n
        except Exception as error:
            found = re.search(r"tokens:? ?\d+[,;]? (?:and )?features:? ?(?:torch.Size\(\[)?(\d+)", str(error))
            found = found or re.search(r"\(?\d+\)? (?:image|audio|placeholder)[\w ]*tokens.*?(\d+)", str(error))
            if found is None:
                raise
            wanted = int(found[1])
            if wanted == n or wanted > 1024:  # some messages count elements, not tokens
                wanted //= model.get_input_embeddings().weight.shape[-1]
            if wanted == n or not 0 < wanted <= 2048:
                raise
            n = wanted
    raise ValueError("no number of placeholders fits")


def _refuse_large(name: str, head: str, strategy: Strategy) -> None:
    with quiet():
        config = make_config(name, head, strategy)
    try:
        with torch.device("meta"), quiet():
            model = model_class(name, head)._from_config(config, dtype=torch.float32)
    except Exception:
        if strategy.shallow:  # full-size widths: unseen they could fill the memory
            raise
        return
    n = sum(p.numel() for p in model.parameters())
    if n > MOST_PARAMETERS:
        raise ValueError(f"{n / 1e6:.0f}M parameters with strategy {strategy.name}")


def _short(stage: str, error: Exception) -> str:
    text = re.sub(r"/\S*/(site-packages|lib)/", "", " ".join(str(error).split()))
    return f"{stage}: {type(error).__name__}: {text[:160]}"


def save(found: dict[str, dict[str, str]], failed: dict[str, dict[str, str]]) -> None:
    """Both files, one model type a line, in the order of `transformers_names`."""
    order = {n: i for i, n in enumerate(transformers_names(components=True))}
    grouped = {}
    for name, by_head in found.items():
        pairs = sorted(by_head.items(), key=lambda pair: (pair[1], heads_of(name).index(pair[0])))
        grouped[name] = {r: " ".join(h for h, _ in p) for r, p in itertools.groupby(pairs, key=lambda pair: pair[1])}
    for path, data in ((RECIPES, grouped), (UNBUILT, failed)):
        lines = [f"{json.dumps(n)}: {json.dumps(data[n])}" for n in sorted(data, key=order.__getitem__) if data[n]]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, with commas between")
    parser.add_argument("--all", action="store_true", help="also what has a recipe or a reason")
    parser.add_argument("--retry", action="store_true", help="also what has a reason")
    parser.add_argument("--seconds", type=float, default=15, help="after which no further inputs are tried on a head")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {n: dict(by_head) for n, by_head in recipes().items()}
    failed: dict[str, dict[str, str]] = {}
    for (name, head), reason in unbuilt().items():
        failed.setdefault(name, {})[head] = reason
    for name in options.only.split(",") if options.only else transformers_names(components=True):
        afresh = options.all or bool(options.only)
        known, reasons = found.setdefault(name, {}), failed.setdefault(name, {})
        todo = [h for h in heads_of(name) if afresh or not (h in known or (h in reasons and not options.retry))]
        for head in todo:
            known.pop(head, None), reasons.pop(head, None)
            try:
                known[head] = discover(name, head, options.seconds)
            except NoRecipe as error:
                reasons[head] = str(error)
            print(name, head, known.get(head) or reasons[head], flush=True)
        if todo:
            save(found, failed)


if __name__ == "__main__":
    main()
