"""Typed settings: one TOML file, dotted overrides, errors that name the nearest setting. Imports no torch."""

from cohort.config.data import DataConfig, Source
from cohort.config.grpo import GRPOConfig, Schedule
from cohort.config.load import (
    annotated_toml,
    apply_overrides,
    file_and_overrides,
    load_config,
    parse_settings,
    setting_names,
    to_toml,
    with_settings,
)
from cohort.config.optim import OptimConfig
from cohort.config.report import ReportConfig, ThresholdsConfig
from cohort.config.schema import (
    EnvironmentConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
)
from cohort.config.secrets import hidden_settings, hide_secrets
from cohort.config.vllm import VLLMConfig
