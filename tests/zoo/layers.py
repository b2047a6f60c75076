"""Which layers of a config to keep, so that a shallow model still has every kind of layer."""


def layers_to_keep(fields: dict, depth: int) -> tuple[list[int], dict]:
    """The layers that show each distinct kind of layer once (2 to 6), and every per-layer list cut to them."""
    per_layer = {k: v for k, v in fields.items() if _is_per_layer(k, v, depth)}
    if not per_layer:
        return [], {}
    kinds: dict[tuple, int] = {}
    for i in range(depth):
        # a list of many different numbers grades the layers instead of telling kinds apart
        telling = (
            (k, v[i]) for k, v in sorted(per_layer.items()) if isinstance(v[i], (str, bool)) or len(set(v)) <= 3
        )
        kinds.setdefault(tuple(telling), i)
    keep = sorted(kinds.values())[:6]
    keep = sorted(keep + [i for i in range(depth) if i not in keep][: max(0, 2 - len(keep))])
    return keep, {k: type(v)(v[i] for i in keep) for k, v in per_layer.items()}


_PER_STAGE = {"out_indices", "out_features", "stage_names", "depths", "embed_dims", "num_heads", "image_size"}


def _is_per_layer(name: str, value: object, depth: int) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != depth or depth < 2:
        return False
    if name in _PER_STAGE or name.startswith("_") or name.endswith("_sizes") or "stride" in name:
        return False
    return all(isinstance(e, (str, int, float, bool, type(None))) for e in value)
