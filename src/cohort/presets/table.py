"""The table of presets, read from ``table.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from cohort.errors import ConfigError, did_you_mean
from cohort.presets.objective import Objective
from cohort.presets.parts import KL
from cohort.presets.trust_regions import PPOClip

COMMON = Objective(trust_region=PPOClip(low=0.8, high=1.2), kl=KL(direction="reverse", correction="token_ratio"))
"""The parts of a row that it does not name: group mean and std, PPO's clip, and a reverse KL of weight 0."""
TABLE = tuple(
    Objective(**{**dict(COMMON), **row})
    for row in tomllib.loads(Path(__file__).with_name("table.toml").read_text(encoding="utf-8"))["preset"]
)
"""All rows, all versions."""
PRESETS = {row.name: row for row in sorted(TABLE, key=lambda row: row.version)}
"""The newest version of each, by name."""


def preset(name: str) -> Objective:
    """A row of the table by ``name`` (its newest version) or ``name@version``.

    Raises:
        ConfigError: there is no such preset; the nearest names are given.
    """
    plain, _, version = name.partition("@")
    versions = {str(row.version): row for row in TABLE if row.name == plain}
    if not versions:
        hint = did_you_mean(plain.lower().replace("-", "_"), PRESETS, most=3, cutoff=0.5)
        raise ConfigError(f"unknown preset {plain!r}" + (hint or "; 'cohort objective' lists all"))
    if version and version not in versions:
        raise ConfigError(f"preset {plain} has version {', '.join(versions)}, not {version!r}")
    return versions[version] if version else PRESETS[plain]
