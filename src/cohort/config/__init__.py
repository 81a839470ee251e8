"""Typed settings: one TOML file, dotted overrides, errors that name the nearest setting. Imports no torch."""

from cohort.config.data import DataConfig, Source
from cohort.config.evaluation import EvalConfig
from cohort.config.load import apply_overrides, load_config, parse_settings
from cohort.config.schedule import Schedule
from cohort.config.schema import (
    EnvironmentConfig,
    GRPOConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ReportConfig,
    RewardConfig,
    RolloutConfig,
)
from cohort.config.write import annotated_toml, to_toml
