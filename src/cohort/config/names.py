"""Names and types of the settings, as ``GRPOConfig(...)`` takes them, for type checkers and editors.

Written by ``scripts/write_setting_names.py``; do not edit.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from cohort.config.optim import LRSchedule
from cohort.config.report import Tracker
from cohort.config.section import Section


class SettingNames(TypedDict, total=False):
    """Sections and settings by name."""

    model: Mapping[str, Any] | Section
    path: str | PathLike[str]
    revision: str
    precision: Literal["auto", "float32", "bfloat16", "float64"]
    float32_head: bool
    device: str
    dropout: bool
    lora: Any
    quantization: Literal["none", "8bit", "4bit"]
    router_aux_loss_coef: float
    gradient_checkpointing: bool
    native_kernels: bool
    torch_compile: bool
    trust_remote_code: bool
    allow_pickled_weights: bool
    data: Mapping[str, Any] | Section
    train: str | Sequence[Any]
    train_split: str
    eval_split: str
    columns: Mapping[str, Any]
    filter: str | Mapping[str, Any] | None
    select: str | None
    train_rows: int | None
    eval_rows: int | None
    streaming: bool
    shuffle_buffer: int
    order: Literal["shuffled", "sequential", "curriculum"]
    curriculum: str | None
    prompt_column: str
    prompt_template: str | None
    system_prompt: str | None
    format: Literal["auto", "text", "chat"]
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any]
    escape_control_tokens: bool
    template_time: str | PathLike[str] | None
    max_prompt_length: int | None
    overlong_prompts: Literal["error", "drop", "truncate_left"]
    rollout: Mapping[str, Any] | Section
    engine: Literal["local", "vllm"]
    prompts_per_step: int
    num_generations: int
    max_completion_length: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    min_completion_length: int
    regex: str | None
    json_schema: str | None
    replay_sampling: bool
    stop: Sequence[str]
    max_batch_size: int
    lag: int
    cache_tokens: int | None
    vllm: Mapping[str, Any] | Section
    url: str | Sequence[str]
    request_timeout: float
    startup_timeout: float
    start: bool
    python: str | PathLike[str]
    arguments: Sequence[str]
    transport: Literal["files", "group"]
    folder: str | PathLike[str]
    update_timeout: float
    probe_threshold: float | None
    sleep: bool
    environment: Mapping[str, Any] | Section
    tools: Sequence[str]
    factory: str | Mapping[str, Any]
    starts: Literal["same", "any", "own"]
    max_turns: int
    max_turn_length: int | None
    max_observation_tokens: int | None
    call_timeout: float | None
    episode_timeout: float | None
    call_retries: int
    tool_workers: int
    max_environments: int
    history: str
    parser: str | None
    reward: Mapping[str, Any] | Section
    functions: Sequence[str]
    weights: Sequence[float] | None
    workers: int
    timeout: float | None
    retries: int
    on_error: Literal["unscored", "stop"]
    cache: bool
    max_concurrent: int
    objective: Mapping[str, Any] | Section
    preset: str | PathLike[str]
    beta: float | None
    epsilon: float | None
    epsilon_high: float | None
    baseline: Any
    scale: Any
    reward_aggregation: Any
    soft_overlong: Any
    unlikeliness: Any
    sign_weights: Any
    group_filter: Any
    credit: Any
    discount: Any
    truncated: Any
    truncated_penalty: Any
    ratio_anchor: Any
    ratio_level: Any
    trust_region: Any
    mismatch: Any
    top_entropy: Any
    kl: Any
    entropy: Any
    aggregation: Any
    aggregation_length: Any
    denominator: Any
    count_empty: Any
    num_iterations: int
    minibatches: int | None
    sync_ref_model: bool
    ref_model_sync_steps: int
    ref_model_mixup_alpha: float
    optim: Mapping[str, Any] | Section
    optimizer: Literal["adamw", "adamw_8bit", "adafactor", "muon"]
    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float
    lr_scheduler_type: LRSchedule
    lr_scheduler_kwargs: Mapping[str, Any]
    warmup_steps: int | float
    microbatch_tokens: int | None
    max_nonfinite_updates: int
    eval: Mapping[str, Any] | Section
    eval_steps: int
    eval_on_start: bool
    num_generations_eval: int
    temperature_eval: float | None
    top_p_eval: float | None
    top_k_eval: int | None
    min_p_eval: float | None
    max_completion_length_eval: int | None
    success: str | None
    success_threshold: float
    pass_at_k: Sequence[int] | None
    maj_at_k: Sequence[int]
    bootstrap_samples: int
    confidence: float
    metric_for_best_model: str | None
    greater_is_better: bool
    early_stopping_patience: int
    parallel: Mapping[str, Any] | Section
    layout: Literal["replicate", "optimizer", "full"]
    offload: bool
    rank_timeout: float
    run: Mapping[str, Any] | Section
    output_dir: str | PathLike[str] | None
    seed: int
    deterministic: bool
    max_steps: int | None
    num_epochs: int
    save_steps: int
    save_minutes: float
    save_total_limit: int | None
    keep_every: int
    stop_when_unsaved_minutes: float
    stop_seconds: float
    report: Mapping[str, Any] | Section
    progress: bool
    log_completions: bool
    store_steps: int
    store_groups: int
    trackers: Tracker | Sequence[Tracker]
    tracker_project: str | None
    skip_checks: Sequence[str]
    thresholds: Any
    check_saved: bool
    term_norms_steps: int
    update_kl_completions: int
