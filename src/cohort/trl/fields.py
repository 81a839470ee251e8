"""What becomes of each field of TRL's ``GRPOConfig``: the table ``fields.toml``.

The table names every field of TRL 1.16.0, those of transformers' ``TrainingArguments`` included, and names that scripts
know from older versions. docs/trl.md prints it, and ``translate`` does what it says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["same", "translated", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the table."""

    verdict: Verdict
    """"same": the same meaning here; "translated": another name or unit; "no effect": accepted, changes nothing;
    "refused": an error, unless at its default."""
    to: str = ""
    """Cohort's setting, dotted; or what else reads the field. Of an old name, the present one."""
    why: str = ""
    """How it is translated; why it has no effect; or what to do instead."""
    old: bool = False
    """Whether the name is one that TRL or transformers has removed or deprecated."""


def _rows() -> Iterator[tuple[str, Field]]:
    table = tomllib.loads((Path(__file__).parent / "fields.toml").read_text(encoding="utf-8"))
    yield from ((name, Field("same", to)) for name, to in table["same"].items())
    yield from ((name, Field("translated", to, why)) for name, (to, why) in table["translated"].items())
    yield from ((name, Field("no effect", why=why)) for name, why in table["no effect"].items())
    yield from ((name, Field("refused", why=why)) for name, why in table["refused"].items())
    yield from ((name, Field(verdict, to, why, old=True)) for name, (verdict, to, why) in table["old"].items())


FIELDS: dict[str, Field] = dict(_rows())
"""Every field by its name."""
RENAMED = {name: field.to for name, field in FIELDS.items() if field.old and field.to in FIELDS}
"""Old names with the present ones."""


def setting_fields(setting: str) -> tuple[str, ...]:
    """The fields that become one of Cohort's settings, or a number of a part, for errors about it.

    >>> setting_fields("optim.warmup_steps"), setting_fields("trust_region.tau_positive")
    (('warmup_steps', 'warmup_ratio'), ('sapo_temperature_pos',))
    """
    part = f"objective.{setting}"
    return tuple(name for name, field in FIELDS.items() if field.to == setting or f"{field.to}.{field.why}" == part)
