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

OF_VALUE: dict[Any, str] = {
    37: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model emb_dim word_embed_proj_dim lru_width",
    48: "intermediate_size n_inner ffn_dim d_inner ffn_hidden_size dff dense_intermediate_size intermediate_size_mlp",
    2: "num_hidden_layers num_key_value_heads bos_token_id num_experts_per_tok mamba_expand "
    "linear_num_key_heads n_layer n_layers num_layers num_kv_heads index_topk_blocks moe_k moe_topk",
    4: "num_attention_heads num_experts num_local_experts n_routed_experts qk_rope_head_dim mamba_chunk_size "
    "mamba_dt_rank linear_num_value_heads chunk_size n_head n_heads num_heads attention_heads rotary_dim "
    "index_topk index_block_size moe_num_experts time_step_rank linear_num_heads laurel_rank",
    8: "head_dim kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim state_size mamba_n_heads mamba_d_head "
    "mamba_d_state linear_key_head_dim linear_value_head_dim d_head query_pre_attn_scalar index_head_dim "
    "linear_head_dim ssm_state_size mamba_num_heads mamba_head_dim hidden_size_per_layer_input "
    "router_hidden_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx",
    0.2: "initializer_range init_std",
    0: "pad_token_id",
    1: "eos_token_id n_group topk_group first_k_dense_replace",
    6: "sliding_window attention_window_size attention_chunk_size window_size local_attention",
    16: "moe_intermediate_size shared_expert_intermediate_size index_n_heads shared_experts_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size",
    64: "mamba_d_ssm",
    3.0: "embedding_multiplier embedding_scale",
    0.5: "residual_multiplier",
    0.3: "attention_multiplier logit_scale",
    0.4: "output_multiplier lm_head_multiplier",
    0.7: "key_multiplier",
    1.3: "attention_in_multiplier",
    0.6: "attention_out_multiplier",
    1.2: "ssm_in_multiplier",
    0.8: "ssm_out_multiplier",
    1.7: "routed_scaling_factor router_scaling_factor moe_router_scaling_factor route_scale",
}
SMALL: dict[str, Any] = {name: value for value, names in OF_VALUE.items() for name in names.split()}
SMALL |= {"mlp_multipliers": [0.8, 1.2], "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7], "logits_scaling": 2.0}
SMALL["use_mamba_kernels"] = False
"""Settings of the small models, of which each config takes those that it has."""

COMMON = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "initializer_range": 0.2}
ATTENTION = COMMON | {
    name: SMALL[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
}
ATTENTION["max_position_embeddings"] = 128
"""Settings of a small transformer with grouped queries."""

LATENT = {"num_key_value_heads": 4, "head_dim": 4}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 6}
INKLING |= {"d_rel": 4, "rel_extent": 128}
ONE_BY_ONE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"], LATENT),
    **dict.fromkeys(["glm_moe_dsa", "minicpm3", "youtu", "dots3_note_text"], LATENT),
    **dict.fromkeys(
        ["afmoe", "beam", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma3_text", "gpt_oss"], WINDOWS
    ),
    **dict.fromkeys(["granite_swa", "granitemoe_swa", "olmo3", "mellum", "ministral", "mimo_v2_flash"], WINDOWS),
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
    "gemma3n_text": {"num_kv_shared_layers": 1, "num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2},
    "gemma4_text": {"global_head_dim": 16, "num_kv_shared_layers": 0},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "inkling_text": INKLING,
    "inkling2_text": INKLING | {"layer_types": ["hybrid_sliding", "hybrid"]},
    "jamba": dict.fromkeys(["attn_layer_period", "expert_layer_period"], 2)
    | dict.fromkeys(["attn_layer_offset", "expert_layer_offset"], 1),
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


def small_config(model_type: str, **changes: Any) -> Any:
    """The small config of a model type."""
    if model_type not in CONFIG_MAPPING and OLDER:
        pytest.skip(f"transformers {transformers.__version__} does not have {model_type} yet")
    cls = CONFIG_MAPPING[model_type]
    known = {*cls().to_dict(), *cls.attribute_map}
    settings = {name: value for name, value in SMALL.items() if name in known}
    return cls(**settings | ONE_BY_ONE.get(model_type, {}) | changes)


def small_model(model_type: str, **changes: Any) -> Any:
    """A random model with the small config, in float32."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that are not installed
        return AutoModelForCausalLM.from_config(small_config(model_type, **changes))
