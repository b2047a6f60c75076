"""Model types whose small config needs more than the rules of `rules.py`.

The usual reason: two fields must agree and no name tells it (an adapter's input width and an encoder's output width),
or a default that only fits the full-size model (the indices of the layers that are read out).
"""

from collections.abc import Callable

from transformers import PreTrainedConfig, TimmBackboneConfig, TimmWrapperConfig


def _encoder_in_channels(chosen: dict, fields: dict) -> list[int]:
    """Detection heads read the stages of their backbone."""
    backbone = chosen.get("backbone_config")
    sizes, outputs = getattr(backbone, "hidden_sizes", None), getattr(backbone, "out_indices", None)
    if not sizes or not outputs:
        return fields["encoder_in_channels"]
    return [sizes[i - 1] for i in outputs][-len(fields["encoder_in_channels"]) :]


def _hidden_sizes_as_list(chosen: dict, fields: dict) -> list[int]:
    """As they come from a JSON file; backbones add them to a list, the class's default is a tuple."""
    return list(chosen["hidden_sizes"])


def _fast_vit(chosen: dict, fields: dict) -> PreTrainedConfig:
    vision = chosen["vision_config"]
    vision.architecture, vision.hidden_size, vision.model_args = "fastvit_t8", 768, {"inference_mode": True}
    return vision


def _pe_core(**kwargs) -> TimmWrapperConfig:
    return TimmWrapperConfig(
        architecture="vit_pe_core_tiny_patch16_384", do_pooling=True, initializer_range=0.02, **kwargs
    )


def _speech_vocabulary(chosen: dict, fields: dict) -> PreTrainedConfig:
    speech = chosen["speech_config"]
    speech.vocab_size = 8194
    return speech


def _finish_dbrx(config: PreTrainedConfig) -> None:
    config.attn_config.rope_theta = 10000.0
    config.attn_config.kv_n_heads = 2
    config.attn_config.clip_qkv = 8.0


_TIME_SERIES = {"prediction_length": 8, "context_length": 16, "num_time_features": 2, "lags_sequence": [1, 2, 3]}
_VQ = {"base_channels": 32, "num_res_blocks": 1}
_SAM_VISION = {"output_channels": 64, "global_attn_indexes": [1], "window_size": 4}
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA4_TEXT = _TWO_LAYERS | {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_EFFICIENTNET = {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}

# fields forced on a config, alone or nested; a callable gets (what is chosen so far, the default config's fields)
SET: dict[str, dict[str, object]] = {
    "align": {"projection_dim": 80},
    "align_vision_model": _EFFICIENTNET,
    "apertus1p5_vision_tokenizer": _VQ,
    "aria": {"projector_patch_to_query_dict": {64: 16, 16: 4}},
    "autoformer": _TIME_SERIES,
    "bit": {"embedding_size": 32, "hidden_sizes": [128, 128, 128, 128]},
    "blip-2": {"image_token_index": 300},
    "chameleon": {
        "vocabulary_map": {"<image>": 300}
        | {"IMGIMG" + "".join(chr(65 + int(digit)) for digit in str(i)) + "Z": 301 + i for i in range(64)}
    },
    "chameleon_vqgan": _VQ,
    "clap_audio_model": {"patch_embeds_hidden_size": 32, "hidden_size": 256},
    "clvp": {"speech_config": _speech_vocabulary},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _MROPE, "sliding_attention": _MROPE}},
    "convnext": {"hidden_sizes": _hidden_sizes_as_list},
    "convnextv2": {"hidden_sizes": _hidden_sizes_as_list},
    "d_fine": {"encoder_in_channels": _encoder_in_channels},
    "deepseek_ocr2_sam_vision_model": _SAM_VISION,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deimv2": {"encoder_in_channels": _encoder_in_channels},
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [64, 64],
        "scaled_images_feature_dims": [64, 64, 32],
        "fusion_hidden_size": 64,
    },
    "dia_decoder": {
        "cross_hidden_size": 64,
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 4,
        "cross_head_dim": 16,
    },
    "diffusion_gemma_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "global_head_dim": 32,
    },
    "dots1": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "edgetam_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "edgetam_video_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "edgetam_vision_model": {
        "backbone_config": lambda chosen, fields: TimmWrapperConfig(
            architecture="repvit_m1",
            model_args={"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
        ),
        "backbone_channel_list": [384, 192, 96, 48],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "efficientnet": _EFFICIENTNET,
    "embedding_gemma2_text": _GEMMA4_TEXT,
    "emu3": {
        "vocabulary_map": {"<image>": 300, "<|extra_200|>": 299}
        | {f"<|visual token {i:06d}|>": 301 + i for i in range(64)}
    },
    "emu3_vqgan": _VQ | {"hidden_size": 32},
    "ernie4_5_vl_moe_text": {"rope_parameters": _MROPE | {"rope_theta": 500000.0}},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "fast_vlm": {"vision_config": _fast_vit},
    "focalnet": {"hidden_sizes": _hidden_sizes_as_list},
    "gemma3n": {"vision_soft_tokens_per_image": 4},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "intermediate_size": 128,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma3n_vision": {"architecture": "mobilenetv4_conv_small", "hidden_size": 960},
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified_text": _GEMMA4_TEXT,
    "glm5_next_text": {"index_topk": 16},
    "glm_image_vqmodel": _VQ,
    "got_ocr2_vision": _SAM_VISION,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1],
        "downsample_rate": "1/2",
    },
    "hgnet_v2": {
        "stem_channels": (3, 16, 16),
        "stage_in_channels": (16, 32, 64, 64),
        "stage_mid_channels": (16, 16, 16, 16),
        "stage_out_channels": (32, 64, 64, 64),
        "stage_num_blocks": (1, 1, 1, 1),
        "stage_numb_of_layers": (2, 2, 2, 2),
        "hidden_sizes": [32, 64, 64, 64],
        "depths": [1, 1, 1, 1],
        "embedding_size": 16,
    },
    "informer": _TIME_SERIES,
    "inkling2_vision": {"posemb_grid_size": 8},
    "inkling_vision": {"patch_size": 8},
    "instructblip": {"image_token_index": 300},
    "instructblipvideo": {"video_token_index": 300},
    "janus_vqgan": _VQ,
    "kosmos-2": {"latent_query_num": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "lw_detr": {"projector_scale_factors": [2.0, 1.0]},
    "lw_detr_vit": {"image_size": 64, "patch_size": 8, "num_windows": 4, "window_block_indices": [0]},
    "mistral_large4_text": {"num_hidden_layers": 3},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 192,
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"hidden_sizes": [16, 32, 48, 64], "out_hidden_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "omdet-turbo": {
        "text_projection_in_dim": 64,
        "text_projection_out_dim": 64,
        "class_embed_dim": 64,
        "decoder_hidden_dim": 32,
        "decoder_num_heads": 4,
    },
    "pe_video_encoder": {
        "vision_config": lambda chosen, fields: _pe_core(
            num_classes=64, global_pool="map", model_args={"img_size": 64}
        )
    },
    "perceiver": {
        "num_latents": 16,
        "d_latents": 64,
        "d_model": 64,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
    },
    "perception_lm": {
        "vision_config": lambda chosen, fields: _pe_core(
            num_classes=0,
            global_pool="",
            model_args={"embed_dim": 192, "img_size": [64, 64], "depth": 2, "global_pool": ""},
        )
    },
    "pp_chart2table_vision": _SAM_VISION,
    "pp_doclayout_v2": {
        "encoder_in_channels": _encoder_in_channels,
        "class_thresholds": [0.5] * 25,
        "class_order": list(range(25)),
    },
    "pp_doclayout_v3": {"encoder_in_channels": _encoder_in_channels, "x4_feat_dim": 32},
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen3_omni_moe": {"enable_audio_output": False},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "rt_detr": {"encoder_in_channels": _encoder_in_channels},
    "rt_detr_v2": {"encoder_in_channels": _encoder_in_channels},
    "sam2_hiera_det_model": {
        "hidden_size": 32,
        "image_size": [256, 256],
        "embed_dim_per_stage": [32, 64, 128, 256],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "blocks_per_stage": [1, 1, 2, 1],
        "global_attention_blocks": [3],
    },
    "sam2_prompt_encoder": {"image_size": 256, "patch_size": 16},
    "sam2_video": {"image_size": 256},
    "sam2_video_prompt_encoder": {"image_size": 256, "patch_size": 16},
    "sam2_vision_model": {
        "backbone_channel_list": [256, 128, 64, 32],
        "backbone_feature_sizes": [[64, 64], [32, 32], [16, 16]],
    },
    "sam3_lite_text_vision_model": {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]},
    "sam3_vision_model": {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]},
    "sam_hq_mask_decoder": {"vit_dim": 64},
    "sam_hq_vision_model": _SAM_VISION | {"num_pos_feats": 32},
    "sam_vision_model": _SAM_VISION | {"num_pos_feats": 32},
    "seggpt": {"image_size": [128, 64]},
    "shieldgemma2": {"yes_token_index": 400, "no_token_index": 401},
    "step3p5": {"sliding_window": 8},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": _TIME_SERIES,
    "timm_backbone": {
        "backbone": lambda chosen, fields: (
            "resnet18" if fields.get("backbone") in (None, "resnet50") else fields["backbone"]
        )
    },
    "tvp": {"max_img_size": 128, "visual_prompt_size": 8, "num_frames": 2},
    "unlimited_ocr_sam_vision_model": _SAM_VISION,
    "vibevoice_acoustic_tokenizer": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4},
    "vibevoice_semantic_tokenizer_encoder": {"num_filters": 4},
    "vitmatte": {"convstream_hidden_sizes": [48, 96, 192], "fusion_hidden_sizes": [256, 128, 64, 32]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": (["linear_attention"] * 2 + ["hybrid"]) * 2},
    "zoedepth": {"bottleneck_features": 64},
}

# forced only where the config is nested in another one
SET_NESTED: dict[str, dict[str, object]] = {"vitdet": {"patch_size": 16, "image_size": 64}}

# fields left at their default
KEEP: dict[str, tuple[str, ...]] = {
    "clvp_decoder": ("vocab_size", "max_text_tokens", "bos_token_id", "eos_token_id"),
    "inkling_vision": ("num_hidden_layers",),
    "muse_spark_audio": ("num_hidden_layers", "patch_sizes", "depths"),
}

# fields not passed, so that the config works them out
DROP: dict[str, tuple[str, ...]] = {
    "gpt_neo": ("attention_layers",),
    "mistral_large4_text": ("kv_source_layers", "indexer_types", "layer_types", "mlp_layer_types"),
    "zamba": ("layer_types",),
}

# the config to shrink, where the class's own default does not build
REFERENCE: dict[str, Callable[[], PreTrainedConfig]] = {
    "timm_backbone": lambda: TimmBackboneConfig(backbone="resnet10t", out_indices=[1, 2, 3, 4]),
    "timm_wrapper": lambda: TimmWrapperConfig(architecture="resnet10t"),
}

# last touches to the finished config
FINISH: dict[str, Callable[[PreTrainedConfig], None]] = {"dbrx": _finish_dbrx}

# set on the finished config for one head only
_FOUR_STAGES = {
    "num_hidden_layers": 4,
    "stage_names": ["stem", "stage1", "stage2", "stage3", "stage4"],
    "out_indices": [1, 2, 3, 4],
}
_FOUR_LAYERS = {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
SET_FOR_HEAD: dict[tuple[str, str], dict[str, object]] = {
    ("beit", "semantic_segmentation"): _FOUR_STAGES,
    ("data2vec-vision", "semantic_segmentation"): {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    ("dpt", "depth_estimation"): _FOUR_LAYERS,
    ("dpt", "semantic_segmentation"): _FOUR_LAYERS,
    ("reformer", "causal_lm"): {"is_decoder": True},
    ("t5gemma", "text_encoding"): {"is_encoder_decoder": False},
    ("wav2vec2-bert", "ctc"): {"vocab_size": 32},
    ("wav2vec2-conformer", "ctc"): {"vocab_size": 32},
    ("hiera", "pretraining"): {"decoder_hidden_size": 64, "decoder_depth": 1, "decoder_num_heads": 4},
}
