"""The reference pages of the site, generated from the code: settings, commands, presets, rewards, the Python API.

``pages()`` returns them as Markdown by name. scripts/docs_site.py adds them to the site; nothing is written here.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

import cohort.cli.main  # noqa: F401  (the commands)
from cohort.cli.app import app
from cohort.config import GRPOConfig, Source
from cohort.config.schema import Section, marks_of, subsection
from cohort.objective import explain
from cohort.presets import PRESETS, Objective
from cohort.presets.base import kinds
from cohort.rewards.names import BUILTIN_REWARDS, explain_reward

SETTINGS, PARTS, COMMANDS = "reference/settings.md", "reference/parts.md", "reference/commands.md"
ROOMS = {
    "cohort": "What most programs need.",
    "cohort.callbacks": "",
    "cohort.rewards": "",
    "cohort.environments": "",
    "cohort.presets": "",
    "cohort.objective": "",
    "cohort.config": "The sections of the settings are on the page [Settings](../settings.md).",
    "cohort.data": "",
    "cohort.rollout": "",
    "cohort.policy": "",
    "cohort.train": "",
    "cohort.evaluation": "",
    "cohort.runs.folder": "",
    "cohort.runs.checkpoints": "",
    "cohort.runs.models": "",
    "cohort.report.diagnosis": "",
    "cohort.report.rollouts": "",
    "cohort.report.series": "",
    "cohort.report.verdict": "",
    "cohort.doctor": "",
    "cohort.sandbox": "",
    "cohort.types": "",
    "cohort.errors": "",
    "cohort.trl": "",
}
"""The modules of the Python reference, with a sentence of its page each."""


def pages() -> dict[str, str]:
    """Every generated page: its path in the site and its Markdown."""
    python = {f"reference/python/{module}.md": _python_page(module, text) for module, text in ROOMS.items()}
    return {
        SETTINGS: settings_page(),
        PARTS: parts_page(),
        COMMANDS: commands_page(),
        "reference/presets.md": presets_page(),
        "reference/rewards.md": rewards_page(),
        **python,
    }


def settings_page() -> str:
    """Every setting: type, range, default, meaning."""
    lines = [
        "# Settings",
        "`cohort config` prints the same as a TOML file to start from. A setting is given in the file under its "
        "section, on the command line as `--section.name value`, and in Python by its name alone: "
        "`GRPOConfig(temperature=0.7)`. An unset setting has no default of its own; its text says what is used.",
        'A setting marked "may change" may have another value when a run is [resumed](../runs.md); '
        "the others would change what the run computes.",
    ]
    for path, section in _sections("", GRPOConfig):
        lines.append(f"## [{path}] {{ #{path} }}")
        lines.append(_prose(section.__doc__ or ""))
        for key, field in section.model_fields.items():
            if subsection(field.annotation) is None:
                lines += _setting(f"{path}.{key}", field)
    lines += ["## A source of rows { #source }", _prose(Source.__doc__ or "")]
    for key, field in Source.model_fields.items():
        lines += _setting(f"source.{key}", field, f"As `data.{key}`.")
    return "\n\n".join(lines) + "\n"


def parts_page() -> str:
    """Every part of an objective that has numbers: its rules, with the numbers' ranges, defaults and meanings."""
    lines = [
        "# Parts of an objective",
        "The rules that the settings of `[objective]` choose between, with their numbers. A part is a word, as in "
        '`group_filter = "drop_dead"`, or a table, as in `trust_region = { rule = "ppo_clip", high = 1.28 }`; unset '
        "numbers are the preset's, or those given here if the rule is another one. On the command line: "
        "`--objective.trust_region.high 1.28`. [The guide](../objective.md) has the formulas.",
    ]
    for name, setting in Objective.model_fields.items():
        if rules := {
            rule: kind
            for annotation in [setting.annotation, *setting.metadata]
            for rule, kind in kinds(annotation).items()
        }:
            lines.append(f"## {name} {{ #{name} }}")
        for rule, kind in rules.items():
            source = f" Source: {kind.source}." if kind.source else ""
            lines += [f"### {rule} {{ #{name}.{rule} }}"] * (rule != name) + [
                _prose((inspect.getdoc(kind) or "") + source)
            ]
            meanings = _field_docstrings(kind)
            numbers = {key: field for key, field in kind.model_fields.items() if key != "rule"}
            entries = [f"- `{key}`: {_facts(field)}. {_prose(meanings.get(key, ''))}" for key, field in numbers.items()]
            lines.append("\n".join(entries))
    return "\n\n".join(lines) + "\n"


def _field_docstrings(kind: type[BaseModel]) -> dict[str, str]:
    """The texts below the fields of a class, which pydantic keeps for the sections of the settings only."""
    found = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("cohort.presets"):
            body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
            for field, text in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found


def setting_names() -> set[str]:
    """The settings with their sections, which are the anchors of the page."""
    return {
        f"{path}.{key}"
        for path, section in _sections("", GRPOConfig)
        for key, field in section.model_fields.items()
        if subsection(field.annotation) is None
    }


def _sections(path: str, schema: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in schema.model_fields.items():
        if table := subsection(field.annotation):
            name = f"{path}.{key}".lstrip(".")
            yield name, table
            yield from _sections(name, table)


def _facts(field: FieldInfo) -> str:
    """The type and the default of a setting."""
    kind = type_in_words(TypeAdapter(field.rebuild_annotation()).json_schema())
    if field.is_required():
        return f"{kind} · required"
    return f"{kind} · default {'unset' if field.default is None else f'`{_toml(field.default)}`'}"


def _setting(path: str, field: FieldInfo, otherwise: str = "") -> list[str]:
    mark = marks_of(GRPOConfig).get(path)
    changes = mark is not None and mark.resume in ("free", "drifts")
    facts = f"{_facts(field)}{' · may change' if changes else ''}\n{{ .setting }}"
    return [f"### {path} {{ #{path} }}", facts, _prose(field.description or otherwise)]


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def type_in_words(schema: dict[str, Any]) -> str:
    """A JSON schema of a setting in words.

    >>> type_in_words({"type": "integer", "minimum": 1})
    'integer, at least 1'
    >>> type_in_words({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "null"}]})
    'number above 0, at most 1'
    """
    if "anyOf" in schema:
        return " or ".join(type_in_words(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(f"`{word}`" for word in schema["enum"])
    if "$ref" in schema:
        return "table"
    match schema.get("type"):
        case None:
            return "word, number or table"
        case "array":
            return f"list of {_plural(type_in_words(schema['items']))}"
        case "object":
            return "table"
        case "boolean":
            return "true or false"
        case kind:
            words = {"exclusiveMinimum": " above {}", "minimum": ", at least {}"}
            words |= {"exclusiveMaximum": ", below {}", "maximum": ", at most {}"}
            limits = (text.format(f"{schema[name]:,}") for name, text in words.items() if name in schema)
            return f"{kind}{''.join(limits)}"


def _plural(words: str) -> str:
    """The words for one item as the words for several: "integer, at least 1" to "integers, at least 1"."""
    return re.sub(r"^(\w+)", r"\1s", words) if not words.startswith("one of") else words.replace("one of", "")


def commands_page() -> str:
    """Every command with its arguments: the text of ``--help``, in its order."""
    text: str = app.generate_docs(output_format="markdown", heading_level=1)
    overview, *parts = re.split("^(?=## cohort )", text, flags=re.MULTILINE)
    order = re.findall(r"^\* \[`(\w+)`\]", overview, flags=re.MULTILINE)
    parts.sort(key=lambda part: order.index(part.split()[2]))
    parts = [part.rstrip() + _prose_of_epilogue(part.split()[2]) for part in parts]
    body = re.sub(r"^cohort (\w+) \1\b", r"cohort \1", "\n\n".join(parts), flags=re.MULTILINE)
    return f"# Commands\n\nEach command prints this text with `--help`.\n\n{_linked(body)}"


def _prose_of_epilogue(command: str) -> str:
    """The lines below the options of ``--help``."""
    epilogue = app[command].help_epilogue or ""
    return f"\n\n{_prose(epilogue)}" if epilogue else ""


def command_names() -> set[str]:
    """The commands that the page has a heading for."""
    return {name for name in app if not name.startswith("-")}


def presets_page() -> str:
    """Every preset as ``cohort objective NAME`` explains it."""
    lines = [
        "# Presets",
        "`cohort objective NAME` prints these texts, also for a preset whose parts you change with `--set`.",
    ]
    lines.append(
        "[Choosing an objective](../choosing.md) says which fits; [the guide](../objective.md) explains the parts."
    )
    for row in PRESETS.values():
        lines += [f"## {row.name} {{ #{row.name} }}", f"```text\n{explain(row)}\n```"]
    return "\n\n".join(lines) + "\n"


def rewards_page() -> str:
    """Every built-in reward as ``cohort rewards NAME`` explains it."""
    lines = ["# Built-in rewards", "`cohort rewards NAME` prints these texts. [Rewards](../rewards.md) is the guide."]
    for name in BUILTIN_REWARDS:
        lines += [f"## {name} {{ #{name} }}", f"```text\n{explain_reward(name)}\n```"]
    return "\n\n".join(lines) + "\n"


def _python_page(module: str, text: str) -> str:
    """A module: its docstring without the examples, and an entry for everything that it offers."""
    paragraphs = (inspect.getdoc(importlib.import_module(module)) or "").split("\n\n")
    lines = [f"# {module}", *([text] if text else (part for part in paragraphs if ">>>" not in part))]
    for value in _public(module):
        lines.append(f"::: {value.__module__}.{value.__qualname__}")
        if inspect.isclass(value) and issubclass(value, Section):  # their fields are the page of settings
            lines[-1] += "\n    options: { members: false }"
    return "\n\n".join(lines) + "\n"


def _public(module: str) -> list[Any]:
    """The classes and functions that a module offers, apart from those that an earlier page has."""
    earlier = [name for name in ROOMS if list(ROOMS).index(name) < list(ROOMS).index(module)]
    seen = {id(value) for name in earlier for value in _offered(name)}
    return [value for value in _offered(module) if id(value) not in seen]


def _offered(module: str) -> list[Any]:
    """What a package imports in its ``__init__``, or a module defines; of the settings, only the whole."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or dict.fromkeys([*vars(loaded), *getattr(loaded, "_MODULES", {})])
    values = [getattr(loaded, name, None) for name in names if not name.startswith("_")]
    home = "cohort" if hasattr(loaded, "__path__") else module
    own = [value for value in values if str(getattr(value, "__module__", "")).startswith(home)]
    sections = {kind for _, kind in _sections("", GRPOConfig)}
    return [value for value in own if (inspect.isclass(value) or inspect.isroutine(value)) and value not in sections]


def _prose(text: str) -> str:
    """A docstring as Markdown: its characters are shown, apart from code in backticks."""
    spans = re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    shown = (span if span[:1] == "`" else re.sub(r"([*_>\[\]])", r"\\\1", span.replace("<", "&lt;")) for span in spans)
    return _linked("".join(shown))


def _linked(text: str) -> str:
    """Pages that a text names, as links."""
    return re.sub(
        r"\bdocs/([\w-]+)\.md|'cohort docs ([\w/-]+)'", lambda it: f"[{it[1] or it[2]}](../{it[1] or it[2]}.md)", text
    )
