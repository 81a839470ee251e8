"""The command line: GSM8K end to end, and the mistakes of newcomers, which are reported before the first sample."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet
import pytest

from cohort.cli import main
from cohort.data.source import read_source
from cohort.flags import EvalFlags, GenerateFlags
from cohort.presets import PRESETS
from cohort.report.console import Display
from cohort.rewards.mathematics import gsm8k
from cohort.rollout import LocalEngine
from tests.conftest import GSM8K, tiny_llama
from tests.data.templates import byte_tokenizer

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "gsm8k" / "config.toml"


ROLES = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer(ROLES, bos=False)
    tokenizer.save_pretrained(path)
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2048}
    tiny_llama(**shape).save_pretrained(path)
    return path


@pytest.fixture
def gsm8k_command(model_folder, tmp_path, monkeypatch):
    """``cohort train examples/gsm8k/config.toml`` with a small model, from the repository's root."""
    monkeypatch.chdir(ROOT)
    return [
        *("train", str(EXAMPLE), "--model.path", str(model_folder), "--run.output_dir", str(tmp_path / "run")),
        *("--data.train", str(GSM8K / "train.jsonl"), "--data.eval", str(GSM8K / "test.jsonl")),
        *("--data.eval_rows", "4", "--run.max_steps", "2", "--rollout.prompts_per_step", "2"),
        *("--rollout.num_generations", "3", "--rollout.max_completion_length", "8", "--optim.warmup_steps", "1"),
    ]


def test_the_example_names_data_that_every_clone_finds(monkeypatch):
    import datasets

    data, asked = tomllib.loads(EXAMPLE.read_text())["data"], []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((*a, k["split"])) or [{"question": "1"}])
    for name, split in ((data["train"], "train"), (data["eval"], "test")):
        assert read_source(name, name, split)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


needs_gsm8k = pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not beside the repository")


@needs_gsm8k
def test_gsm8k_runs_end_to_end_on_its_real_rows(gsm8k_command, tmp_path, capsys):
    assert main(gsm8k_command) == 0
    output = capsys.readouterr().out
    assert "2 prompts x 3 = 6 completions per rollout, 1 update each" in output
    assert "<|system|>Solve the problem step by step." in output
    assert "3,736.5 rollouts per epoch on 7,473 prompts; 2 rollouts" in output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert "eval/rewards/gsm8k/mean" in steps[-1]
    assert "evaluation before training: reward 0.000 (0.000 to " in output
    assert "evaluation after step 2: reward 0.000" in output
    assert "done: 0 updates on 12 completions" in output  # no completion of a random model is right: nothing to learn
    assert "nothing was learned; no update had a gradient: every group has equal rewards" in output
    raw = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    rows = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-1.parquet").to_pylist()
    assert len(rows) == 6
    for row in rows:
        question = raw[row["row"]]["question"]
        assert row["prompt"].endswith(f"<|user|>{question}<|end|><|assistant|>")
        assert row["reward"] == gsm8k(row["completion"], raw[row["row"]]["answer"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["updates"], summary["completions"], summary["steps"]) == (0, 12, 2)


@needs_gsm8k
def test_resume_from_the_command_line(gsm8k_command, tmp_path, capsys):
    command = [*gsm8k_command, "--data.eval", "", "--data.train_rows", "9"]
    assert main(command) == 0
    assert main(command) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main([*command, "--resume", "--run.max_steps", "3"]) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


@pytest.fixture
def good(tmp_path, model_folder, monkeypatch):
    """A valid run of one step, for tests that break one thing."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    (tmp_path / "reward.py").write_text(
        "def ok(completions, **_): return [0.0] * len(completions)\n"
        "def needs(completions, gold): return [0.0] * len(completions)\n"
        "def short(completions, **_): return [0.0]\n"
        "def crash(completions, **_): raise RuntimeError('boom')\n"
        "def text(completions, **_): return ['good'] * len(completions)\n"
    )
    (tmp_path / "config.toml").write_text(
        f"[model]\npath = '{model_folder}'\n[data]\ntrain = 'data.jsonl'\n[reward]\nfunctions = ['reward.py:ok']\n"
        "[rollout]\nprompts_per_step = 2\nnum_generations = 2\nmax_completion_length = 4\n"
        "[run]\noutput_dir = 'out'\nmax_steps = 1\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rollout.num_generation 4", "did you mean --rollout.num_generations?"),
        ("--data.train nope.jsonl", "nope.jsonl"),
        ("--data.train=", "set data.train"),
        ("--data.prompt_column question", "no column 'question'; the row has: prompt, answer"),
        ("--rollout.prompts_per_step 10", "9 prompts, fewer than one step"),
        ("--reward.functions reward.py:nope", "it has: ok, needs, short, crash, text"),
        ("--reward.functions []", "set reward.functions"),
        ("--reward.functions reward.py:needs", "needs the argument 'gold'; it can have: prompt, answer"),
        ("--reward.functions reward.py:short", "one reward per completion: 4, got 1"),
        ("--reward.functions reward.py:crash", "raised RuntimeError: boom"),
        ("--model.path ./nope", "/nope"),
        ("--model.path=", "set model.path"),
        ("--model.path bare", "holds no tokenizer"),
        ("--model.path torn", "cannot load a causal language model"),
        ("--rollout.max_completion_length 5000", "no room for a prompt in the model's context of 2,048"),
        ("--resume", "there is no run folder"),
        ("--data.train empty.jsonl", "row 1: the prompt is empty"),
        ("--run.output_dir full", "full is not empty"),
        ("--run.output_dir data.jsonl", "data.jsonl is a file"),
        ("--run.output_dir /proc/nowhere", "cannot write to run.output_dir"),
    ],
)
def test_mistakes_are_reported_before_the_first_sample(good, arguments, message, model_folder, capsys, monkeypatch):
    (good / "full").mkdir()
    (good / "full" / "notes.txt").write_text("mine")
    (good / "empty.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    tiny_llama().save_pretrained(good / "bare")
    shutil.copytree(model_folder, good / "torn")
    (good / "torn" / "model.safetensors").write_bytes(b"torn")
    monkeypatch.setattr(LocalEngine, "generate", lambda *a: pytest.fail("sampled"))
    code = 1 if "/proc" in arguments else 2  # a folder that cannot be written is not the user's mistake
    assert main(["train", "config.toml", *arguments.split()]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (good / "out").exists()


def test_a_run_needs_no_file_of_settings(good, model_folder, capsys):
    """``cohort train --model.path ...`` was answered with "Unknown option: --model.path"."""
    assert main(["train"]) == 2
    assert "no settings: give a TOML file" in capsys.readouterr().err
    settings = f"--model.path {model_folder} --data.train data.jsonl --reward.functions reward.py:ok --run.max_steps 0"
    assert main(["train", *settings.split()]) == 2
    assert "run.max_steps: input should be greater than or equal to 1" in capsys.readouterr().err


@pytest.mark.parametrize("save_steps", ["1", "0"])
def test_an_interrupted_run_says_what_is_left(good, capsys, monkeypatch, save_steps):
    def interrupt(self, metrics):
        raise KeyboardInterrupt

    monkeypatch.setattr(Display, "show", interrupt)
    assert main(["train", "config.toml", "--run.save_steps", save_steps, "--run.max_steps", "2"]) == 130
    assert "a checkpoint of step 1: continue with 'cohort resume" in capsys.readouterr().err


def test_a_run_outlasts_the_reader_of_its_output(good, capsys, monkeypatch):
    """As in ``cohort train | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["train", "config.toml"]) == 0
    assert (good / "out" / "summary.json").exists()
    assert capsys.readouterr().err == "cohort: standard output is closed; the run goes on\n"


def test_config_prints_every_setting(capsys):
    assert main(["config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["rollout"]["num_generations"] == 8


def test_version_and_unknown_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("cohort 0.")
    assert main(["demo", "--sed", "1"]) == 2
    assert capsys.readouterr().err == "cohort: error: Unknown option: --sed. Did you mean --seed?\n"
    assert main(["trian"]) == 2
    assert 'Did you mean "train"?' in capsys.readouterr().err


def test_help_shows_the_commands_of_the_first_hour_first_and_each_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    first, more = capsys.readouterr().out.split("More commands")
    names = re.findall(r"^│ ([\w-]*)", first, re.MULTILINE)
    assert names == ["new", "train", "resume", "watch", "report", "eval", "generate", "export", "doctor"]
    assert "" not in re.findall(r"^│ ([\w-]*)", more, re.MULTILINE)


@pytest.mark.parametrize("flags", [GenerateFlags, EvalFlags])
def test_help_describes_every_flag(capsys, flags, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["generate" if flags is GenerateFlags else "eval", "--help"]) == 0
    output = capsys.readouterr().out
    for field in dataclasses.fields(flags):
        assert re.search(rf"│ --{field.name.replace('_', '-')} .*[a-z]{{3}}", output), field.name


@pytest.mark.parametrize(("command", "words"), [("train", "--section.key value"), ("objective", "--set PART=VALUE...")])
def test_help(capsys, command, words):
    assert main([command, "--help"]) == 0
    assert words in capsys.readouterr().out


def test_the_installed_command_exits_with_2_and_no_traceback(tmp_path):
    code = "import sys; from cohort.cli import main; sys.exit(main(['train', 'nope.toml']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "cohort: error: no config file nope.toml"


@pytest.mark.parametrize(
    ("statement", "modules"),
    [
        ("import cohort", "torch transformers pydantic cyclopts"),
        ("from cohort.cli import main; main(['generate', '--help'])", "torch transformers pydantic datasets"),
    ],
)
def test_importing_the_package_and_help_are_fast(statement, modules):
    code = f"{statement}; import sys; sys.exit(any(module in sys.modules for module in {modules.split()}))"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_objective_lists_every_preset(capsys):
    assert main(["objective"]) == 0
    output = capsys.readouterr().out
    for row in PRESETS.values():
        assert f"{row.identity} " in output
        assert row.summary in output


def test_objective_explains_one_with_changes(capsys):
    assert main(["objective", "dapo", "--set", "trust_region.high=1.4", "beta=0.01", "scale=none"]) == 0
    output = capsys.readouterr().out
    assert "objective dapo@1" in output
    changed = "scale group_std (ddof 1, epsilon 1e-06) -> none, trust_region.high 1.28 -> 1.4, kl.beta 0"
    assert f"changed      {changed}" in output
    ratios, up, down = (line[11:].split() for line in output.splitlines()[-3:])
    table = {float(ratio): [one, other] for ratio, one, other in zip(ratios, up, down, strict=True)}
    assert table[1.4] == ["1.4", "-1.4"]  # no clipping at the bound itself
    assert table[1.5] == ["0", "-1.5"]
    assert main(["objective", "gspo", "--set", "minibatches=2"]) == 0
    output = capsys.readouterr().out
    assert "updates      2 minibatches per pass" in output
    assert "changed      minibatches 4 -> 2" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("dapoo", "unknown preset 'dapoo'; did you mean dapo"),
        ("dapo@7", "preset dapo has version 1, not '7'"),
        ("dapo --set trust_region.hihg=1", "unknown setting trust_region.hihg; did you mean high?"),
        ("dapo beta", "expected PART=VALUE"),
        ("--set beta=1", "--set needs a preset"),
        ("rloo --set scale=group_std", "would divide beta by the group's spread"),
    ],
)
def test_mistakes_about_objectives_are_reported(capsys, arguments, expected):
    assert main(["objective", *arguments.split()]) == 2
    assert expected in capsys.readouterr().err
