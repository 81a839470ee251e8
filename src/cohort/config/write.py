"""Settings as TOML files."""

from __future__ import annotations

from typing import Any

import tomli_w
from pydantic import BaseModel

from cohort.config.schema import GRPOConfig
from cohort.config.section import subsection


def to_toml(config: GRPOConfig) -> str:
    """The settings as a TOML file that reads back as the same settings. Unset ones are omitted: TOML has no null."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def annotated_toml() -> str:
    """Every setting with its default and its documentation, as a TOML file to start from."""
    return "\n".join(_annotated("", GRPOConfig))


def _annotated(name: str, section: type[BaseModel]) -> list[str]:
    lines = [f"[{name}]  # {' '.join((section.__doc__ or '').split())}"] if name else []
    tables: list[str] = []
    for key, field in section.model_fields.items():
        if table := subsection(field.annotation):
            tables += _annotated(f"{name}.{key}".lstrip("."), table)
            continue
        lines += [f"# {line.strip()}" for line in (field.description or "").splitlines()]
        lines += [_assignment(key, field.default), ""]
    return lines + tables


def _assignment(key: str, value: Any) -> str:
    if value is None:
        return f"# {key} ="
    return f"{key} = {{}}" if value == {} else tomli_w.dumps({key: value}).strip()
