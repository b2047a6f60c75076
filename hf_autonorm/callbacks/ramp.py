"""Walking a model from its present strength to another while it trains."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..config import in_range
from ..errors import ConfigError, NotPatchedError
from ..patching.record import wrappers
from .base import NOT_PATCHED, Resumable, require_in_optimizer


class StrengthRampCallback(Resumable):
    """Walks the strength λ linearly from its present value to `end` over the share `ratio` of the optimizer steps.

    Each patched module begins at its own strength: of a model patched twice, what is at `end` already stays there.

    Args:
        end: the strength at the end, in [0, 1].
        ratio: share of all steps after which it is reached, in (0, 1].
    """

    _attributes = ("starts",)

    def __init__(self, end: float = 1.0, ratio: float = 0.6) -> None:
        in_range("end", end, 0.0, 1.0)
        in_range("ratio", ratio, 0.0, 1.0)
        if ratio == 0:
            raise ConfigError("ratio=0 is no ramp; to change the strength at once call set_strength(model, …)")
        self.end, self.ratio = end, ratio
        self.starts: list[float] = []  # of the wrappers, in the model's order

    def arguments(self) -> dict[str, Any]:
        return {"end": self.end, "ratio": self.ratio}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        found = wrappers(kwargs["model"])
        if not found:
            raise NotPatchedError(NOT_PATCHED)
        require_in_optimizer(kwargs["model"], kwargs.get("optimizer"))
        added = [p for _, wrapper in found for p in wrapper.new_parameters()]
        if added and not any(p.requires_grad for p in added):
            warnings.warn(
                "StrengthRampCallback: no parameter of the patch is trainable, so what the ramp brings in does not "
                "learn. LoRA freezes what it does not adapt: name the norms in its modules_to_save",
                stacklevel=2,
            )
        self.starts = []
        if not self.restore(state) or len(self.starts) != len(found):
            self.starts = [wrapper.scalar("strength") for _, wrapper in found]
            if set(self.starts) == {self.end}:
                warnings.warn(
                    f"StrengthRampCallback: the strength is {self.end:g} already, so there is nothing to ramp; begin "
                    f"elsewhere: patch(model, strength={0.0 if self.end else 1.0}) or set_strength(model, …)",
                    stacklevel=2,
                )
        self._set(state, kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._set(state, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        strengths = [wrapper.scalar("strength") for _, wrapper in wrappers(kwargs["model"])]
        farthest = max(strengths, key=lambda strength: abs(strength - self.end))
        if abs(farthest - self.end) > 1e-6:
            best = args.load_best_model_at_end and state.best_model_checkpoint
            why = f"{best}, the best one, is from before that" if best else "training ended before that"
            warnings.warn(
                f"StrengthRampCallback: the model is at strength {farthest:.3g}, not at the ramp's end of "
                f"{self.end:g}: {why}. Keep it as it is, or call set_strength(model, {self.end:g}) and score it anew",
                stacklevel=2,
            )

    def beside(self, state: TrainerState, logs: dict[str, Any]) -> dict[str, float]:
        if "loss" not in logs:
            return {}
        strengths = self._strengths(state)
        return {"strength": sum(strengths) / len(strengths)}

    def _strengths(self, state: TrainerState) -> list[float]:
        share = min(1.0, state.global_step / max(1.0, self.ratio * state.max_steps))
        return [self.end if share == 1 else start + (self.end - start) * share for start in self.starts]

    def _set(self, state: TrainerState, model: torch.nn.Module) -> None:
        for (_, wrapper), strength in zip(wrappers(model), self._strengths(state), strict=True):
            wrapper.set_scalar("strength", strength)
