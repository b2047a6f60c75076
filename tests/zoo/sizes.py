"""What a config says about the shapes and ids that its model accepts, under the many names it goes by."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedConfig

from .shrink import sub_configs

_VISION = [
    "vision_config",
    "image_config",
    "vit_config",
    "backbone_config",
    "vision_encoder_config",
    "video_config",
    "image_model_config",
    "visual_config",
]
_AUDIO = ("audio_config", "speech_config", "encoder_config", "audio_encoder_config")
_MELS = [
    "num_mel_bins",
    "feature_size",
    "n_mels",
    "num_mel_features",
    "input_feat_per_channel",
    "input_feat_size",
    "mel_dim",
    "num_mels",
    "input_dim",
    "n_mel",
    "input_feature_size",
    "feature_projection_input_dim",
    "audio_input_size",
    "mel_bins",
    "input_size",
]
_MEDIA_TOKENS = {
    "image": [
        "image_token_id",
        "image_token_index",
        "img_token_id",
        "im_token_id",
        "image_pad_token_id",
        "image_patch_id",
        "media_token_id",
        "media_placeholder_token_id",
        "image_patch_token_id",
        "vision_token_id",
        "visual_token_id",
    ],
    "audio": [
        "audio_token_id",
        "audio_token_index",
        "audio_pad_token_id",
        "audio_placeholder_token_id",
        "speech_token_id",
    ],
}


def find(config: PreTrainedConfig, names: Iterable[str], default: object = None, depth: int = 3) -> object:
    """The first of `names` that is set in `config`, then, breadth first, in its sub-configs."""
    level = [config]
    for _ in range(depth):
        for c in level:
            for name in names:
                value = getattr(c, name, None)
                if value is not None and not callable(value):
                    return value
        level = [s for c in level for s in sub_configs(c)]
    return default


def find_int(config: PreTrainedConfig, names: Iterable[str], default: int) -> int:
    """As `find`, reduced to one integer: the first of a list, the height of an image size."""
    value = find(config, names)
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("height") or value.get("longest_edge") or next(iter(value.values()), default)
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def child(config: PreTrainedConfig, names: Iterable[str]) -> PreTrainedConfig:
    """The first sub-config of these names, else `config` itself."""
    return next((c for n in names if isinstance(c := getattr(config, n, None), PreTrainedConfig)), config)


class Sizes:
    """Widths, image and audio shapes of one model."""

    def __init__(self, model: nn.Module, config: PreTrainedConfig) -> None:
        self.model, self.config = model, config
        vision = child(config, _VISION)
        channels = find_int(vision, ("num_channels", "in_channels", "in_chans", "num_input_channels"), 3)
        self.channels = channels if channels in (1, 3, 4) else 3  # else it counts feature maps
        size_names = ("image_size", "img_size", "input_size")
        self.height = self.width = find_int(vision, size_names, 64)
        size = find(vision, size_names)
        if isinstance(size, (list, tuple)) and len(size) >= 2 and all(isinstance(e, int) for e in size):
            self.height, self.width = size[-2:]
        self.patch = find_int(vision, ("patch_size",), 8)
        self.side = self.height // self.patch
        self.frames = find_int(config, ("num_frames", "frames_per_clip", "tubelet_frames"), 2)
        temporal = ("temporal_patch_size", "video_temporal_patch_size")
        self.temporal = max(1, find_int(vision, temporal, find_int(config, temporal, 1)))
        self.hidden = find_int(config, ("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 64)
        self.mels = [find_int(config, _MELS, 80)]
        for name in ("input_dim", "input_size", "feature_size", "num_mel_bins", "n_mels"):
            mels = find_int(config, (name,), 0)
            if mels and mels not in self.mels:
                self.mels.append(mels)
        self.max_source = find_int(config, ("max_source_positions", "max_length"), 0)
        audio = child(config, _AUDIO)
        self.speech_mels = find_int(audio, _MELS, 80)
        self.speech_max_source = find_int(audio, ("max_source_positions",), 0)

    def history(self) -> tuple[int, int, int]:
        """(context length, longest lag, channels) of a time series model."""
        context = find_int(self.config, ("context_length", "prediction_length"), 32)
        lag = max(find(self.config, ("lags_sequence",)) or [0])
        return context, lag, find_int(self.config, ("num_input_channels", "input_size"), 1)

    def vocabulary(self) -> int:
        """How many token ids the input embedding knows."""
        try:
            embedding = self.model.get_input_embeddings()
            if isinstance(embedding, nn.Embedding):
                return embedding.num_embeddings
        except (AttributeError, NotImplementedError):
            pass
        size = getattr(self.config.get_text_config(), "vocab_size", None)
        if isinstance(size, int):
            return size
        return find_int(self.config, ("vocab_size", "text_vocab_size", "num_embeddings", "codebook_size"), 64)

    def plain_ids(self) -> torch.Tensor:
        """Token ids without a special meaning: a placeholder among them would ask for an image."""
        special = special_ids(self.config)
        n = self.vocabulary()
        return torch.tensor([i for i in range(3, min(n, 400)) if i not in special] or list(range(max(1, n))))

    def token(self, name: str) -> int | None:
        """A special token id by its field's name, where it is one that can be embedded."""
        value = find(self.config, (name,))
        return value if type(value) is int and 0 <= value < self.vocabulary() else None

    def media_token(self, kind: str) -> int | None:
        """The placeholder id of an "image" or "audio" in the text."""
        value = find(self.config, _MEDIA_TOKENS[kind], depth=2)
        return value if isinstance(value, int) else None


def special_ids(config: PreTrainedConfig, depth: int = 3) -> set[int]:
    """Every integer in a field that is named after a token."""
    ids: set[int] = set()
    level = [config]
    for _ in range(depth):
        for key, value in ((k, v) for c in level for k, v in vars(c).items()):
            if "token" in key or key in ("blank_id", "pad_id"):
                ids |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if type(v) is int}
        level = [s for c in level for s in sub_configs(c)]
    return ids
