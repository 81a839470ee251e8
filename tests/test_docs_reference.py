"""The generated pages of the site have every setting and every command."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from cohort.config import annotated_toml
from cohort.presets import Objective
from cohort.presets.base import kinds


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "docs_reference.py"
    spec = importlib.util.spec_from_file_location("docs_reference", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_of_the_annotated_file_has_an_entry(reference):
    section, expected = "", []
    for line in annotated_toml().splitlines():
        section = found[1] if (found := re.match(r"\[([\w.]+)\]", line)) else section
        if found := re.match(r"(?:# )?(\w+) =", line):
            expected.append(f"{section}.{found[1]}")
    page = reference.settings_page()
    entries = re.findall(r"^### \S+ \{ #(\S+) \}$", page, re.MULTILINE)
    assert sorted(entry for entry in entries if not entry.startswith("source.")) == sorted(expected)
    assert set(expected) == reference.setting_names()
    entry = page.partition("{ #rollout.top_p }\n")[2].split("###")[0].split()
    assert " ".join(entry) == (
        "number above 0, at most 1 · default `1.0` { .setting } Sample from the smallest set of most likely tokens whose "
        "probabilities add up to p. 1: all."
    )


def test_every_number_of_a_part_has_an_entry(reference):
    page = reference.parts_page()
    assert "- `high`: number, at least 0 · default `1.2`. " in page.partition("{ #trust_region.ppo_clip }")[2]
    assert "1 divides by n - 1 (TRL, verl), 0 by n; the paper does not say." in page
    assert page.count("\n- `") == sum(
        len(kind.model_fields) - 1
        for field in Objective.model_fields.values()
        for annotation in [field.annotation, *field.metadata]
        for kind in kinds(annotation).values()
    )


def test_a_type_in_words(reference):
    words = reference.type_in_words
    assert words({"anyOf": [{"type": "array", "items": {"type": "integer", "minimum": 1}}, {"type": "null"}]}) == (
        "list of integers, at least 1"
    )
    assert words({"enum": ["a", "b"], "type": "string"}) == "one of `a`, `b`"
    assert words({"type": "integer", "exclusiveMaximum": 4096}) == "integer, below 4,096"


def test_prose_is_shown_as_it_is_written(reference):
    assert reference._prose("a <- b * c, see 'cohort docs scale' and `x * y`") == (
        r"a &lt;- b \* c, see [scale](../scale.md) and `x * y`"
    )


def test_every_command_has_its_usage_once(reference):
    page = reference.commands_page()
    assert set(re.findall(r"^## cohort (\w+)$", page, re.MULTILINE)) == reference.command_names()
    assert not re.search(r"cohort (\w+) \1\b", page)
