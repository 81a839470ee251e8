"""TrlParser: flags, YAML files, and mistakes in them."""

import os
from dataclasses import dataclass, field

import pytest

from cohort.errors import ConfigError
from cohort.trl import GRPOConfig, ModelConfig, ScriptArguments, TrlParser


@dataclass
class Training:
    output_dir: str | None = None
    max_steps: int = -1
    warmup_steps: float | None = 0.1
    bf16: bool = True
    reward_weights: list[float] | None = field(default=None)


@pytest.fixture
def parser():
    return TrlParser((ScriptArguments, Training, ModelConfig))


def written(folder, text):
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return str(folder / "recipe.yaml")


def test_flags(parser):
    flags = (
        "--dataset_name rows --max_steps 5 --warmup_steps none --no_bf16 --reward_weights 1 0.5 "
        "--model-name-or-path m --lora_target_modules all-linear --use_peft"
    )
    script, training, model = parser.parse_args_and_config(flags.split())
    assert (script.dataset_name, script.dataset_train_split) == ("rows", "train")
    assert training == Training(None, 5, None, False, [1.0, 0.5])
    assert (model.model_name_or_path, model.use_peft, model.lora_target_modules) == ("m", True, "all-linear")


def test_a_file_gives_defaults_and_flags_override_them(parser, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_TEST", "before")
    path = written(
        tmp_path,
        "max_steps: 7\nwarmup_steps: 1e-1\nreward_weights: [1, 2]\ndtype: bfloat16\nenv: {TRL_TEST: 1}\n",
    )
    _, training, model = parser.parse_args_and_config([f"--config={path}", "--bf16", "false"])
    assert training == Training(None, 7, 0.1, False, [1, 2])
    assert (model.dtype, os.environ["TRL_TEST"]) == ("bfloat16", "1")
    _, training, _ = parser.parse_args_and_config(["--max_steps", "9", "--config", path])
    assert training.max_steps == 9


def test_unknown_arguments_can_be_returned(parser, tmp_path):
    path = written(tmp_path, "max_step: 7\n")
    asked = ["--config", path, "--what", "3"]
    *_, rest = parser.parse_args_and_config(asked, return_remaining_strings=True)
    assert rest == ["--max_step", "7", "--what", "3"]
    *_, of_file, given = parser.parse_args_and_config(
        asked, return_remaining_strings=True, separate_remaining_strings=True
    )
    assert (of_file, given) == (["--max_step", "7"], ["--what", "3"])


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, ["--max_stepps", "5"], "unknown argument 'max_stepps'; did you mean max_steps"),
        ("num_processes: 4", [], "'num_processes' starts processes: give it to accelerate"),
        (None, ["--num-processes", "4"], "accelerate launch --num_processes 2 -m"),
        (None, ["5"], "unknown argument '5': arguments are given as --name value"),
        (None, ["--config"], "--config needs the path of a YAML file"),
        (None, ["--config", "no.yaml"], "cannot read --config no.yaml"),
        ("max_stepps: 5", [], "unknown argument 'max_stepps'; did you mean max_steps"),
        ("a: [", [], "cannot read --config"),
        ("- a", [], "expected keys and values, got list"),
        ("env: 3", [], "env must hold names and values, got 3"),
        ("load_in_4bit: true\nload_in_8bit: true", [], "exclude each other"),
    ],
)
def test_mistakes(parser, tmp_path, text, arguments, message):
    arguments = [*arguments, *(["--config", written(tmp_path, text)] if text else [])]
    with pytest.raises(ConfigError, match=message):
        parser.parse_args_and_config(arguments)


def test_a_value_of_the_wrong_type(parser, tmp_path, capsys):
    for arguments in (["--max_steps", "ten"], ["--config", written(tmp_path, "max_steps: ten")]):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args_and_config(arguments)
        assert "argument --max_steps" in capsys.readouterr().err


def test_a_field_named_config():
    @dataclass
    class Own:
        config: str = ""

    with pytest.raises(ConfigError, match="Own has a field 'config'"):
        TrlParser(Own)


def test_defaults_are_not_given():
    """The parser turns some defaults into others of the same meaning."""
    (args,) = TrlParser(GRPOConfig).parse_args_and_config(["--output_dir", "run", "--use_cpu"])
    assert args.given == {"output_dir", "use_cpu"}
