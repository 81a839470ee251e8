"""Typed settings: one TOML file, dotted overrides, errors that name the nearest setting. Imports no torch."""

from cohort.config.grpo import GRPOConfig, Schedule
from cohort.config.load import (
    annotated_toml,
    apply_overrides,
    file_and_overrides,
    load_config,
    parse_settings,
    setting_names,
    to_toml,
    with_absolute_names,
    with_values,
)
from cohort.config.names import shown_name
from cohort.config.schema import (
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ReportConfig,
    RewardConfig,
    RolloutConfig,
    ServerConfig,
    Source,
    ThresholdsConfig,
    VLLMConfig,
)
from cohort.config.secrets import hidden_settings, hide_secrets
