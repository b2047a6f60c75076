"""The variants that runs compare: each is a patch configuration and nothing else.

`patch` holds `PatchConfig` fields and `gate` those of its `GateConfig`. A learned gate is watched by a
`GateFreezeCallback`: `freeze="never"` only logs it, `freeze="rule"` is AutoNorm-S, by the rule of the run's settings.
"""

from dataclasses import dataclass, field

from hf_autonorm import GateConfig, GateFreezeCallback, PatchConfig, StrengthRampCallback, patch


@dataclass(frozen=True)
class Variant:
    patch: dict | None = field(default_factory=dict)  # None: the model stays as it is
    gate: dict = field(default_factory=dict)
    freeze: str | None = None


VARIANTS = {
    "ln": Variant(patch=None),  # the model's own norms, whatever they are
    "dyt": Variant({"norm": "dyt"}),
    "derf": Variant({"norm": "derf"}),
    "dyisru": Variant({"norm": "dyisru"}),
    "rms_norm": Variant({"norm": "rms_norm"}),
    "adanorm": Variant({"norm": "adanorm"}),
    "film": Variant({"norm": "film"}),
    "random": Variant(gate={"kind": "random"}),
    "autonorm": Variant(freeze="never"),
    "autonorm_s": Variant(freeze="rule"),
    "autonorm_softmax": Variant(gate={"kind": "softmax"}, freeze="never"),
    "autonorm_hard": Variant(gate={"kind": "hard"}, freeze="never"),
    "affine_like": Variant({"norm": None, "linear": "affine_like"}),
    "norm_like": Variant({"norm": None, "linear": "norm_like"}),
}


def apply_variant(model, args, batches: list[dict], seed: int) -> tuple:
    """Patches `model` as `args` (`VariantArguments`) say; returns the model and the callbacks that go with it."""
    variant = VARIANTS[args.variant]
    if variant.patch is None:
        return model, []
    gate = GateConfig(**{"init_norm_weight": args.init_norm_weight} | variant.gate)
    config = PatchConfig(**{"norm": "autonorm", "strength": args.strength, "seed": seed} | variant.patch, gate=gate)
    model = patch(model, config=config, calibrate=batches or None)
    callbacks = []
    if args.strength_ramp_ratio is not None:
        callbacks.append(StrengthRampCallback(end=1.0, ratio=args.strength_ramp_ratio))
    if variant.freeze is not None:
        rule = args.freeze_rule if variant.freeze == "rule" else "never"
        callbacks.append(
            GateFreezeCallback(freeze_epoch=args.freeze_epoch, entropy_threshold=args.entropy_threshold, rule=rule)
        )
    return model, callbacks
