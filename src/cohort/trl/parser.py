"""``TrlParser``: arguments of a script from the command line and from a YAML file."""

from __future__ import annotations

import os
import sys
import types
import typing
from argparse import Action
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from cohort.errors import ConfigError, did_you_mean

OF_ACCELERATE = ("accelerate_config", "config_file", "main_process_port", "multi_gpu", "num_machines", "num_processes")
"""Arguments that ``trl grpo`` passes on to ``accelerate launch``."""


class TrlParser(HfArgumentParser):  # type: ignore[misc]  # transformers is not typed here
    """Parses arguments into dataclasses, as ``transformers.HfArgumentParser`` does, with defaults from a YAML file.

    The file follows ``--config``. Arguments override it. Its key ``env`` holds environment variables to set. Numbers
    and other values that are not text are set to None by "none" or "null".

    Args:
        dataclass_types: one or several dataclasses. None may have a field ``config``.
        named: arguments of ``argparse.ArgumentParser``.

    Raises:
        ConfigError: a dataclass has a field ``config``.
    """

    def __init__(self, dataclass_types: Any = None, **named: Any) -> None:
        if dataclass_types is None:
            dataclass_types = []
        kinds = list(dataclass_types) if isinstance(dataclass_types, Iterable) else [dataclass_types]
        for kind in kinds:
            if "config" in kind.__dataclass_fields__:
                raise ConfigError(f"{kind.__name__} has a field 'config', the name of the YAML file's flag: rename it")
        super().__init__(dataclass_types=kinds, **named)
        for kind in kinds:
            self._accept_none(kind)

    def _accept_none(self, kind: Any) -> None:
        """Let the flags of a dataclass's optional fields read "none" as None, except for text."""
        hints = typing.get_type_hints(kind)
        for one in fields(kind):
            hint = hints[one.name]
            optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in hint.__args__
            action = self._option_string_actions.get(f"--{one.name}")
            if optional and action is not None and str not in hint.__args__ and action.type not in (None, str):
                action.type = _or_none(action.type)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses, in the order of ``dataclass_types``.

        Args:
            args: the command line. None: ``sys.argv``.
            return_remaining_strings: append the list of unknown arguments instead of refusing them.
            fail_with_unknown_args: refuse unknown keys of the YAML file.
            separate_remaining_strings: append two lists: from the file, and from the command line.

        Raises:
            ConfigError: the file cannot be read; or an argument or key is unknown.
        """
        given, path = _without_config(sys.argv[1:] if args is None else list(args))
        from_file = [] if path is None else self._read(path)
        *parsed, rest = self.parse_args_into_dataclasses(args=given, return_remaining_strings=True)
        if return_remaining_strings:
            return (*parsed, from_file, rest) if separate_remaining_strings else (*parsed, from_file + rest)
        if fail_with_unknown_args and from_file:
            raise ConfigError(f"{path}: {self._unknown(from_file)}")
        if rest:
            raise ConfigError(self._unknown(rest))
        return tuple(parsed)

    def _read(self, path: str) -> list[str]:
        """Set variables and defaults from a YAML file; its unknown keys, as arguments."""
        import yaml  # type: ignore[import-untyped]  # transformers requires it

        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read --config {path}: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"--config {path}: expected keys and values, got {type(content).__name__}")
        variables = content.pop("env", {})
        if not isinstance(variables, dict):
            raise ConfigError(f"--config {path}: env must hold names and values, got {variables!r:.60}")
        os.environ.update({str(name): str(value) for name, value in variables.items()})
        return self.set_defaults_with_config(**{str(key): value for key, value in content.items()})

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Replace defaults, those of subparsers included. An argument with a new default is no longer required. One
        value for a list is a list of it.

        Returns:
            The unknown ones, as arguments: ["--name", "value"].
        """
        known = {action.dest: action for action in _actions(self)}
        for action in _actions(self):
            if action.dest in values:
                value = values[action.dest]
                is_one = action.nargs == "+" and value is not None and not isinstance(value, list | tuple)
                action.default, action.required = [value] if is_one else value, False
        return [text for key in values.keys() - known.keys() for text in (f"--{key}", str(values[key]))]

    def _unknown(self, arguments: Sequence[str]) -> str:
        names = [text.lstrip("-").partition("=")[0] for text in arguments if text.startswith("--")]
        if not names:
            return f"unknown argument {arguments[0]!r}: arguments are given as --name value"
        name, known = names[0].replace("-", "_"), {action.dest for action in _actions(self)}
        if name in OF_ACCELERATE:
            return (
                f"{name!r} starts processes: give it to accelerate, as in accelerate launch --num_processes 2 -m MODULE"
            )
        return f"unknown argument {names[0]!r}{did_you_mean(name, sorted(known))}"


def _actions(parser: Any) -> list[Action]:
    """The arguments of a parser and of its subparsers."""
    found: list[Action] = []
    for action in parser._actions:
        subparsers = action.choices.values() if action.nargs == "A..." else ()  # argparse.PARSER
        found += [inner for subparser in subparsers for inner in _actions(subparser)] or [action]
    return found


def _without_config(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without ``--config PATH`` or ``--config=PATH``, and the path."""
    for at, text in enumerate(arguments):
        if text == "--config":
            if at + 1 == len(arguments):
                raise ConfigError("--config needs the path of a YAML file")
            return arguments[:at] + arguments[at + 2 :], arguments[at + 1]
        if text.startswith("--config="):
            return arguments[:at] + arguments[at + 1 :], text.removeprefix("--config=")
    return arguments, None


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() in ("none", "null") else convert(text)

    read.__name__ = getattr(convert, "__name__", "value")  # named in argparse's messages
    return read
