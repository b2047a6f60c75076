"""The small value of one config field, told by its name and its neighbours.

A `Strategy` says how hard to shrink. Most model types take "uniform", which sets every width to the same small number;
the few whose fields depend on each other in ways that no name tells are divided by a ratio or only made shallow.
"""

from dataclasses import dataclass

from .fields import EXPERT_WIDTH, EXPERTS, EXPERTS_PER_TOKEN, HEAD_WIDTH, HEADS, INNER_WIDTH, KV_HEADS, LAYERS, WIDTH

VOCAB, DEPTH, HIDDEN, N_HEADS = 512, 2, 64, 4
HEAD_DIM = HIDDEN // N_HEADS
IMAGE, PATCH = 64, 8


@dataclass(frozen=True)
class Strategy:
    """How a config is made small. `derive`: fields that default to None are left to the config's own arithmetic."""

    name: str
    mode: str
    derive: bool = True
    ratio: int = 8
    keep_heads: bool = False

    @property
    def shallow(self) -> bool:
        """Only the layers are fewer; widths and image size stay."""
        return self.mode == "layers"


STRATEGIES = {
    s.name: s
    for s in (
        Strategy("uniform", "uniform"),
        Strategy("uniform-all", "uniform", derive=False),
        Strategy("ratio", "ratio"),
        Strategy("ratio-all", "ratio", derive=False),
        Strategy("ratio-heads", "ratio", ratio=4, keep_heads=True),
        Strategy("layers", "layers"),
        Strategy("layers-all", "layers", derive=False),
    )
}

_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "max_target_positions",
    "max_seq_length",
)
_WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "local_attention",
    "attention_window_size",
)
_IMAGE_SIZES = ("image_size", "pretrain_image_size", "input_image_size", "img_size")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "first_moe_layer")
_QUERIES = ("num_queries", "num_proposals", "num_query_tokens", "num_object_queries", "mm_tokens_per_image")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")

# upper bounds that hold in every strategy
CAPS = {
    "codebook_size": 64,
    "index_topk": 8,
    "num_kv_shared_layers": 1,
    **dict.fromkeys(_WINDOWS, 8),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(EXPERTS_PER_TOKEN, 2),
    **dict.fromkeys(_SHARED_EXPERTS, 1),
    **dict.fromkeys(_DENSE_FIRST, 1),
    **dict.fromkeys(_QUERIES, 16),
}
ROUTING_GROUPS = {"n_group", "topk_group", "num_expert_group", "moe_num_groups"}

# one width per stage of a pyramid
_STAGE_WIDTHS = (
    "hidden_sizes",
    "embed_dims",
    "dims",
    "neck_hidden_sizes",
    "embed_dim",
    "decoder_channels",
    "stage_dims",
)

# what the uniform strategy sets, whatever the value was
UNIFORM = {
    "qk_head_dim": 2 * HEAD_DIM,
    "upsample_groups": HIDDEN,
    "lru_width": HIDDEN,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "time_step_rank": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("mamba_d_ssm", "mamba_d_inner"), 2 * HIDDEN),
    **dict.fromkeys(HEAD_WIDTH, HEAD_DIM),
}
UNIFORM_CAPS = {
    "rotary_dim": HEAD_DIM,
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "d_state"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
}
_STATE_SPACE_HEADS = {"mamba_n_heads", "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads"}


class TokenIds:
    """Renumbers the special token ids of one config tree, so that they fit the small vocabulary."""

    def __init__(self) -> None:
        self._new: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        if token < 20:
            return token
        return self._new.setdefault(token, VOCAB - 2 - len(self._new))


def is_token_id(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_token")) or name == "blank_id"


def shrink_int(name: str, value: int, siblings: dict, strategy: Strategy, tokens: TokenIds) -> int:
    """The small value of the integer field `name` of a config whose fields are `siblings`."""
    if is_token_id(name):
        vocab = siblings.get("vocab_size")
        fits = isinstance(vocab, int) and value < vocab <= VOCAB
        return value if fits else tokens(value)
    if "vocab_size" in name or name in ("n_words", "encoder_hash_byte_group_vocab"):
        return min(value, VOCAB) if value > 30 else value
    if name in LAYERS:
        return min(value, DEPTH)
    if name in _POSITIONS:
        return min(value, 4096 if strategy.shallow else 256)
    if name in CAPS:
        return min(value, CAPS[name])
    if name in ROUTING_GROUPS:
        return 1
    if name == "window_size" and isinstance(siblings.get("depths"), (list, tuple)) and "image_size" in siblings:
        return min(value, 2)
    if strategy.shallow:
        return value
    if name in _IMAGE_SIZES:
        return min(value, IMAGE)
    if name == "patch_size":
        return min(value, PATCH)
    if name in ("chunk_size", "mamba_chunk_size") and value >= 64:
        return 16
    return (_ratio if strategy.mode == "ratio" else _uniform)(name, value, siblings, strategy)


def _ratio(name: str, value: int, siblings: dict, strategy: Strategy) -> int:
    if name in WIDTH | INNER_WIDTH | EXPERT_WIDTH | {"q_lora_rank", "kv_lora_rank", "lru_width"}:
        return max(8, value // strategy.ratio) if value >= 16 else value
    if name in HEADS | KV_HEADS | _STATE_SPACE_HEADS:
        return value if strategy.keep_heads else max(1, value // strategy.ratio)
    if strategy.keep_heads and name in HEAD_WIDTH:
        return max(4, value // strategy.ratio)
    return value


def _uniform(name: str, value: int, siblings: dict, strategy: Strategy) -> int:
    if name in WIDTH | INNER_WIDTH | EXPERT_WIDTH and value <= 32:
        return value
    if name in WIDTH:
        heads = siblings.get("num_heads")
        staged = name == "embed_dim" and isinstance(heads, (list, tuple))
        return 8 * heads[0] if staged else HIDDEN
    if name in INNER_WIDTH:
        return 2 * HIDDEN
    if name in EXPERT_WIDTH:
        return HIDDEN // 2
    if name in HEADS:
        return value if value <= 2 else N_HEADS
    if name in KV_HEADS:
        if value == 1:
            return 1
        multi_head = any(siblings.get(heads) == value for heads in HEADS)
        return N_HEADS if multi_head else N_HEADS // 2
    if name in UNIFORM_CAPS:
        return min(value, UNIFORM_CAPS[name])
    return UNIFORM.get(name, value)


def shrink_list(name: str, value: list | tuple, siblings: dict, strategy: Strategy) -> list | tuple:
    """The small value of a list field; anything but a list of integers stays as it is."""
    kind = type(value)
    if name == "image_grid_pinpoints" and value and not strategy.shallow:
        return kind([[IMAGE, 2 * IMAGE], [2 * IMAGE, IMAGE], [2 * IMAGE, 2 * IMAGE]])
    if not value or not all(type(e) is int for e in value):
        return value
    if name in ("depths", "layer_depths", "num_blocks", "block_depths", "stage_num_blocks", "layers"):
        return kind(min(e, 2) for e in value)
    if strategy.shallow:
        return value
    if name in _IMAGE_SIZES:
        return kind(min(e, IMAGE) for e in value)
    if name == "decoder_in_channels" and strategy.mode == "uniform":
        return kind([HIDDEN] * len(value))
    if name in ("conv_dim", "tdnn_dim"):
        return kind([32] * len(value))
    if name in _STAGE_WIDTHS:
        heads = siblings.get("num_attention_heads") or siblings.get("num_heads")
        return kind(_stage_widths([max(8, e // 4) for e in value], heads))
    return value


def _stage_widths(widths: list[int], heads: list[int] | int | None) -> list[int]:
    """Widths that their stage's heads divide into heads of even width (rotary embeddings need pairs)."""
    if not isinstance(heads, (list, tuple)) or len(heads) != len(widths):
        return widths
    head_widths = [max(1, w // h) for w, h in zip(widths, heads)]
    return [(d + d % 2) * h for d, h in zip(head_widths, heads)]


def shrink_rope(rope: dict, head_dim: int, partial: float | None = None) -> dict:
    """Rotary settings for heads of width `head_dim`; `rope` may nest one dict per layer type."""
    out = {k: shrink_rope(v, head_dim, partial) if isinstance(v, dict) else v for k, v in rope.items()}
    pairs = max(1, int(head_dim * (out.get("partial_rotary_factor", partial) or 1.0)) // 2)
    for key in ("mrope_section", "xdrope_section", "rope_section"):
        if out.get(key):
            sizes = [max(1, int(size * pairs / sum(out[key]))) for size in out[key]]
            sizes[0] = max(1, sizes[0] + pairs - sum(sizes))
            out[key] = sizes
    for key in ("short_factor", "long_factor"):
        if isinstance(out.get(key), (list, tuple)):
            out[key] = (list(out[key]) * 4)[:pairs]
    if isinstance(out.get("original_max_position_embeddings"), int):
        out["original_max_position_embeddings"] = min(out["original_max_position_embeddings"], 256)
    return out
