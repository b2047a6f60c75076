"""Inputs written by hand, for forwards whose arguments depend on each other."""

from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from .draw import Draw

Inputs = dict[str, torch.Tensor]


def ones(*shape: int) -> torch.Tensor:
    """A mask of integers."""
    return torch.ones(*shape, dtype=torch.long)


def _text_with(token: int, n: int, d: Draw, batch: int = 2, after: int = 8) -> torch.Tensor:
    return torch.cat([d.ids(batch, 2), torch.full((batch, n), token), d.ids(batch, after)], 1)


def _vision_side(config: PreTrainedConfig) -> int:
    size = getattr(config, "vision_config", config).image_size
    return size if isinstance(size, int) else size[0]


def _time_series(c: PreTrainedConfig, d: Draw) -> Inputs:
    length = c.context_length + max(c.lags_sequence)
    out = {
        "past_values": d.normal(2, length),
        "past_time_features": d.normal(2, length, 2),
        "past_observed_mask": torch.ones(2, length),
        "future_values": d.normal(2, 8),
        "future_time_features": d.normal(2, 8, 2),
    }
    if c.num_static_categorical_features:
        out["static_categorical_features"] = torch.zeros(2, c.num_static_categorical_features, dtype=torch.long)
    return out


def _blip(c: PreTrainedConfig, d: Draw) -> Inputs:
    side = _vision_side(c)
    return {"pixel_values": d.normal(2, 3, side, side), "input_ids": _text_with(300, c.num_query_tokens, d)}


def _instructblip(c: PreTrainedConfig, d: Draw) -> Inputs:
    return _blip(c, d) | {"qformer_input_ids": d.ids(2, 6)}


def _instructblipvideo(c: PreTrainedConfig, d: Draw) -> Inputs:
    side, frames = _vision_side(c), 2
    return {
        "pixel_values": d.normal(2, frames, 3, side, side),
        "qformer_input_ids": d.ids(2, 6),
        "input_ids": _text_with(300, frames * c.num_query_tokens, d),
    }


def _decision_transformer(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {
        "states": d.normal(2, 6, c.state_dim),
        "actions": d.normal(2, 6, c.act_dim),
        "rewards": d.normal(2, 6, 1),
        "returns_to_go": d.normal(2, 6, 1),
        "timesteps": torch.arange(6)[None].repeat(2, 1),
        "attention_mask": torch.ones(2, 6),
    }


def _idefics(c: PreTrainedConfig, d: Draw) -> Inputs:
    side = _vision_side(c)
    return {
        "input_ids": d.ids(2, 16),
        "attention_mask": ones(2, 16),
        "pixel_values": d.normal(2, 1, 3, side, side),
        "image_attention_mask": ones(2, 16, 1),
    }


def _kosmos2(c: PreTrainedConfig, d: Draw) -> Inputs:
    side, n = _vision_side(c), c.latent_query_num
    where = torch.cat([torch.zeros(2, 2), torch.ones(2, n), torch.zeros(2, 4)], 1).bool()
    return {
        "input_ids": d.ids(2, n + 6),
        "pixel_values": d.normal(2, 3, side, side),
        "image_embeds_position_mask": where,
    }


def _lxmert(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {
        "input_ids": d.ids(2, 16),
        "visual_feats": d.normal(2, 5, c.visual_feat_dim),
        "visual_pos": d.uniform(2, 5, c.visual_pos_dim),
    }


def _clap(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {
        "input_ids": d.ids(2, 16),
        "input_features": d.normal(2, 1, 1024, 64),
        "is_longer": torch.zeros(2, 1, dtype=torch.bool),
    }


def _clvp(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {"input_ids": d.ids(2, 10), "input_features": d.normal(2, c.decoder_config.feature_size, 32)}


def _pix2struct(c: PreTrainedConfig, d: Draw) -> Inputs:
    patches = torch.cat([d.integers(0, 8, 2, 16, 2).float(), d.normal(2, 16, 768)], -1)
    return {"flattened_patches": patches, "attention_mask": torch.ones(2, 16), "decoder_input_ids": d.ids(2, 8)}


def _seggpt(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {k: d.normal(2, 3, 64, 64) for k in ("pixel_values", "prompt_pixel_values", "prompt_masks")}


def _text_and_image(batch: int, side: str, frames: tuple[int, ...] = ()) -> Callable[[PreTrainedConfig, Draw], Inputs]:
    return lambda c, d: {
        "input_ids": d.ids(batch, 8),
        "attention_mask": ones(batch, 8),
        "pixel_values": d.normal(batch, *frames, 3, getattr(c, side), getattr(c, side)),
    }


def _udop(c: PreTrainedConfig, d: Draw) -> Inputs:
    corner = d.uniform(2, 16, 2) * 0.5
    return {
        "input_ids": d.ids(2, 16),
        "attention_mask": ones(2, 16),
        "bbox": torch.cat([corner, corner + 0.3], -1),
        "pixel_values": d.normal(2, 3, c.image_size, c.image_size),
        "decoder_input_ids": d.ids(2, 8),
    }


def _omdet_turbo(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {
        "pixel_values": d.normal(1, 3, 224, 224),
        "classes_input_ids": d.ids(2, 8),
        "classes_attention_mask": ones(2, 8),
        "tasks_input_ids": d.ids(1, 8),
        "tasks_attention_mask": ones(1, 8),
        "classes_structure": torch.tensor([2]),
    }


def _jev(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {
        "input_ids": d.ids(1, 16),
        "attention_mask": ones(1, 16),
        "marks": torch.tensor([[4, 8, 12]]),
        "num_options": torch.tensor([[2, 2, 2]]),
        "question_type_ids": torch.tensor([[0, 0, 0]]),
    }


def _mllama_vision(c: PreTrainedConfig, d: Draw) -> Inputs:
    side = _vision_side(c)
    return {
        "pixel_values": d.normal(1, 1, 4, 3, side, side),
        "aspect_ratio_ids": ones(1, 1),
        "aspect_ratio_mask": ones(1, 1, 4),
    }


def _mllama(c: PreTrainedConfig, d: Draw) -> Inputs:
    return _mllama_vision(c, d) | {
        "input_ids": _text_with(c.image_token_index, 1, d, batch=1, after=11),
        "attention_mask": ones(1, 14),
        "cross_attention_mask": ones(1, 14, 1, 4),
    }


def _masked_video(c: PreTrainedConfig, d: Draw) -> Inputs:
    n = c.num_frames // c.tubelet_size * (c.image_size // c.patch_size) ** 2
    video = d.normal(2, c.num_frames, 3, c.image_size, c.image_size)
    return {"pixel_values": video, "bool_masked_pos": (torch.arange(n) % 2 == 0).repeat(2, 1)}


def _musicgen(c: PreTrainedConfig, d: Draw) -> Inputs:
    codes = d.integers(0, 60, 2 * c.decoder.num_codebooks, 8)  # the codebooks of a row are rows of their own
    return {"input_ids": d.ids(2, 8), "decoder_input_ids": codes}


def _patch_strip(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {
        "pixel_values": d.normal(1, 3, c.patch_size, c.patch_size * 64),
        "target_sizes": torch.tensor([[8, 8]], dtype=torch.int32),
    }


def _grid(*shape: int) -> Callable[[PreTrainedConfig, Draw], Inputs]:
    return lambda c, d: {"pixel_values": d.normal(*shape), "grid_thw": torch.tensor([[1, 8, 8]])}


def _audio_video(c: PreTrainedConfig, d: Draw) -> Inputs:
    return {"pixel_values_videos": d.normal(2, 2, 3, 64, 64), "input_values": d.normal(2, 1, 4000)}


# by model type, or by class where a head takes something else
CASES: dict[str, Callable[[PreTrainedConfig, Draw], Inputs]] = {
    "autoformer": _time_series,
    "informer": _time_series,
    "time_series_transformer": _time_series,
    "blip-2": _blip,
    "instructblip": _instructblip,
    "instructblipvideo": _instructblipvideo,
    "blip_2_qformer": lambda c, d: {
        "query_embeds": d.normal(2, 8, c.hidden_size),
        "encoder_hidden_states": d.normal(2, 12, c.encoder_hidden_size),
    },
    "clap": _clap,
    "clvp": _clvp,
    "decision_transformer": _decision_transformer,
    "depth_pro": lambda c, d: {"pixel_values": d.normal(1, 3, 256, 256)},
    "dia": lambda c, d: {"input_ids": d.ids(2, 8), "decoder_input_ids": d.integers(0, 100, 2, 8, 9)},
    "gemma3n_audio": lambda c, d: {
        "audio_mel": d.normal(2, 64, c.input_feat_size),
        "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "granite_docling": lambda c, d: {"input_ids": d.ids(2, 16), "attention_mask": ones(2, 16)},
    "granite_speech5_ctc": lambda c, d: {"input_features": d.normal(2, 64, 320)},
    "granite_speech5_encoder": lambda c, d: {"input_features": d.normal(2, 64, 320)},
    "idefics": _idefics,
    "inkling2_vision": lambda c, d: {
        "pixel_values": d.normal(64, 2 * c.patch_size, 2 * c.patch_size, 3),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    },
    "jev": _jev,
    "kosmos-2": _kosmos2,
    "kyutai_speech_to_text": lambda c, d: {"input_ids": d.integers(0, 60, 2, 12, c.num_codebooks + 1)},
    "lxmert": _lxmert,
    "minicpm_ocr_vision": _patch_strip,
    "minicpmv4_7_vision": _patch_strip,
    "mllama": _mllama,
    "mllama_text_model": lambda c, d: {"input_ids": d.ids(2, 16), "attention_mask": ones(2, 16)},
    "mllama_vision_model": _mllama_vision,
    "muse_glimmer_assistant": lambda c, d: {
        "noise_embeds": d.normal(2, 8, 64),
        "context_hidden_states": d.normal(2, 16, 128),
        "attention_mask": ones(2, 24),
    },
    "muse_glimmer_vision": _grid(64, 384),
    "muse_spark_vision": _grid(64, 384),
    "muse_spark_audio": lambda c, d: {"input_values": d.normal(2, 3840)},
    "omdet-turbo": _omdet_turbo,
    "musicgen": _musicgen,
    "musicgen_melody": _musicgen,
    "oneformer": lambda c, d: {
        "pixel_values": d.normal(2, 3, 64, 64),
        "task_inputs": d.integers(0, 100, 2, 77).float(),
    },
    "pe_audio_video": lambda c, d: _audio_video(c, d) | {"input_ids": d.ids(2, 16), "attention_mask": ones(2, 16)},
    "pe_audio_video_encoder": _audio_video,
    "perceiver": lambda c, d: {"inputs": d.normal(2, 20, c.d_model)},
    "PerceiverForMaskedLM": lambda c, d: {"inputs": d.ids(2, 16)},
    "PerceiverForSequenceClassification": lambda c, d: {"inputs": d.ids(2, 16)},
    "PerceiverForImageClassificationLearned": lambda c, d: {"inputs": d.normal(2, 3, c.image_size, c.image_size)},
    "SpeechT5ForTextToSpeech": lambda c, d: {
        "input_ids": d.integers(5, 60, 2, 16),
        "decoder_input_values": d.normal(2, 8, c.num_mel_bins),
        "speaker_embeddings": d.normal(2, c.speaker_embedding_dim),
    },
    "SplinterForPreTraining": lambda c, d: {"input_ids": _text_with(c.question_token_id, 1, d)},
    "VideoMAEForPreTraining": _masked_video,
    "pix2struct": _pix2struct,
    "qwen3_asr_encoder": lambda c, d: {
        "input_features": d.normal(2, c.num_mel_bins, 200),
        "input_features_mask": ones(2, 200),
    },
    "seggpt": _seggpt,
    "speech-encoder-decoder": lambda c, d: {"inputs": d.normal(2, 4000), "decoder_input_ids": d.ids(2, 8)},
    "speecht5": lambda c, d: {
        "input_values": d.normal(2, 16, c.hidden_size),
        "decoder_input_values": d.normal(2, 8, c.hidden_size),
    },
    "timesfm": lambda c, d: {
        "past_values": d.normal(2, 64),
        "past_values_padding": torch.zeros(2, 64),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    },
    "tvp": _text_and_image(1, "max_img_size", frames=(2,)),
    "udop": _udop,
    "vibevoice_acoustic_tokenizer_encoder": lambda c, d: {"hidden_states": d.normal(2, 1, 6400)},
    "vilt": _text_and_image(2, "image_size"),
    "voxtral_realtime": lambda c, d: {"input_ids": d.ids(1, 16), "input_features": d.normal(1, 128, 128)},
}
