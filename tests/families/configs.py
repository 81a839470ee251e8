"""Small random models of every causal architecture of the installed transformers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SMALL = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "sliding_window": 6,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # multi-head latent attention
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # state spaces and linear attention
    "state_size": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "mamba_expand": 2,
    "use_mamba_kernels": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "chunk_size": 4,
    # older names
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 48,
    "ffn_dim": 48,
    "init_std": 0.2,
    "d_model": 32,
    "d_inner": 48,
    "d_head": 8,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "max_seq_len": 128,
    "n_ctx": 128,
    "dff": 48,
    "emb_dim": 32,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    # windows
    "attention_window_size": 6,
    "attention_chunk_size": 6,
    "window_size": 6,
    "local_attention": 6,
    "query_pre_attn_scalar": 8,
    # sparse attention
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 16,  # with few of them, scores are 0 after the ReLU, and ties are broken by chance
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "time_step_rank": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "lru_width": 32,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 37,
    "laurel_rank": 4,
    "router_hidden_size": 8,
    # multipliers
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "logit_scale": 0.3,
    "output_multiplier": 0.4,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.8, 1.2],
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
    "embedding_scale": 3.0,
    "routed_scaling_factor": 1.7,
    "router_scaling_factor": 1.7,
    "moe_router_scaling_factor": 1.7,
    "route_scale": 1.7,
}
"""Settings of the small models, of which each config takes those that it has."""

LATENT = {"num_key_value_heads": 4, "head_dim": 4}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "minicpm3",
            "youtu",
        ],
        LATENT,
    ),
    **dict.fromkeys(
        [
            "afmoe",
            "beam",
            "cohere2",
            "cohere2_moe",
            "exaone4",
            "exaone_moe",
            "gemma3_text",
            "gpt_oss",
            "granite_swa",
            "granitemoe_swa",
            "olmo3",
            "mellum",
            "ministral",
            "mimo_v2_flash",
        ],
        WINDOWS,
    ),
    **dict.fromkeys(["olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"], LINEAR),
    "bamba": {"attn_layer_indices": [1]},
    "kimi_linear": LATENT | LINEAR,
    "deepseek_v4": {"o_lora_rank": 8, "num_key_value_heads": 1},
    "cpmant": {"dim_head": 8, "dim_ff": 48},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "layer_types": ["full_attention"] * 2,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": LATENT,
    "gemma3n_text": {"num_kv_shared_layers": 1, "num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2},
    "gemma4_text": {"global_head_dim": 16, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 6,
        "d_rel": 4,
        "rel_extent": 128,
    },
    "inkling2_text": {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_key_value_heads": 2,
        "swa_num_attention_heads": 4,
        "swa_head_dim": 8,
        "sliding_window_size": 6,
        "d_rel": 4,
        "rel_extent": 128,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "jetmoe": {"kv_channels": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4, "num_key_value_heads": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax": LINEAR | {"block_size": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 8,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "sliding_window": None},  # nothing reads its window
    "qwen4_exp_text": {"hc_lowrank": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "w_init_variance_scale": 1.0},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings that only some model types need."""

LEFT_OUT = {
    "of encoders or encoder-decoder models": "bart bert bert-generation big_bird bigbird_pegasus blenderbot "
    "blenderbot-small camembert data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet "
    "reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod",
    "of models with images or sound, whose text model has a type of its own or was not built": "aria_text dots3_note "
    "emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git got_ocr2 llama4 "
    "mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp",
    "the same classes as another's": "gpt-sw3",
    "without a small configuration": "blt dbrx",
}
"""Model types that are not measured, by reason."""

MODEL_TYPES = sorted(
    set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {name for names in LEFT_OUT.values() for name in names.split()}
)
"""Model types that are measured: all others with a causal language model in the installed transformers."""


OLDER = Version(transformers.__version__) < Version("5.23")
"""Than the version that the tests are written for."""


def small_config(model_type: str) -> Any:
    """The small config of a model type."""
    if model_type not in CONFIG_MAPPING and OLDER:
        pytest.skip(f"transformers {transformers.__version__} does not have {model_type} yet")
    cls = CONFIG_MAPPING[model_type]
    known = {*cls().to_dict(), *cls.attribute_map}
    settings = {name: value for name, value in SMALL.items() if name in known}
    return cls(**settings | ONE_BY_ONE.get(model_type, {}))


def small_model(model_type: str) -> Any:
    """A random model with the small config, in float32."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are not installed
        return AutoModelForCausalLM.from_config(small_config(model_type))
