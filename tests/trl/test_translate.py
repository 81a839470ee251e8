"""TRL's arguments as Cohort's settings: the objective, sampling, the run, and errors in TRL's terms."""

from __future__ import annotations

import fnmatch
import json
import math
import os
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig

from cohort.errors import ConfigError
from cohort.presets.parts import KL, BatchStd, EntropyBonus, GroupStd, MismatchWeight, OffPolicyMask
from cohort.presets.trust_regions import SAPO, Cap, Gamma, PPOClip
from cohort.trl import GRPOConfig
from cohort.trl.config import FIELDS, TABLE, Batch
from cohort.trl.notice import differences
from cohort.trl.translate import in_trl_terms, layout_of, translate
from tests.conftest import each


def translated(**fields: Any) -> Any:
    return translate(GRPOConfig("out", **fields), num_prompts=320)


def objective(**fields: Any) -> Any:
    return translated(**fields).resolved_objective


@each(
    ("loss", "fields", "aggregation", "level", "rule"),
    [
        ("grpo", {}, "seq_mean_token_mean", "token", PPOClip(low=0.8, high=1.2)),
        ("dapo", {"epsilon_high": 0.28}, "token_mean", "token", PPOClip(low=0.8, high=1.28)),
        ("bnpo", {"delta": 4.0}, "token_mean", "token", PPOClip(low=0.8, high=1.2, dual=4.0)),
        ("dr_grpo", {"epsilon_high": 0.0}, "constant", "token", PPOClip(low=0.8, high=1.0)),
        ("luspo", {"importance_sampling_level": "sequence"}, "seq_sum", "sequence_mean", PPOClip(low=0.8, high=1.2)),
        ("grpo", {"epsilon": 10.0}, "seq_mean_token_mean", "token", PPOClip(low=0.0, high=11.0)),
        ("cispo", {"epsilon_high": 5.0}, "token_mean", "token", Cap(low=0.0, high=5.0)),
        ("sapo", {"sapo_temperature_neg": 1.5}, "seq_mean_token_mean", "token", SAPO(tau_negative=1.5)),
        ("vespo", {"vespo_k_pos": 1.0}, "token_mean", "sequence_product", Gamma(k_positive=1.0)),
    ],
)
def test_a_loss_is_its_mean_and_its_trust_region(loss, fields, aggregation, level, rule):
    found = objective(loss_type=loss, **fields)
    assert (found.aggregation, found.ratio_level, found.trust_region) == (aggregation, level, rule)
    assert (found.ratio_anchor, found.scale) == ("old", GroupStd(ddof=1, epsilon=1e-4))
    assert found.aggregation_length == (512 if loss == "dr_grpo" else None)


def test_the_other_parts_of_the_objective():
    assert objective(scale_rewards="batch").scale == BatchStd(of="raw", unit="sample", ddof=1, epsilon=1e-4)
    assert objective(scale_rewards=False).scale is None
    gdpo = objective(multi_objective_aggregation="normalize_then_sum", scale_rewards="batch")
    assert (gdpo.reward_aggregation, gdpo.scale) == ("normalize_sum_normalize", GroupStd(ddof=1, epsilon=1e-4))
    assert objective(beta=0.1).kl == KL(beta=0.1, direction="reverse", correction="token_ratio")
    assert objective(beta=0.1, use_bias_correction_kl=False).kl == KL(beta=0.1, direction="forward")
    assert objective(mask_truncated_completions=True).truncated == "mask"
    assert objective(off_policy_mask_threshold=0.5).mismatch == (OffPolicyMask(threshold=0.5),)
    assert objective(entropy_coef=0.01, entropy_target=0.3).entropy == EntropyBonus(coefficient=0.01)
    adaptive = objective(use_adaptive_entropy=True, entropy_target=0.3, entropy_coef_delta=0.01).entropy
    assert adaptive == EntropyBonus(target=0.3, step=0.01, minimum=0.0, maximum=1.0)


def test_weights_by_the_sampler_only_with_vllm():
    server = {"use_vllm": True, "vllm_mode": "server"}
    assert objective().mismatch == ()
    assert objective(**server).mismatch == (MismatchWeight(level="sequence", mode="mask", low=0.0, high=3.0),)
    bounds = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": None}
    found = objective(**server, **bounds, vllm_importance_sampling_mode="token_truncate").mismatch
    assert found == (MismatchWeight(level="token", mode="truncate", low=0.5, high=math.inf),)
    vespo = objective(**server, loss_type="vespo")
    assert (vespo.mismatch, vespo.ratio_anchor) == ((), "sampler")


def test_servers_of_vllm():
    found = translated(use_vllm=True, vllm_mode="server", vllm_server_host="10.0.0.2", vllm_enable_sleep_mode=True)
    assert (found.rollout.engine, found.rollout.sleep) == ("server", True)
    assert found.server.url == ("http://10.0.0.2:8000",)
    assert translated(use_vllm=True, vllm_mode="server").server.url == ("http://127.0.0.1:8000",)


def test_vllm_in_the_trainer_s_process():
    found = translated(use_vllm=True, vllm_enable_sleep_mode=True, vllm_max_model_length=4096)
    assert (found.rollout.engine, found.rollout.sleep) == ("vllm", True)
    vllm = found.vllm
    assert (vllm.gpu_memory_utilization, vllm.tensor_parallel_size, vllm.max_model_len) == (0.3, 1, 4096)
    assert vllm.arguments == {}
    other = translated(use_vllm=True, vllm_model_impl="transformers", vllm_structured_outputs_regex="[0-9]+")
    assert other.vllm.arguments == {"model_impl": "transformers"}
    assert (other.rollout.regex, other.rollout.sleep) == ("[0-9]+", False)
    assert translated().rollout.engine == "local"


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_activations_are_recomputed_on_a_gpu_alone(name: str):
    if name not in GRPOConfig.__dataclass_fields__:
        pytest.skip("the installed transformers has only the older name")
    assert not translated().model.gradient_checkpointing
    for wanted in (True, False):
        args = GRPOConfig("out", **{name: wanted})
        args.__dict__["_setup_devices"] = torch.device("cuda")  # what transformers caches
        assert translate(args, num_prompts=8).model.gradient_checkpointing is wanted


def test_the_learning_rate_schedule_has_as_many_updates_as_the_run():
    found = translated(num_train_epochs=1, warmup_ratio=0.1, lr_scheduler_type="cosine")
    assert (found.run.max_steps, found.optim.warmup_steps, found.optim.lr_scheduler_type) == (320, 32, "cosine")
    assert translated(lr_scheduler_type="constant", warmup_steps=5).optim.warmup_steps == 0  # as in TRL


def test_keywords_of_sampling_and_of_loading():
    found = translated(generation_kwargs='{"min_new_tokens": 3, "stop_strings": "</answer>", "do_sample": true}')
    assert (found.rollout.min_completion_length, found.rollout.stop) == (3, ("</answer>",))
    found = translated(model_init_kwargs={"torch_dtype": "bfloat16", "attn_implementation": "sdpa", "revision": "v1"})
    assert found.model.precision == "bfloat16"


def test_the_weight_of_the_auxiliary_loss_is_the_model_s_own_unless_set():
    args, model = GRPOConfig("out"), MixtralConfig(router_aux_loss_coef=0.02)
    assert translate(args, num_prompts=8, model_config=model).model.router_aux_loss_coef == 0.02
    assert translate(args, num_prompts=8, model_config=LlamaConfig()).model.router_aux_loss_coef == 0
    args.router_aux_loss_coef = 0.0
    assert translate(args, num_prompts=8, model_config=model).model.router_aux_loss_coef == 0


def test_tool_calls_are_turns():
    assert translated(max_tool_calling_iterations=3).environment.max_turns == 4
    assert translated().environment.max_turns == 512


@each(
    ("fields", "words"),
    [
        ({"loss_type": "gspo"}, "loss_type must be one of grpo, bnpo"),
        ({"loss_type": "dapoo"}, "did you mean dapo"),
        ({"loss_type": "cispo"}, "set epsilon_high=5.0"),
        ({"delta": 1.1}, "delta (1.1) must be above 1 + epsilon_high (1.2)"),
        ({"epsilon": -0.5}, "epsilon and epsilon_high must be at least 0"),
        ({"scale_rewards": "groups"}, "did you mean group"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of token, sequence"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile must be above 0"),
        (
            {"top_entropy_quantile": 0.5, "importance_sampling_level": "sequence"},
            "set top_entropy_quantile=1.0, or importance_sampling_level='token'",
        ),
        ({"learning_rate": -1.0}, "learning_rate: input should be greater than or equal to 0"),
        ({"num_generations_eval": -1}, "num_generations_eval: input should be greater"),
        ({"reward_weights": 0.5}, "reward_weights: input should be a list"),
        ({"generation_kwargs": {"min_new_tokens": 600}}, "must be at most max_completion_length (512)"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, "follows evaluations"),
        ({"save_strategy": "best"}, "save_strategy 'best' needs metric_for_best_model"),
        (
            {"eval_strategy": "steps", "load_best_model_at_end": True, "eval_steps": 500},
            "ranks no models",
        ),
        ({"optim": "lion_8bit"}, "optim 'lion_8bit' is not supported here"),
        ({"generation_kwargs": {"top_pp": 0.5}}, "generation_kwargs has 'top_pp'"),
        ({"generation_kwargs": {"num_beams": 4}}, "generation_kwargs has 'num_beams'"),
        ({"model_init_kwargs": {"quantization_config": 1}}, "model_init_kwargs has 'quantization_config'"),
        ({"model_init_kwargs": {"dtype": "float16"}}, "model_init_kwargs['dtype'] must be one of"),
        ({"generation_kwargs": {"max_new_tokens": 7}}, "set the length as max_completion_length alone"),
        ({"generation_kwargs": {"stop": 3}}, "generation_kwargs['stop'] must be a text or a list of texts, got 3"),
        ({"generation_kwargs": [1]}, "generation_kwargs must be a dict or its JSON, got [1]"),
        ({"model_init_kwargs": ["x"]}, "model_init_kwargs must be a dict or its JSON, got ['x']"),
        ({"scale_rewards": ["a"]}, "scale_rewards must be one of group, batch, none, got ['a']"),
        ({"save_total_limit": "x"}, "save_total_limit must be a number, got 'x'"),
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations must be an integer of at least 0, or None"),
        ({"max_completion_length": None}, "max_completion_length must be an integer of at least 1, got None"),
        ({"loss_type": "sapo", "sapo_temperature_pos": -1}, "sapo_temperature_pos: expected a number above 0"),
        ({"off_policy_mask_threshold": -1}, "off_policy_mask_threshold: expected a number of at least 0"),
        ({"use_adaptive_entropy": True, "entropy_coef_min": 2}, "entropy_coef_max (1) is below entropy_coef_min (2)"),
        ({"use_vllm": True, "vllm_mode": "servr"}, "did you mean server"),
        ({"use_vllm": True, "vllm_importance_sampling_clip_max": 0.5}, "must contain 1"),
    ],
)
def test_errors_name_the_fields_of_trl(fields: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        translated(**fields)
    assert words in str(caught.value)


STAGE_3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}


@pytest.mark.parametrize(
    ("fields", "variables", "expected"),
    [
        ({}, {}, "replicate"),
        ({"deepspeed": STAGE_3}, {}, "full"),
        ({"deepspeed": json.dumps({"zero_optimization": {"stage": 2}})}, {}, "optimizer"),
        ({"fsdp": "full_shard auto_wrap"}, {}, "full"),
        ({"fsdp": "shard_grad_op"}, {}, "optimizer"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "full"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json"}, "full"),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "optimizer"),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}, "full"),
    ],
)
def test_layouts(fields, variables, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero.json").write_text(json.dumps(STAGE_3))
    assert layout_of(GRPOConfig("out", **fields), variables) == expected


@each(
    ("fields", "words"),
    [
        ({"deepspeed": "missing.json"}, "No such file"),
        ({"deepspeed": {"zero_optimization": {"stage": 9}}}, "expected a configuration"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}}, "offloads"),
        ({"fsdp": "full_shard offload"}, "offloads"),
    ],
)
def test_layouts_that_are_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        layout_of(GRPOConfig("out", **fields), {})


def test_the_launcher_of_deepspeed_starts_no_deepspeed(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert translated().parallel.layout == "full"


def test_every_rank_loads_the_weights_under_the_launcher_of_fsdp(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert translated().parallel.layout == "full"
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ


def said(num_prompts: int = 320, **fields: Any) -> str:
    args = GRPOConfig("out", **fields)
    batch = Batch.of(args, 1)
    return differences(args, translate(args, num_prompts=num_prompts), batch, batch.max_steps(args, num_prompts))


def test_the_start_says_what_differs_in_this_run():
    plain = said()
    for words in ("learning-rate schedule does not advance", "float32", "dropout is off", "unscored", "two rows"):
        assert words in plain
    for words in ("groups stay whole", "without effect", "warm-up", "top_p", "in full"):
        assert words not in plain
    several = said(
        per_device_train_batch_size=8,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=20,
        top_p=0.9,
        warmup_steps=4,
        dataloader_num_workers=2,
        dataloader_prefetch_factor=2,
        overwrite_output_dir=True,
    )
    assert "groups stay whole: each update uses 1 group of 8 completions" in several
    assert "8 updates use a rollout" in several
    assert "max_steps 20 ends within a rollout, which is used in full: 24 updates" in several
    assert "update k of 4 has k/4 of the rate" in several
    assert "without effect: dataloader_num_workers, dataloader_prefetch_factor (prompts come from no" in several
    assert "without effect: overwrite_output_dir" in several
    assert "not with every checkpoint" in said(push_to_hub=True)
    assert "checkpoint" not in plain


@each(
    ("fields", "words"),
    [
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex (use_vllm is False)"),
        ({"vllm_importance_sampling_cap": 2.0}, "vllm_importance_sampling_cap (use_vllm is False)"),
        ({"loss_type": "sapo", "delta": 3.0}, "delta (loss_type has no second bound)"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 9, "vllm_model_impl": "transformers"},
            "vllm_max_model_length, vllm_model_impl (the server of vllm_mode 'server' has its own)",
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch"},
            "scale_rewards (multi_objective_aggregation",
        ),
        ({"model_init_kwargs": {"attn_implementation": "sdpa"}}, "model_init_kwargs['attn_implementation'] (the"),
        ({"entropy_target": 0.3}, "entropy_target (use_adaptive_entropy is False)"),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, "warmup_ratio (lr_scheduler_type is 'constant')"),
    ],
)
def test_the_start_names_fields_that_others_switch_off(fields: dict[str, Any], words: str):
    assert f"without effect: {words}" in said(**fields)
    assert "without effect" not in said(max_completion_length=9, use_vllm=True, vllm_model_impl="transformers")


def test_the_table_of_fields_that_others_switch_off_names_fields():
    for off in TABLE["off"]:
        assert all(fnmatch.filter(FIELDS, pattern) for pattern in off["fields"])
        assert off["where"].keys() <= FIELDS.keys()


def test_errors_have_what_a_script_has_in_place_of_a_setting():
    said = in_trl_terms("raise run.num_epochs or run.max_steps; set data.train, reward.functions or data.chat_template")
    assert said == (
        "raise num_train_epochs or max_steps; set train_dataset, reward_funcs or processing_class.chat_template"
    )
    assert in_trl_terms("reward.weights.0: a number, mismatch[0].threshold") == (
        "reward_weights: a number, off_policy_mask_threshold"
    )
