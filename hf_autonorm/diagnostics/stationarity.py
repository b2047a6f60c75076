"""Whether adaptation can pay: do the norms' inputs stand still while the gates learn (arXiv 2607.10593)?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..callbacks import GateFreezeCallback, LogsBesideLoss
from ..config import in_range
from ..errors import ConfigError, UnsupportedError
from ..nn.autonorm import autonorms
from ..patching.batches import first_input
from ..tables import AsTable
from .dytness import norms_of


@dataclass
class StationarityReport(AsTable):
    """What a run showed, and the advice it implies.

    drift: one entry for each epoch after the first: {"epoch", "mean", "layers": {name: drift}}.
    moved: mean |norm weight at the end − in the first epoch|; None where no gate was watched.
    distance: for each epoch, the largest |norm weight then − at the end| of any gate: what freezing then would have
        fixed differently.
    """

    drift: list[dict[str, Any]] = field(default_factory=list)
    moved: float | None = None
    distance: dict[float, float] = field(default_factory=dict)
    advice: str = ""

    def table(self):
        """A `rich.table.Table`, one line an epoch."""
        from rich.table import Table

        table = Table(title="Input drift of the norms, and how far the gates were from where they ended")
        for title in ("epoch", "mean drift", "largest drift", "gates' distance to the end"):
            table.add_column(title, justify="right")
        drift = {entry["epoch"]: entry for entry in self.drift}
        for epoch in sorted({*drift, *self.distance}):
            entry = drift.get(epoch)
            numbers = [entry["mean"], max(entry["layers"].values())] if entry else [None, None]
            cells = ("" if n is None else f"{n:.4f}" for n in (*numbers, self.distance.get(epoch)))
            table.add_row(f"{epoch:g}", *cells)
        table.caption = self.advice
        return table


class StationarityCallback(LogsBesideLoss):
    """Watches the inputs of every norm, patched or not, from epoch to epoch.

    The drift of a norm between two epochs is the distance of its input's channel means and standard deviations,
    sqrt(Σ (μ − μ′)² + (σ − σ′)²) (2-Wasserstein, between Gaussians without correlations), over sqrt(Σ μ′² + σ′²): 0 is
    no change, 1 a change as large as the inputs are. Logged beside the loss as `norm_input_drift`, the mean over
    norms. Statistics are summed in fp32 on the device, padding included, over every `every`-th step.

    After a resume the first epoch has nothing to be compared with, and is left out.

    Args:
        every: look at each n-th optimizer step.
        tolerance: a mean drift below it counts as standing still.

    Attributes after training: `drift`, see StationarityReport; `selectors`, {epoch: parameters of the gates then}.
    """

    def __init__(self, every: int = 5, tolerance: float = 0.05) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every={every!r} must be a whole number ≥ 1")
        in_range("tolerance", tolerance, 0.0, math.inf)
        self.every, self.tolerance = every, tolerance
        self._reset()

    def _reset(self) -> None:
        self.drift: list[dict[str, Any]] = []
        self.selectors: dict[float, dict[str, dict[str, Tensor]]] = {}
        self._sums: dict[str, Tensor] = {}  # (3, channels): count, Σx, Σx² of this epoch
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # (μ, σ) of the epoch before
        self._handles: list[Any] = []
        self._watching = False
        self._to_log: float | None = None

    # --- events ----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._remove()
        self._reset()
        norms = list(norms_of(kwargs["model"]))
        if not norms:
            raise UnsupportedError(f"{type(kwargs['model']).__name__} holds no norm to watch")
        for name, module, _, axis in norms:
            hook = self._hook(name, axis)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watching = state.global_step % self.every == 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watching = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        epoch = round(state.epoch, 6)
        now = {name: _moments(sums) for name, sums in self._sums.items()}
        self._sums = {}
        layers = {name: _distance(now[name], self._before[name]) for name in now if name in self._before}
        if layers:
            mean = sum(layers.values()) / len(layers)
            self.drift.append({"epoch": epoch, "mean": mean, "layers": layers})
            self._to_log = mean
        self._before = now
        self.selectors[epoch] = {
            name: {key: value.detach().cpu().clone() for key, value in layer.bias_gate.state_dict().items()}
            for name, layer in autonorms(kwargs["model"])
            if layer.bias_gate.learns
        }

    def beside(self, state: TrainerState, logs: dict[str, Any]) -> dict[str, float]:
        drift, self._to_log = self._to_log, None
        return {} if drift is None else {"norm_input_drift": round(drift, 6)}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str, axis: int):
        def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._watching and module.training:
                x = first_input(args, kwargs).detach()
                rows = x.movedim(axis, -1).flatten(0, -2).float()
                sums = torch.stack([torch.full_like(rows[0], len(rows)), rows.sum(0), rows.square().sum(0)])
                self._sums[name] = self._sums[name] + sums if name in self._sums else sums

        return look

    # --- what it means ---------------------------------------------------------------------------------------------

    def report(self, gates: GateFreezeCallback | None = None) -> StationarityReport:
        """Drift, movement of the gates (from the history of `gates`) and the advice that follows."""
        history = [] if gates is None else gates.history
        weights = [{name: entry["weights"][0] for name, entry in step["layers"].items()} for step in history]
        report = StationarityReport(drift=self.drift)
        if len(weights) > 1:
            report.moved = sum(abs(weights[-1][n] - weights[0][n]) for n in weights[0]) / len(weights[0])
            report.distance = {
                round(step["epoch"], 6): max(abs(then[n] - weights[-1][n]) for n in then)
                for step, then in zip(history, weights)
            }
        report.advice = self._advice(report)
        return report

    def _advice(self, report: StationarityReport) -> str:
        if not report.drift:
            return "Fewer than two epochs were watched: train longer to see whether the inputs stand still."
        last = report.drift[-1]["mean"]
        still = last < self.tolerance
        inputs = f"In the last epoch the norms' inputs {'stood still' if still else 'drifted'} ({last:.3f})"
        if report.moved is None:
            return f"{inputs}. No gate was watched: pass report(gates=…) the GateFreezeCallback of the run."
        settled = [epoch for epoch, distance in report.distance.items() if distance < 0.01]
        if report.moved < 0.01:
            return (
                f"{inputs}; the gates hardly moved ({report.moved:.4f}). Freezing at any epoch would have left them "
                "where they are: freeze at once and fold, or give the gates a larger learning rate."
            )
        when = f"from epoch {settled[0]:g} on they were within 0.01 of their end" if settled else "they never settled"
        if still:
            return (
                f"{inputs} and the gates moved ({report.moved:.3f}); {when}. Exploring pays: freeze after they settle."
            )
        return (
            f"{inputs} while the gates moved ({report.moved:.3f}); {when}. They follow inputs that change under them: "
            "freeze early, or train until the inputs stand still before judging the gates."
        )

    @contextlib.contextmanager
    def gates_of(self, model: nn.Module, epoch: float) -> Iterator[nn.Module]:
        """`model` with its gates as they were at the end of `epoch`, and all else as it is: evaluated inside, it tells
        to first order what freezing then would have changed. The gates are put back at the end."""
        if epoch not in self.selectors:
            known = ", ".join(f"{e:g}" for e in self.selectors)
            raise ConfigError(f"no gates were kept for epoch {epoch!r}; there are those of {known or 'no epoch'}")
        layers = dict(autonorms(model))
        then = self.selectors[epoch]
        now = {name: {k: v.clone() for k, v in layers[name].bias_gate.state_dict().items()} for name in then}
        try:
            for name, state in then.items():
                layers[name].bias_gate.load_state_dict(state)
            yield model
        finally:
            for name, state in now.items():
                layers[name].bias_gate.load_state_dict(state)


def _moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """(μ, σ) by channel, over all processes, on the CPU in float64."""
    from accelerate import PartialState
    from accelerate.utils import reduce

    if PartialState().num_processes > 1:
        sums = reduce(sums, reduction="sum")
    count, first, second = sums.double().cpu()
    mean = first / count
    return mean, (second / count - mean.square()).clamp(min=0).sqrt()


def _distance(now: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> float:
    gap, size = ((a.square().sum() + b.square().sum()).sqrt().item() for a, b in (
        (now[0] - before[0], now[1] - before[1]), before,
    ))  # fmt: skip
    return gap / size if size > 0 else 0.0
