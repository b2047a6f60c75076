"""AutoNorm-S: the gates are watched, and frozen by a rule."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..config import in_range
from ..decision import describe
from ..errors import ConfigError, NotPatchedError
from ..nn.autonorm import AutoNorm, autonorms
from ..patching.record import wrappers
from .base import NOT_PATCHED, Resumable, require_in_optimizer

RULES = ("paper", "always", "never", "converged")
SCOPES = ("model", "layer")


class GateFreezeCallback(Resumable):
    """AutoNorm-S: at the end of an epoch, decides by the gates' entropy whether to freeze them (arXiv 2607.10593).

    Logs `gate_entropy` (nats, mean over layers and tokens), `gate_entropy_normalized` (over log(K+1)),
    `gate_norm_weight` (the original norm's mean weight) and `gates_frozen` beside the loss. With `rule="never"` it
    only logs.

    A frozen selector is bit-constant: it receives a zero gradient (`requires_grad` stays, flipping it crashes DDP),
    and its gradients are dropped before each optimizer step, after clipping, so that neither momentum nor decay
    moves it.

    Args:
        freeze_epoch: the decision falls at the end of this epoch (1 is the first).
        entropy_threshold: in nats.
        rule: "paper": freeze if the entropy is still at or above the threshold; "always"; "never"; "converged":
            freeze as soon as it has fallen below, checked at the end of this epoch and of every later one.
        scope: "model": one decision by the mean over all layers; "layer": each layer by its own entropy.
        freeze_step: an optimizer step instead of the epoch, for data without a known length ("converged" checks at
            each multiple of it).

    Attributes after training:
        decision: None, or {"frozen": names, "entropy": …, "epoch": …, "step": …, "rule": …, "threshold": …}. Where
            `load_best_model_at_end` went back to before the freeze, "frozen" is what the loaded model has, "decided"
            what had been frozen, "best" the checkpoint.
        history: one entry an epoch: {"epoch", "step", "strength", "layers": {name: {"weights": […], "entropy": …}}}.
    """

    _attributes = ("decision", "history", "sums", "count")

    def __init__(
        self,
        freeze_epoch: int | None = None,
        entropy_threshold: float = 0.1,
        rule: str = "paper",
        scope: str = "model",
        freeze_step: int | None = None,
    ) -> None:
        if freeze_epoch is not None and freeze_step is not None:
            raise ConfigError(f"freeze_epoch={freeze_epoch} and freeze_step={freeze_step}: give one of them")
        if freeze_epoch is None and freeze_step is None:
            freeze_epoch = 10
        for name, value in (("freeze_epoch", freeze_epoch), ("freeze_step", freeze_step)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number ≥ 1")
        if rule not in RULES:
            raise ConfigError(f"rule={rule!r} is unknown; choose one of {', '.join(RULES)}")
        if scope not in SCOPES:
            raise ConfigError(f"scope={scope!r} is unknown; choose one of {', '.join(SCOPES)}")
        in_range("entropy_threshold", entropy_threshold, 0.0, math.inf)
        self.freeze_epoch, self.freeze_step = freeze_epoch, freeze_step
        self.entropy_threshold, self.rule, self.scope = entropy_threshold, rule, scope
        self._reset()

    def arguments(self) -> dict[str, Any]:
        return {
            "freeze_epoch": self.freeze_epoch,
            "entropy_threshold": self.entropy_threshold,
            "rule": self.rule,
            "scope": self.scope,
            "freeze_step": self.freeze_step,
        }

    def _reset(self) -> None:
        self.decision: dict[str, Any] | None = None
        self.history: list[dict[str, Any]] = []
        self._layers: list[tuple[str, AutoNorm]] = []
        self._running: torch.Tensor | None = None  # Σ of statistics since the last decision window began
        self._running_count = 0
        self._since_log: torch.Tensor | None = None
        self._since_log_count = 0
        self._loaded_sums: list[list[float]] | None = None

    # The running sums as JSON: a run resumed in the middle of an epoch decides as the unbroken one does.

    @property
    def sums(self) -> list[list[float]] | None:
        return self._loaded_sums if self._running is None else self._running.tolist()

    @sums.setter
    def sums(self, value: list[list[float]] | None) -> None:
        self._loaded_sums = value

    @property
    def count(self) -> int:
        return self._running_count

    @count.setter
    def count(self, value: int) -> None:
        self._running_count = value

    # --- events ----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        layers = _learning_gates(kwargs["model"])
        require_in_optimizer(kwargs["model"], kwargs.get("optimizer"))
        if not any(p.requires_grad for _, layer in layers for p in layer.bias_gate.parameters()):
            warnings.warn(
                "GateFreezeCallback: no gate is trainable, so freezing changes nothing. LoRA freezes what it does not "
                "adapt: name the norms in its modules_to_save, or set requires_grad of the gates",
                stacklevel=2,
            )
        if self.freeze_epoch is not None and self.rule != "never" and not _has_length(kwargs.get("train_dataloader")):
            raise ConfigError(
                f"freeze_epoch={self.freeze_epoch}, but the training data has no length, so no epochs; use freeze_step"
            )
        self._warn_if_too_late(args, state, kwargs.get("train_dataloader"))
        self._reset()
        resumed = self.restore(state)
        self._layers = layers
        if self._loaded_sums is not None:
            self._running = torch.tensor(self._loaded_sums, dtype=torch.float64, device=layers[0][1].statistics.device)
        if resumed and self.freeze_epoch is not None and abs(state.epoch - round(state.epoch)) < 1e-6:
            # A checkpoint of an epoch's last step was written before that epoch's end was reached.
            self._end_epoch(state, round(state.epoch))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._accumulate()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._accumulate()
        if self.freeze_step is not None and state.global_step % self.freeze_step == 0:
            self._end_window(state, state.global_step // self.freeze_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.freeze_epoch is not None and _has_length(kwargs.get("train_dataloader")):
            self._end_epoch(state, math.floor(state.epoch + 1e-6))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            return
        # What was brought back may be from before the freeze.
        frozen = [name for name, layer in self._layers if layer.scalar("frozen")]
        if self.decision is not None and set(frozen) != set(self.decision["frozen"]):
            decided, best = self.decision["frozen"], state.best_model_checkpoint
            self.decision |= {"decided": decided, "frozen": frozen, "best": best}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for _, layer in self._layers:
            layer.drop_frozen_gradients()

    def beside(self, state: TrainerState, logs: dict[str, Any]) -> dict[str, float]:
        if "loss" not in logs or not self._since_log_count:
            return {}
        mean = (self._since_log / self._since_log_count).mean(0)
        entropy = mean[-1].item()
        choices = max(layer.bias_gate.choices for _, layer in self._layers)
        values = {
            "gate_entropy": entropy,
            "gate_entropy_normalized": entropy / math.log(choices),
            "gate_norm_weight": mean[0].item(),
            "gates_frozen": sum(layer.scalar("frozen") for _, layer in self._layers) / len(self._layers),
        }
        self._since_log, self._since_log_count = None, 0
        return {name: round(value, 6) for name, value in values.items()}

    def _warn_if_too_late(self, args: TrainingArguments, state: TrainerState, batches: Any) -> None:
        last = {"step": float(state.max_steps)}
        if _has_length(batches) and batches is not None and len(batches):
            steps = -(-len(batches) // args.gradient_accumulation_steps)  # of one epoch
            last["epoch"] = state.max_steps / steps  # Trainer's own count is rounded up
        for unit, value in (("epoch", self.freeze_epoch), ("step", self.freeze_step)):
            end = last.get(unit, 0.0)
            if value is not None and self.rule != "never" and 0 < end < value:
                warnings.warn(
                    f"GateFreezeCallback: freeze_{unit}={value}, but the run ends with {unit} {end:.3g}: no decision "
                    f"will fall. Give {_remedy(unit, end)}, or rule='never' to log the gates alone",
                    stacklevel=3,
                )

    # --- the decision ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _accumulate(self) -> None:
        rows = torch.stack([_padded(layer.statistics, self._layers) for _, layer in self._layers]).double()
        rows = _mean_over_processes(rows)
        self._running = rows if self._running is None else self._running + rows
        self._since_log = rows if self._since_log is None else self._since_log + rows
        self._running_count += 1
        self._since_log_count += 1

    def _end_epoch(self, state: TrainerState, epoch: int) -> None:
        self._end_window(state, epoch - self.freeze_epoch + 1 if epoch >= self.freeze_epoch else 0)

    def _end_window(self, state: TrainerState, check: int) -> None:
        """check: 0: too early; 1: the moment of the rule; more: later ones, which "converged" looks at too."""
        if not self._running_count:
            return
        means = (self._running / self._running_count).tolist()
        self._running, self._running_count, self._loaded_sums = None, 0, None
        self.history.append(
            {
                "epoch": state.epoch,
                "step": state.global_step,
                "strength": self._layers[0][1].scalar("strength"),
                "layers": {
                    name: {"weights": row[: layer.bias_gate.choices], "entropy": row[-1]}
                    for (name, layer), row in zip(self._layers, means)
                },
            }
        )
        if check == 1 or (check > 1 and self.rule == "converged"):
            self._decide(state, [row[-1] for row in means])

    def _decide(self, state: TrainerState, entropies: list[float]) -> None:
        mean = sum(entropies) / len(entropies)
        chosen = [
            (name, layer)
            for (name, layer), entropy in zip(self._layers, entropies)
            if self._says_freeze(entropy if self.scope == "layer" else mean) and not layer.scalar("frozen")
        ]
        for _, layer in chosen:
            layer.freeze()
        if chosen or self.decision is None:
            self.decision = {
                "frozen": [name for name, layer in self._layers if layer.scalar("frozen")],
                "layers": len(self._layers),
                "entropy": mean,
                "epoch": state.epoch,
                "step": state.global_step,
                "rule": self.rule,
                "threshold": self.entropy_threshold,
            }
            state.log_history.append(
                {"gate_decision": dict(self.decision), "epoch": state.epoch, "step": state.global_step}
            )

    def _says_freeze(self, entropy: float) -> bool:
        if self.rule in ("always", "never"):
            return self.rule == "always"
        return entropy >= self.entropy_threshold if self.rule == "paper" else entropy < self.entropy_threshold

    def describe(self) -> str:
        """The decision in one sentence, for logs and cards."""
        return describe(self.decision)


def _learning_gates(model: torch.nn.Module) -> list[tuple[str, AutoNorm]]:
    # PEFT's `modules_to_save` keeps the unadapted norm beside the one that runs and learns.
    layers = [
        (name, layer)
        for name, layer in autonorms(model)
        if layer.bias_gate.learns and "original_module" not in name.split(".")
    ]
    if layers:
        return layers
    if wrappers(model) and all(layer.replaces for _, layer in autonorms(model)):
        raise NotPatchedError(
            "there is no gate to freeze: the patch replaces modules (norm='dyt', linear=…), it does not weigh them. "
            "Leave GateFreezeCallback out, or patch with norm='autonorm'"
        )
    if autonorms(model):
        raise NotPatchedError(
            "the model's gates are fixed or random: there is nothing to freeze, leave GateFreezeCallback out"
        )
    raise NotPatchedError(NOT_PATCHED)


def _remedy(unit: str, end: float) -> str:
    return f"at most {math.floor(end)}" if end >= 1 else "freeze_step instead"


def _padded(statistics: torch.Tensor, layers: list[tuple[str, AutoNorm]]) -> torch.Tensor:
    """[w₀ … w_K, 0 …, H]: rows of equal length where layers have different numbers of branches."""
    longest = max(layer.statistics.numel() for _, layer in layers)
    missing = longest - statistics.numel()
    return torch.cat([statistics[:-1], statistics.new_zeros(missing), statistics[-1:]]) if missing else statistics


def _mean_over_processes(rows: torch.Tensor) -> torch.Tensor:
    """Every rank sees other tokens; the decision must be the same on all (and rank 0's checkpoint must know it)."""
    from accelerate import PartialState
    from accelerate.utils import reduce

    return reduce(rows, reduction="mean") if PartialState().num_processes > 1 else rows


def _has_length(dataloader: Any) -> bool:
    try:
        return dataloader is None or len(dataloader) >= 0
    except TypeError:
        return False
