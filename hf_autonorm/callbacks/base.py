"""What the callbacks share: values beside the loss, a state that survives a break, what an optimizer must hold."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.training_args import TrainingArguments

from ..errors import ConfigError
from ..patching.record import wrappers

NOT_PATCHED = (
    "the model that Trainer trains holds no patched layer. With model_init, patch inside it: "
    "Trainer(model_init=lambda: patch(make_model()))"
)


class LogsBesideLoss(TrainerCallback):
    """A callback that adds values to Trainer's logs, for the trackers (`report_to`) to see as well.

    Trainer puts its trackers before the callbacks it is given, so they would have sent a log before we add to it;
    and it has no place for a callback that wants to come first. So the order is mended when training begins.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        frame = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        if frame is not None:  # a new list: the handler is walking through the old one
            handler = frame.f_locals["self"]
            handler.callbacks = sorted(handler.callbacks, key=_rank)

    def beside(self, state: TrainerState, logs: dict[str, Any]) -> dict[str, float]:
        """What to add to these logs; nothing for logs that are not ours to add to."""
        raise NotImplementedError

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None:
            return
        values = self.beside(state, logs)
        logs.update(values)
        # Into the history too: Trainer has copied the logs there before the callbacks run.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)


def _rank(callback: TrainerCallback) -> int:
    return 0 if isinstance(callback, DefaultFlowCallback) else 1 if isinstance(callback, LogsBesideLoss) else 2


class Resumable(LogsBesideLoss, ExportableState):
    """A callback whose constructor arguments and running state travel in `trainer_state.json`.

    Trainer writes the state, but gives it back only if asked to; so it is read here when a run resumes.
    """

    _attributes: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return {"args": self.arguments(), "attributes": {name: getattr(self, name) for name in self._attributes}}

    def restore(self, state: TrainerState) -> bool:
        """Takes over what a checkpoint of this callback saved; whether there was one."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step > 0 else None
        entries = saved if isinstance(saved, list) else [saved] if saved else []
        for entry in entries:
            if entry["args"] == self.arguments():
                for name in self._attributes:
                    setattr(self, name, entry["attributes"][name])
                return True
        if entries:
            warnings.warn(
                f"{type(self).__name__}: the checkpoint's run had other settings, {entries[0]['args']}; what it noted "
                "until then is not taken over. Give the same settings to go on",
                stacklevel=4,
            )
        return False


def require_in_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """Raises ConfigError where the optimizer holds the model's parameters, but none that the patch added."""
    if optimizer is None:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    added = [p for _, wrapper in wrappers(model) for p in wrapper.new_parameters() if p.requires_grad]
    if added and any(id(p) in held for p in model.parameters()) and not any(id(p) in held for p in added):
        raise ConfigError(
            f"the optimizer holds none of the {len(added)} trainable parameters that the patch added: was it made "
            "before patch? Make it (or the Trainer) after it; to keep them as they are, set requires_grad to False"
        )
