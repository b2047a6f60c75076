"""The moving average of a model's weights, which is what a run with `--ema_decay` evaluates and saves."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

FILE = "ema.safetensors"


class EmaCallback(TrainerCallback):
    """average <- decay · average + (1 − decay) · weights, after each optimizer step, from the first weights on.

    Weights are averaged, buffers (the strength of a patch, whether a gate is frozen) are those of the model. Each
    evaluation is of the average; checkpoints keep the weights that training goes on from, and the average beside them.
    After training the model holds the average.

    Args:
        decay: between 0 and 1; the average is over some 1 / (1 − decay) steps.
        checkpoint: the folder that the run resumes from.
    """

    def __init__(self, decay: float, checkpoint: str | None = None) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema_decay={decay} must be at least 0 and below 1.")
        self.update, self.checkpoint = get_ema_multi_avg_fn(decay), checkpoint
        self.average: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] | None = None  # of training, while the model holds the average

    def on_train_begin(self, args, state, control, model=None, **kwargs) -> None:
        if args.load_best_model_at_end:
            raise ValueError("ema_decay averages the whole run: leave load_best_model_at_end out.")
        self.average, self.weights = copied(model), None
        if self.checkpoint is not None:
            file = Path(self.checkpoint, FILE)
            if not file.is_file():
                raise ValueError(f"{self.checkpoint} has no {FILE}: that run had no ema_decay.")
            put(self.average, load_file(file))

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        weights = dict(model.named_parameters())
        self.update(list(self.average.values()), [weights[name].detach() for name in self.average], None)
        self.show_average(model, control)

    def on_epoch_end(self, args, state, control, model=None, **kwargs) -> None:
        self.show_average(model, control)

    def show_average(self, model, control) -> None:
        if control.should_evaluate and self.weights is None:  # an evaluation follows
            self.weights = copied(model)
            put(dict(model.named_parameters()), self.average)

    def on_evaluate(self, args, state, control, model=None, **kwargs) -> None:
        if self.weights is not None:
            put(dict(model.named_parameters()), self.weights)
            self.weights = None

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            save_file(self.average, folder / f"{FILE}.tmp")
            (folder / f"{FILE}.tmp").rename(folder / FILE)

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        put(dict(model.named_parameters()), self.average)


def copied(model) -> dict[str, torch.Tensor]:
    """One entry a parameter, tied ones once."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@torch.no_grad()
def put(into: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    if into.keys() != values.keys():
        raise ValueError(f"The average of other weights: {sorted(into.keys() ^ values.keys())[:5]} …")
    for name, weight in into.items():
        weight.copy_(values[name])
