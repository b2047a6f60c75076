"""Every guarantee of a patch, checked on one model: the sweep runs it over all architectures, the tests over a sample.

Each check returns nothing or raises AssertionError with what is wrong. A property that the unpatched model itself does
not have (an output that differs from run to run, a checkpoint that does not reload) is not asked of the patched one;
the result says so under "not asked".
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_autonorm import from_pretrained, patch, plan, save_pretrained, set_strength, unpatch
from hf_autonorm.errors import NoMatchError
from hf_autonorm.nn import Wrapper

SETTINGS: dict[str, dict[str, Any]] = {
    "norm": {"norm": "autonorm"},
    "norm+linear": {"norm": "autonorm", "linear": "affine_like"},
    "conv": {"norm": None, "conv": "affine_like"},
}

MODES = ((False, "eval"), (True, "train"))


@dataclass
class Verdict:
    """What one patch did to one model."""

    targets: int = 0
    patched: int = 0
    left_alone: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    not_asked: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Run:
    """One forward (and backward) of a model from a fixed seed."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    called: set[str]


class Subject:
    """One model under test with what it did before it was patched."""

    def __init__(self, make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
        self.make = make
        self.model, self.inputs = make()

    def run(self, train: bool, names: dict[nn.Module, str], seed: int = 0) -> Run:
        """Outputs, gradients by parameter name (train only), and which of the named modules were called."""
        model = self.model.train(train)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        buffers = {buffer: buffer.clone() for buffer in model.buffers()}
        try:
            with calls(names) as called, torch.set_grad_enabled(train):
                outputs = tensors(model(**copied(self.inputs)))
                if train:
                    loss = sum(t.float().square().mean() for t in outputs if t.requires_grad)
                    if isinstance(loss, Tensor):
                        loss.backward()
        finally:  # BatchNorm remembers every training forward
            with torch.no_grad():
                for buffer, value in buffers.items():
                    buffer.copy_(value)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if train and p.grad is not None}
        model.zero_grad(set_to_none=True)
        return Run([t.detach() for t in outputs], gradients, set(called))


def check(make: Callable[[], tuple[nn.Module, dict[str, Any]]], setting: str, only: set[str] | None = None) -> Verdict:
    """Runs every guarantee for one of SETTINGS on the model that `make` builds.

    only: names of checks to run, for looking into a failure.
    """
    fields = SETTINGS[setting]
    verdict = Verdict()
    subject = Subject(make)
    try:
        rows = plan(subject.model, **fields)
    except NoMatchError as error:  # a rule that this model has nothing for is refused, loudly
        verdict.left_alone = {str(error).rsplit(": ", 1)[-1]: 1}
        return verdict
    verdict.targets, verdict.patched = len(rows), len(rows.patched)
    verdict.left_alone = dict(Counter(row.reason for row in rows.left_alone))
    if not rows.patched:
        with contextlib.suppress(NoMatchError):
            patch(subject.model, **fields)
            verdict.failures["nothing to patch"] = "patch did not raise NoMatchError"
        return verdict
    modules = dict(subject.model.named_modules(remove_duplicate=False))
    originals = {modules[row.name]: row.name for row in rows.patched}
    before, again = {}, {}
    for train, label in MODES:
        try:
            before[train], again[train] = subject.run(train, originals), subject.run(train, originals)
        except Exception as error:  # some want labels to train, some change in place what their backward needs
            verdict.not_asked.append(f"{label}: the unpatched model fails ({type(error).__name__})")
    state = {k: v.clone() for k, v in subject.model.state_dict().items()}
    decays = _decay_names(subject.model)
    identities = {name: id(m) for name, m in subject.model.named_modules(remove_duplicate=False)}

    random_state = torch.get_rng_state()
    model = subject.model = patch(subject.model, **fields, strength=0.0)
    _try(verdict, "random state", lambda: _same(random_state, torch.get_rng_state()), only)
    wrappers = {m: name for name, m in model.named_modules() if isinstance(m, Wrapper)}
    _try(verdict, "plan", lambda: _equal(sorted(wrappers.values()), sorted(row.name for row in rows.patched)), only)

    for train, label in MODES:
        if train not in before:
            continue
        reproducible = _equal_runs(before[train], again[train])
        if not reproducible:
            verdict.not_asked.append(f"strength 0 in {label}: the unpatched model differs from run to run")
            continue
        _try(verdict, f"strength 0 in {label}", lambda t=train: _exact(subject, wrappers, before[t], t), only)
    _try(verdict, "weight decay", lambda: _exempt(model, decays), only)

    set_strength(model, 1.0)
    for train, label in MODES:
        if train not in before:
            continue
        _try(verdict, f"strength 1 in {label}", lambda t=train: _live(subject, wrappers, before[t], t), only)
    if only is None or "reload" in only:
        reload = _reload_question(subject, verdict)
        if reload is not None:
            _try(verdict, "reload", reload, only)
    _try(verdict, "unpatch", lambda: _undone(subject, identities, state, before[False], again[False]), only)
    return verdict


def _try(verdict: Verdict, name: str, ask: Callable[[], None], only: set[str] | None) -> None:
    if only is not None and name not in only:
        return
    try:
        ask()
    except Exception as error:  # any failure is a result here
        verdict.failures[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if only is not None:
            raise


# --- the guarantees --------------------------------------------------------------------------------------------------


def _exact(subject: Subject, wrappers: dict[nn.Module, str], before: Run, train: bool) -> None:
    """At strength 0: outputs, and gradients of the old parameters, bit for bit; the same modules are called."""
    now = subject.run(train, wrappers)
    assert len(now.outputs) == len(before.outputs), f"{len(before.outputs)} outputs became {len(now.outputs)}"
    for index, (old, new) in enumerate(zip(before.outputs, now.outputs)):
        assert _bits_equal(old, new), f"output {index} differs by {(old.float() - new.float()).abs().max():.3g}"
    for name, old in before.gradients.items():
        new = now.gradients.get(_patched_name(name, wrappers.values()))
        assert new is not None and _bits_equal(old, new), f"gradient of {name} differs"
    missing = before.called - now.called
    assert not missing, f"not called: {sorted(missing)[:3]} ({len(missing)} in all)"


def _live(subject: Subject, wrappers: dict[nn.Module, str], before: Run, train: bool) -> None:
    """At strength 1: it runs, is finite where the original was, calls what that called, every parameter learns."""
    now = subject.run(train, wrappers)
    for index, (old, new) in enumerate(zip(before.outputs, now.outputs)):
        if old.isfinite().all():
            assert new.isfinite().all(), f"output {index} is not finite"
    missing = before.called - now.called
    assert not missing, f"not called: {sorted(missing)[:3]} ({len(missing)} in all)"
    if not train:
        return
    lost = [n for n in before.gradients if _patched_name(n, wrappers.values()) not in now.gradients]
    assert not lost, f"no gradient any more: {lost[:3]} ({len(lost)} in all)"
    for wrapper, name in wrappers.items():
        had = any(f"{name}.{own}" in before.gradients for own, _ in wrapper.original.named_parameters())
        weightless = not any(True for _ in wrapper.original.parameters())
        if name in now.called and (had or (weightless and now.gradients)):
            for own, _ in wrapper.named_parameters():
                if not own.startswith("original.") and f"{name}.{own}" not in now.gradients:
                    raise AssertionError(f"no gradient: {name}.{own}")
            assert all(p.dim() > 0 for p in wrapper.parameters()), f"0-dimensional parameter in {name}"


def _exempt(model: nn.Module, decays: set[str]) -> None:
    """What a stock Trainer exempts from weight decay stays exempt, what is new is exempt, what decayed decays."""
    # Under every name of a shared module: Trainer lists them all.
    every = [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Wrapper)]
    expected = {_patched_name(name, every) for name in decays}
    now = _decay_names(model)
    assert now == expected, f"differs: {sorted(now ^ expected)[:4]}"


def _reload_question(subject: Subject, verdict: Verdict) -> Callable[[], None] | None:
    """Asks for an equal reload, unless the unpatched model does not reload equally either."""
    probe, inputs = subject.make()
    try:
        with tempfile.TemporaryDirectory() as folder:
            plain = _saved_and_loaded(probe, subject, folder, stock=True)
            old, new = _eval(probe, inputs), _eval(plain, inputs)
            fine = len(old) == len(new) and all(_close(a, b) for a, b in zip(old, new))
    except Exception as error:
        verdict.not_asked.append(f"reload: the unpatched model does not ({type(error).__name__})")
        return None
    if not fine:
        verdict.not_asked.append("reload: the unpatched model's output differs after it")

    def ask() -> None:
        with tempfile.TemporaryDirectory() as folder:
            loaded = _saved_and_loaded(subject.model, subject, folder, stock=False)
            mine, theirs = subject.model.state_dict(), loaded.state_dict()
            assert mine.keys() == theirs.keys(), f"keys differ: {sorted(mine.keys() ^ theirs.keys())[:4]}"
            for key in mine:
                assert mine[key].dtype == theirs[key].dtype, f"dtype of {key} differs"
                assert _bits_equal(mine[key], theirs[key]), f"{key} differs"
            if fine:
                old, new = _eval(subject.model, subject.inputs), _eval(loaded, subject.inputs)
                for index, (a, b) in enumerate(zip(old, new)):
                    assert _close(a, b), f"output {index} differs by {(a.float() - b.float()).abs().max():.3g}"

    return ask


def _saved_and_loaded(model: nn.Module, subject: Subject, folder: str, stock: bool) -> nn.Module:
    if hasattr(model, "save_pretrained") and hasattr(model, "config"):
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).to(next(model.parameters()).dtype).eval()
    if stock:
        fresh = subject.make()[0]
        fresh.load_state_dict(model.state_dict())
        return fresh.eval()
    save_pretrained(model, folder)
    fresh = subject.make()[0]
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    return from_pretrained(folder, model=fresh).eval()


def _undone(subject: Subject, identities: dict[str, int], state: dict[str, Tensor], before: Run, again: Run) -> None:
    """After `unpatch`: the same objects under the same names, the same state, the same output."""
    model = subject.model = unpatch(subject.model)
    now = {name: id(m) for name, m in model.named_modules(remove_duplicate=False)}
    assert now == identities, f"modules differ: {sorted(now.keys() ^ identities.keys())[:4]}"
    after = model.state_dict()
    assert list(after) == list(state), f"state dict keys differ: {sorted(after.keys() ^ state.keys())[:4]}"
    if _equal_runs(before, again):
        outputs = subject.run(False, {}).outputs
        assert all(_bits_equal(a, b) for a, b in zip(before.outputs, outputs)), "output differs"


# --- small things ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def calls(names: dict[nn.Module, str]) -> Iterator[set[str]]:
    """Collects which modules' forward runs. Without hooks: any hook makes fused paths step aside, hiding a bypass."""
    called: set[str] = set()

    def watch(module: nn.Module, name: str) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return inner(*args, **kwargs)

        module.forward = forward

    own = {module: vars(module).get("forward") for module in names}
    for module, name in names.items():
        watch(module, name)
    try:
        yield called
    finally:
        for module, forward in own.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def tensors(output: Any) -> list[Tensor]:
    """All floating tensors in a model's output, in order."""
    from tests.zoo import float_outputs

    return [t for _, t in float_outputs(output)]


def copied(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, their tensors cloned: some models write into them."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _eval(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(model.eval()(**copied(inputs)))


def _patched_name(name: str, wrapped_names: Iterable[str]) -> str:
    """A parameter's name after its module was wrapped."""
    for wrapped in sorted(wrapped_names, key=len, reverse=True):
        if wrapped == "" or name.startswith(wrapped + "."):
            return f"{wrapped}.original.{name.removeprefix(wrapped + '.')}".removeprefix(".")
    return name


def _decay_names(model: nn.Module) -> set[str]:
    """As Trainer decides it."""
    from transformers import Trainer

    return set(Trainer.get_decay_parameter_names(None, model))


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b) or _equal_with_nan(a, b))


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _equal_runs(a: Run, b: Run) -> bool:
    outputs = len(a.outputs) == len(b.outputs) and all(_bits_equal(x, y) for x, y in zip(a.outputs, b.outputs))
    same_gradients = a.gradients.keys() == b.gradients.keys()
    return outputs and same_gradients and all(_bits_equal(v, b.gradients[k]) for k, v in a.gradients.items())


def _same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a, b), "the global random state changed"


def _equal(a: Any, b: Any) -> None:
    assert a == b, f"{a} != {b}"


warnings.filterwarnings("ignore", message=".*flash_attn.*")
