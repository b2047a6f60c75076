"""Calibration: a pretrained model survives the patch (no training, a few batches, forward passes only)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, NotPatchedError
from ..nn.affine import Correction
from ..nn.autonorm import AutoNorm, valid_tokens
from ..nn.wrapper import Wrapper, outside_inference_mode
from ..tables import AsTable
from .batches import as_batches, attention_mask, first_input, forward
from .fit_branch import FitRow, fit_autonorm
from .fit_gain import RunningR2, fit_gain, tune_gains, valid_rows
from .lockstep import Lockstep
from .record import wrappers

FEW_TOKENS = 500  # each channel has a scale and a shift of its own to fit


@dataclass
class CalibrationReport(AsTable):
    """What `calibrate` did. Drift is the mean cosine, over valid positions, between the model's and the original's
    output at full strength: 1 is the original."""

    rows: list[FitRow] = field(default_factory=list)
    cosine_before: float = float("nan")
    cosine_after: float = float("nan")
    never_called: list[str] = field(default_factory=list)
    too_few_tokens: list[str] = field(default_factory=list)  # called, but with less than two finite, unmasked tokens

    def table(self):
        """A `rich.table.Table`."""
        from rich.table import Table

        table = Table(
            title=f"cosine with the original's output, on these batches: {self.cosine_before:.4f} → "
            f"{self.cosine_after:.4f}"
        )
        left_out = {
            "not called on these batches, and not fitted": self.never_called,
            "called with less than two finite tokens, and not fitted": self.too_few_tokens,
        }
        said = [f"{why}: {', '.join(names)}" for why, names in left_out.items() if names]
        fewest = min((row.tokens for row in self.rows if row.tokens is not None), default=None)
        if fewest is not None and fewest < FEW_TOKENS:
            said.append(f"fitted on {fewest} tokens, which is few: give a few hundred texts or images")
        table.caption = "\n".join(said) or None
        shown = [name for name in ("alpha", "gain") if any(getattr(row, name) is not None for row in self.rows)]
        for column in ("module", "branch", "R²", *({"alpha": "α", "gain": "gain"}[name] for name in shown)):
            table.add_column(column, justify="left" if column in ("module", "branch") else "right", overflow="fold")
        for row in self.rows:
            numbers = (getattr(row, name) for name in shown)
            cells = ("" if number is None else f"{number:.4g}" for number in numbers)
            table.add_row(row.name or "(the model itself)", row.branch, f"{row.r2:.4f}", *cells)
        return table


@outside_inference_mode
def calibrate(model: nn.Module, batches: Iterable[Any]) -> CalibrationReport:
    """Fits the patch to the original, layer after layer, in forward passes only.

    Each pointwise branch gets the α (by a one-dimensional search) and the per-channel scale and shift (in closed
    form) that come closest, in least squares, to what the original model computes at this layer, given the input
    that the layers fitted before it produce. Padding is left out (by `attention_mask`), the sums are in float64. The
    selectors' first layers are scaled to the size of their inputs. The function at λ = 0 does not change, nor does
    the random state.

    The gain of each affine-like or norm-like layer is fitted the same way; then all gains are tuned together, for the
    model's output (32 steps; the one part that runs backward, for the gains alone).

    Args:
        model: a patched model.
        batches: dictionaries (`model(**batch)`), tensors, or the tuples of an ordinary DataLoader: the first part is
            the input, labels are left out (what counts as labels: `patching/batches.py`). All are held at once, with
            one output per patched layer: some hundred sentences are plenty.

    Returns a CalibrationReport: R² per layer and the drift of the model's output before and after.

    Raises:
        NotPatchedError: nothing is patched.
        ConfigError: a batch is none (text, say), is ambiguous, or has nothing in it to fit on.
    """
    found = wrappers(model)
    if not found:
        raise NotPatchedError(f"{type(model).__name__} holds no patched module; call patch(model) first")
    batches = list(as_batches(batches))
    if not batches:
        raise ConfigError("calibrate got no batch; pass an iterable of model inputs, e.g. [tokenizer(texts, …)]")
    masks = [valid_tokens(attention_mask(model, batch)) for batch in batches]
    before = {wrapper: wrapper.scalar("strength") for _, wrapper in found}
    fitted_before = [(t, t.detach().clone()) for _, wrapper in found for t in _added_tensors(wrapper)]
    with undisturbed(model), torch.no_grad():
        try:
            _set_strength(found, 0.0)
            kept, originals = _keep_outputs(model, found, batches)
            _set_strength(found, 1.0)
            uncalibrated = [forward(model, batch) for batch in batches]
            report = CalibrationReport(cosine_before=_cosine(originals, uncalibrated, masks))
            fitted = _fit_in_lockstep(model, found, batches, masks, kept, report)
            if not report.rows:
                raise ConfigError(
                    "calibrate found nothing to fit on: in these batches no patched module was called with two or "
                    "more finite, unmasked tokens. Pass real inputs of the model, e.g. [tokenizer(texts, …)]"
                )
            # A model that was itself made in inference mode has no gradients to tune by.
            learns = not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
            if learns and any(isinstance(wrapper, Correction) for _, wrapper in found):
                fitted = _tune_gains(model, found, batches, masks, kept, originals, report)
        except BaseException:
            for tensor, value in fitted_before:
                tensor.copy_(value)
            raise
        finally:
            for wrapper, strength in before.items():
                wrapper.set_scalar("strength", strength)
    report.cosine_after = _cosine(originals, fitted, masks)
    fitted_names = {row.name for row in report.rows}
    called = {wrapper for calls in kept for wrapper in calls}
    report.never_called = [name for name, w in found if w not in called]
    report.too_few_tokens = [name for name, w in found if w in called and name not in fitted_names]
    order = {name: i for i, (name, _) in enumerate(found)}
    report.rows.sort(key=lambda row: order[row.name])
    return report


# --- passes ----------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """One call of one layer in the original's pass over one batch."""

    x: Tensor | None  # kept only where a layer is called more than once
    y: Tensor


def _keep_outputs(model: nn.Module, found: list[tuple[str, Wrapper]], batches: list[Any]):
    """(for each batch, the calls of each wrapper; the model's outputs), with every wrapper at strength 0."""
    kept: list[dict[Wrapper, list[_Call]]] = []

    def keep(wrapper: Wrapper, args: tuple, kwargs: dict, output: Tensor) -> None:
        x = first_input(args, kwargs)
        # Copies: the model may go on in place (a convolution and a ReLU).
        kept[-1].setdefault(wrapper, []).append(_Call(x.detach().clone(), output.detach().clone()))

    handles = [w.register_forward_hook(keep, with_kwargs=True) for _, w in found]
    outputs = []
    try:
        for batch in batches:
            kept.append({})
            outputs.append(forward(model, batch))
            for calls in kept[-1].values():
                if len(calls) == 1:
                    calls[0].x = None
    finally:
        for handle in handles:
            handle.remove()
    return kept, outputs


def _fit_in_lockstep(model, found, batches, masks, kept, report: CalibrationReport) -> list[Any]:
    """The second pass: fits each wrapper when the pass reaches it. Returns the model's outputs, all layers fitted."""
    lockstep = Lockstep()
    names = {wrapper: name for name, wrapper in found}

    def meet(wrapper: Wrapper, args: tuple, kwargs: dict) -> None:
        x = first_input(args, kwargs)
        index = lockstep.current_index
        holder = getattr(wrapper, "mask_holder", None)
        mask = None if holder is None else holder.mask
        lockstep.meet(wrapper, (index, x.detach()))
        if holder is not None:
            holder.mask = mask  # other passes have run in between

    def deal(wrapper: Wrapper, payloads: list[tuple[int, Tensor]]) -> None:
        pairs = []  # (input, wanted output, mask)
        for index, x in payloads:
            calls = kept[index].get(wrapper)
            if not calls:  # the patched model takes another way than the original (experts): nothing to compare with
                continue
            inputs = [x, *(call.x for call in calls[1:])]  # later calls of a shared layer: the original's inputs
            pairs += [(value, call.y, masks[index]) for value, call in zip(inputs, calls)]
        if isinstance(wrapper, Correction):
            fit = fit_gain(wrapper, pairs)
            if fit is not None:
                r2, gain = fit
                report.rows.append(FitRow(names[wrapper], wrapper.form, r2, None, gain))
        elif isinstance(wrapper, AutoNorm):
            pairs = [(x, y, mask) for x, y, mask in pairs if x.shape == y.shape]
            if pairs:
                xs, ys = (
                    torch.cat([valid_rows(pair[side], wrapper.channel_axis, pair[2]) for pair in pairs])
                    for side in (0, 1)
                )
                report.rows += fit_autonorm(wrapper, names[wrapper], xs, ys)

    handles = [w.register_forward_pre_hook(meet, with_kwargs=True) for _, w in found]
    try:
        return lockstep.run([functools.partial(forward, model, batch) for batch in batches], deal)
    finally:
        for handle in handles:
            handle.remove()


def _tune_gains(model, found, batches, masks, kept, originals, report: CalibrationReport) -> list[Any]:
    """A third sweep, over the gains alone, which then says anew how close each layer comes. Returns the outputs."""
    names = {wrapper: name for name, wrapper in found if isinstance(wrapper, Correction)}
    tune_gains(
        list(names), lambda i: main_output(forward(model, batches[i])), [main_output(o) for o in originals], masks
    )
    calls: list[tuple[Wrapper, Tensor]] = []
    handles = [w.register_forward_hook(lambda w, args, y: calls.append((w, y.clone()))) for w in names]
    sums: dict[Wrapper, RunningR2] = {}
    outputs = []
    try:
        for batch, mask, wanted in zip(batches, masks, kept):
            outputs.append(forward(model, batch))
            for wrapper in names:
                mine = [y for w, y in calls if w is wrapper]
                for y, call in zip(mine, wanted.get(wrapper, [])):
                    if y.shape == call.y.shape:
                        sums.setdefault(wrapper, RunningR2()).add(
                            *(valid_rows(t, wrapper.channel_axis, mask) for t in (y, call.y))
                        )
            calls.clear()
    finally:
        for handle in handles:
            handle.remove()
    fits = {names[w]: FitRow(names[w], w.form, s.value(), None, w.scalar("gain")) for w, s in sums.items()}
    report.rows = [fits.get(row.name, row) for row in report.rows]
    return outputs


def _added_tensors(wrapper: Wrapper) -> list[Tensor]:
    inside = {id(t) for t in (*wrapper.original.parameters(), *wrapper.original.buffers())}
    return [t for t in (*wrapper.parameters(), *wrapper.buffers()) if id(t) not in inside]


def _set_strength(found: list[tuple[str, Wrapper]], strength: float) -> None:
    for _, wrapper in found:
        wrapper.set_scalar("strength", strength)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's mode and the random state as they were after it."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(devices=[]):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def main_output(output: Any) -> Tensor | None:
    """The first floating tensor of a model's output that has positions or classes (skips a scalar loss)."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.dim() >= 2 else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    return next((t for t in map(main_output, values) if t is not None), None)


def _cosine(references: list[Any], outputs: list[Any], masks: list[Tensor | None]) -> float:
    """Mean cosine over valid positions between the main outputs of two models."""
    total, count = 0.0, 0
    for reference, output, mask in zip(references, outputs, masks):
        a, b = main_output(reference), main_output(output)
        if a is None or b is None or a.shape != b.shape:
            continue
        a, b = valid_rows(a, -1, mask), valid_rows(b, -1, mask)
        similarity = nn.functional.cosine_similarity(a, b, dim=-1)
        total, count = total + similarity.sum().item(), count + len(similarity)
    return total / count if count else float("nan")
