"""What the integer fields of transformers configs mean, by their names: the vocabulary of `rules.py`."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Widths of the residual stream, embeddings and projections.
WIDTH = _names(
    """
    adapter_hidden_size audio_embed_dim audio_hidden_size backbone_hidden_dim backbone_hidden_size
    bottleneck_hidden_size codec_hidden_size cond_dim cond_hidden_size conv_hidden_size cross_attention_dim
    cross_attention_hidden_size cross_hidden_size d_embed d_model dec_hidden_size decoder_dim decoder_embed_dim
    decoder_hidden_dim decoder_hidden_size decoder_input_dim dim emb_dim embed_dim embedding_dim embedding_size
    enc_hidden_size encoder_dim encoder_embed_dim encoder_hidden_dim encoder_hidden_size encoder_output_dim
    feature_dim feature_size_dim fpn_hidden_size fusion_hidden_size head_hidden_size hidden_act_dim hidden_channels
    hidden_dim hidden_size hidden_size_global image_embed_dim input_dim language_hidden_size llm_hidden_size
    lm_hidden_size mask_feature_size memory_attention_hidden_size memory_encoder_hidden_size memory_fuser_embed_dim
    model_dim n_embd out_hidden_size output_dim output_hidden_size output_proj_dims pooler_hidden_size
    pooler_output_size pred_hidden_size predictor_hidden_size projection_dim projection_hidden_size projector_dim
    prompt_embed_dim qformer_hidden_size shared_embedding_size speaker_embedding_size sub_hidden_size
    target_hidden_size text_config_hidden_size text_dim text_embed_dim text_hidden_size vision_dim vision_embed_dim
    vision_feature_dim vision_hidden_size vision_output_dim width word_embed_proj_dim
    """
)

# Widths inside a dense feed-forward block.
INNER_WIDTH = _names(
    """
    adapter_intermediate_size block_ff_dim connector_intermediate_size d_ff d_inner decoder_feedforward_dim
    decoder_ffn_dim decoder_intermediate_size dense_intermediate_size dim_feedforward encoder_feedforward_dim
    encoder_ffn_dim encoder_intermediate_size feed_forward_dim feed_forward_size feedforward_dim feedforward_size
    ff_dim ffn_dim ffn_hidden_size ffn_intermediate_size hidden_dim_ffn inner_dim intermediate_dim
    intermediate_size intermediate_size_mlp iou_head_hidden_dim memory_attention_feed_forward_hidden_size
    memory_fuser_intermediate_dim merger_intermediate_size mlp_dim mlp_hidden_size n_inner
    predictor_intermediate_size proj_intermediate_size projection_intermediate_size projector_hidden_size
    vision_intermediate_size
    """
)

# Widths inside one expert.
EXPERT_WIDTH = _names(
    """
    expert_ffn_dim expert_ffn_hidden_size expert_hidden_size expert_intermediate_size moe_ffn_hidden_size
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size routed_expert_intermediate_size
    shared_expert_intermediate_size shared_expert_size shared_intermediate_size
    """
)

# Numbers of layers.
LAYERS = _names(
    """
    audio_num_hidden_layers dec_layers decoder_depth decoder_layers decoder_num_hidden_layers decoder_num_layers
    depth enc_layers encoder_depth encoder_layers encoder_num_hidden_layers encoder_num_layers entity_layers
    l_layers layers memory_attention_num_layers memory_fuser_num_layers n_decoder_layers n_encoder_layers n_layer
    n_layer_dec n_layers neck_layers num_adapter_layers num_block_layers num_blocks num_decoder_layers
    num_encoder_layers num_fusion_layers num_hidden_layers num_hidden_layers_cross num_layers num_loops_layers
    num_mtp_layers num_transformer_layers pred_num_hidden_layers predictor_num_hidden_layers qformer_num_layers
    r_layers resampler_depth speech_decoder_layers speech_encoder_layers t2u_decoder_layers t2u_encoder_layers
    text_decoder_layers text_encoder_depth text_encoder_layers text_encoder_num_layers transformer_layers
    vision_layers x_layers
    """
)

# Numbers of query heads.
HEADS = _names(
    """
    attention_heads audio_num_attention_heads dec_heads decoder_attention_heads decoder_num_attention_heads
    decoder_num_head decoder_num_heads enc_heads encoder_attention_heads encoder_num_attention_heads
    encoder_num_head encoder_num_heads memory_attention_num_attention_heads n_head n_heads nhead
    num_attention_heads num_attn_heads num_cross_attention_heads num_decoder_attention_heads
    num_encoder_attention_heads num_heads num_query_heads num_self_attention_heads pred_num_attention_heads
    predictor_num_attention_heads qformer_num_attention_heads resampler_n_heads speech_encoder_attention_heads
    swa_num_attention_heads t2u_decoder_attention_heads t2u_encoder_attention_heads text_decoder_attention_heads
    text_encoder_attention_heads text_num_attention_heads transformer_heads vision_num_attention_heads
    """
)

# Numbers of key/value heads.
KV_HEADS = _names(
    """
    decoder_num_key_value_heads encoder_num_key_value_heads multi_query_group_num n_head_kv n_kv_heads
    num_global_key_value_heads num_key_value_groups_heads num_key_value_heads num_kv_heads swa_num_key_value_heads
    text_num_key_value_heads
    """
)

# Widths of one head.
HEAD_WIDTH = _names(
    """
    attention_head_dim attention_head_size attention_key_dim cross_head_dim d_head d_kv decoder_head_dim dim_head
    encoder_head_dim gdn_head_dim global_head_dim head_dim kv_channels linear_key_head_dim linear_value_head_dim
    qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar resampler_head_dim self_attn_head_dim swa_head_dim
    swa_v_head_dim v_head_dim
    """
)

# Numbers of routed experts.
EXPERTS = _names(
    """
    moe_n_routed_experts moe_num_experts n_experts n_routed_experts num_experts num_local_experts num_moe_experts
    num_routed_experts text_num_experts
    """
)

# Numbers of experts that a token is sent to.
EXPERTS_PER_TOKEN = _names(
    """
    experts_per_token moe_k moe_num_active_experts moe_top_k moe_topk num_activated_experts num_experts_per_tok
    num_experts_per_token num_selected_experts top_k_experts
    """
)
