"""Run folders from strangers: their settings run nothing, and nothing is written through links in them."""

import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

from cohort.cli import main
from cohort.config import GRPOConfig, Source, load_config, to_toml
from cohort.config.schema import marks_of, subsection
from cohort.errors import RunFolderError
from cohort.evaluation.command import Request
from cohort.rewards.names import resolve_reward
from cohort.runs.chosen import run_of
from cohort.runs.folder import RunFolder
from cohort.runs.trust import (
    check_code,
    check_files,
    check_secrets,
    code_in,
    remember,
    started_in,
    with_overrides_of_start,
)


@pytest.fixture(autouse=True)
def _an_account_that_has_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("COHORT_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def stranger(folder, **settings):
    """A run folder with these settings that this account has not made."""
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(GRPOConfig(**settings)))
    (folder / "objective.txt").write_text("GRPO")
    return folder


CODE = {
    "reward.functions": {"reward": {"functions": ["os:system"]}},
    "reward.functions 2": {"reward": {"functions": ["code(allow_unsandboxed=True)"]}},
    "environment.tools": {"environment": {"tools": ["mcp:touch ran"]}},
    "environment.factory": {"environment": {"factory": {"a": "world.py:World"}}},
    "environment.history": {"environment": {"history": "history.py:rewrite"}},
    "environment.parser": {"environment": {"parser": "parser.py:calls"}},
    "data.filter": {"data": {"filter": "keep.py:keep"}},
    "data.eval": {"data": {"eval": {"a": [{"path": "rows.jsonl", "filter": "keep.py:keep"}]}}},
    "objective.baseline": {"objective": {"baseline": "mine.py:baseline"}},
    "objective.trust_region": {"objective": {"trust_region": "mine:phi"}},
    "model.trust_remote_code": {"model": {"path": "org/model", "trust_remote_code": True}},
    "model.allow_pickled_weights": {"model": {"path": "org/model", "allow_pickled_weights": True}},
    "vllm.arguments": {"rollout": {"engine": "vllm"}, "vllm": {"arguments": {"logits_processors": ["os:system"]}}},
    "server.url": {"rollout": {"engine": "server"}, "server": {"url": "http://10.0.0.1:8000"}},
    "server.folder": {"rollout": {"engine": "server"}, "server": {"folder": "/home/me"}},
}


@pytest.mark.parametrize("setting", CODE)
def test_every_setting_that_names_code_is_refused_until_it_was_run_here(setting, tmp_path):
    run = stranger(tmp_path / "run", **CODE[setting])
    config = load_config(run / "config.toml", of_run=True)
    name = setting.partition(" ")[0]
    with pytest.raises(RunFolderError, match=rf"(?s){name}: .*\n.*Nothing was run.* give --trust {run}"):
        check_code(run, config, None)
    check_code(run, config, str(run))
    check_code(run, config, None, given={setting for setting, _ in code_in(config)})  # the user has named other code
    with pytest.raises(RunFolderError, match="Nothing was run"):  # nothing of this is remembered
        check_code(run, config, None)
    remember(run)
    check_code(run, config, None)
    (run / "config.toml").write_text((run / "config.toml").read_text() + "\n")
    with pytest.raises(RunFolderError, match="Nothing was run"):
        check_code(run, config, None)


def test_settings_without_code_of_a_stranger():
    config = GRPOConfig(
        reward={"functions": ["math", "soft_overlong(max_length=8, buffer=2)", "regex(pattern='a:b')", "org/judge"]},
        environment={"tools": ["python", "calculator"]},
        data={"train": [{"path": "org/rows", "filter": {"when": "10:30"}}], "filter": {"level": "hard:3"}},
        objective={"preset": "dapo"},
    )
    assert code_in(config) == []


@pytest.mark.parametrize("spec", ["a(1)/evil.py:f", "evil.py:f(x=1)", "judge(allow_pickled_weights=True)"])
def test_a_reward_is_known_by_what_would_be_loaded(spec):
    assert code_in(GRPOConfig(reward={"functions": [spec]})) == [("reward.functions", spec)]


# Settings with texts that name neither a file nor code, nor run anything.
HARMLESS = {
    *("model.revision", "model.device", "model.lora.target_modules", "model.lora.modules_to_save"),
    *("data.train_split", "data.eval_split", "data.columns", "data.select", "data.curriculum", "data.prompt_column"),
    *("data.prompt_template", "data.system_prompt", "data.chat_template_kwargs", "data.template_time"),
    *("rollout.regex", "rollout.stop", "optim.lr_scheduler_kwargs", "eval.success", "eval.metric_for_best_model"),
    *("run.output_dir", "report.tracker_project", "report.skip_checks"),
    *("source.name", "source.split", "source.columns", "source.select", "source.prompt_column"),
    *("source.prompt_template", "source.system_prompt", "source.chat_template_kwargs"),
}


def test_every_setting_with_texts_has_a_mark_or_is_known_to_be_harmless():
    """A new setting that names code must not run it for a stranger."""
    marks = {**marks_of(GRPOConfig), **{f"source.{name}": mark for name, mark in marks_of(Source).items()}}
    fields = {f"source.{name}": field for name, field in Source.model_fields.items()}

    def walk(schema, above=""):
        for name, field in schema.model_fields.items():
            inner = subsection(field.annotation)
            yield from walk(inner, f"{above}{name}.") if inner else [(f"{above}{name}", field)]

    fields |= dict(walk(GRPOConfig))
    assert fields.keys() == marks.keys()
    with_texts = {name for name, field in fields.items() if re.search(r"\bstr\b|Any|object", repr(field.annotation))}
    assert "reward.functions" in with_texts
    marked = {name for name in with_texts if marks[name].file or marks[name].runs}
    assert with_texts - marked == HARMLESS
    permits = {name for name in marks if re.search(r"\.(trust_remote|allow)_", name)}
    assert permits == {name for name in marks if marks[name].runs == "permit"} != set()


def test_known_code_is_a_file_not_a_name(tmp_path, monkeypatch):
    """A module is looked for where the run was started, wherever the next command runs: another working directory may
    have one of the same name."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for place in ("mine", "theirs"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "score_of_a_test.py").write_text(f"def f(completions, **_):\n    return ['{place}']\n")
    run = stranger(tmp_path / "run", reward={"functions": ["score_of_a_test:f"]})
    monkeypatch.chdir(tmp_path / "mine")
    remember(run)
    monkeypatch.chdir(tmp_path / "theirs")
    assert started_in(run) == tmp_path / "mine"
    config = load_config(run / "config.toml", of_run=True)
    check_code(run, config, None)
    assert resolve_reward(*config.reward.functions)(completions=[""]) == ["mine"]


REMOTE = {"model": {"path": "org/model", "trust_remote_code": True}}


def test_a_run_is_known_at_its_place(tmp_path, monkeypatch):
    """The same settings elsewhere are another's: their checkpoints may bring other code for the same flags."""
    remember(mine := stranger(tmp_path / "mine", **REMOTE))
    run = stranger(tmp_path / "run", **REMOTE)
    with pytest.raises(RunFolderError, match=r"model.trust_remote_code: org/model\nNothing"):
        check_code(run, GRPOConfig(**REMOTE), None)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_code(mine, GRPOConfig(**REMOTE), None)
    (tmp_path / "link").symlink_to(mine)
    check_code(tmp_path / "link", GRPOConfig(**REMOTE), None)
    mine.rename(tmp_path / "moved")
    with pytest.raises(RunFolderError, match="Nothing was run"):
        check_code(tmp_path / "moved", GRPOConfig(**REMOTE), None)


def test_a_model_to_compare_with_has_not_the_rights_of_the_run(tmp_path, monkeypatch):
    remember(mine := stranger(tmp_path / "mine", **REMOTE))
    stranger(tmp_path / "theirs")
    (mine / "best").mkdir()
    (mine / "downloaded").mkdir()
    flags = {"data": ("rows.jsonl",), "reward": ("math",)}
    for overrides, allowed in (((), False), (("--model.trust_remote_code", "true"), True)):
        request = Request(model="mine", against="theirs", overrides=overrides, **flags)
        settings = request.settings()
        expected_of = {
            "theirs": allowed,
            "org/other": allowed,
            "mine/downloaded": allowed,
            "mine": True,
            "mine/best": True,
        }
        for name, expected in expected_of.items():
            assert request.settings_for(name, settings).model.trust_remote_code is expected
    monkeypatch.chdir(mine)
    assert run_of(Path("org/other")) is None  # a hub id is not a folder in the run
    assert run_of(Path("best")) == Path()


@pytest.mark.parametrize(
    ("override", "settings", "mine", "named"),
    [
        ("environment.factory.a", CODE["environment.factory"], {}, "environment.factory: world.py:World"),
        ("model.path", {"model": {"path": "org/evil"}}, REMOTE, "model.trust_remote_code: org/evil"),
        ("model.revision", {"model": {"revision": "refs/pr/1"}}, REMOTE, "model.trust_remote_code: org/model"),
    ],
)
def test_a_part_of_an_override_stands_for_the_whole(tmp_path, override, settings, mine, named):
    run = stranger(tmp_path / "run", **settings)
    (run / "starts.jsonl").write_text(json.dumps({"folder": "", "overrides": [override], "missing": {}}) + "\n")
    with pytest.raises(RunFolderError, match=named):
        with_overrides_of_start(GRPOConfig(**mine, run={"output_dir": str(run)}), ())


def test_a_resumed_run_is_known_with_the_code_that_it_goes_on_with(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.start(GRPOConfig(), "")
    config = GRPOConfig(reward={"functions": ["other.py:f"]})
    folder.resume(config, 0)
    check_code(folder.path, config, None)
    folder.close()


def test_cohort_eval_runs_nothing_of_a_strangers_run(tmp_path, capsys, demo_model_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\ndef f(completions, **_): ...\n")
    run = stranger(
        tmp_path / "run",
        model={"path": demo_model_path},
        data={"eval": str(tmp_path / "rows.jsonl")},
        reward={"functions": ["evil.py:f", "os:system(command='touch ran')"]},
    )
    assert main(["eval", str(run)]) == 2
    assert not Path("ran").exists()
    printed = capsys.readouterr().err
    assert "evil.py:f" in printed
    assert f"--trust {run}" in printed
    assert main(["eval", str(run), "--trust", str(tmp_path / "state")]) == 2
    assert "is not the run folder whose settings are used" in capsys.readouterr().err
    assert main(["eval", str(run), "--trust", str(run)]) == 2  # the folder has no model
    assert Path("ran").exists()


def test_cohort_resume_runs_nothing_of_a_strangers_run(tmp_path, capsys, demo_model_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\nf = 3\n")
    settings = {"model": {"path": demo_model_path}, "data": {"train": str(tmp_path / "rows.jsonl")}}
    run = stranger(tmp_path / "run", **settings, reward={"functions": ["evil.py:f"]})
    (run / "starts.jsonl").write_text(
        json.dumps({"folder": str(tmp_path), "overrides": ["reward.functions"], "missing": {}}) + "\n"
    )
    assert main(["resume", str(run)]) == 2
    assert (
        f"reward.functions: evil.py:f\nNothing was run. If you know this code, give --trust {run}"
        in capsys.readouterr().err
    )
    # The same when the user's own settings are completed by the overrides that the run folder says it was started with.
    (tmp_path / "mine.toml").write_text(to_toml(GRPOConfig(**settings, run={"output_dir": str(run)})))
    assert main(["train", "mine.toml", "--resume"]) == 2
    assert "reward.functions: evil.py:f" in capsys.readouterr().err
    assert not Path("ran").exists()
    assert main(["resume", "run", "--trust", "run"]) == 2
    assert Path("ran").exists()
    assert "evil.py has no function 'f'" in capsys.readouterr().err


def test_secrets_are_not_written_and_are_asked_for(tmp_path):
    settings = {
        "data": {"train": "https://me:s3cret@host/rows.jsonl?token=s3cret", "system_prompt": "api_key='of the prompt'"},
        "reward": {
            "functions": ["judge.py:f(api_key='s3cret', model='m')", "judge.py:g(key=3, header='Bearer s3cret-s3cret')"]
        },
        "environment": {"tools": ["mcp:API_TOKEN=s3cret npx server --password s3cret --port 3"]},
        "vllm": {"arguments": {"hf_token": "s3cret", "block_size": 32}},
    }
    folder = RunFolder(tmp_path / "run")
    folder.start(GRPOConfig(**settings), "")
    written = (tmp_path / "run" / "config.toml").read_text()
    assert "s3cret" not in written
    saved = load_config(tmp_path / "run" / "config.toml", of_run=True)
    assert saved.data.train == "https://***@host/rows.jsonl?token=***"
    assert saved.data.system_prompt == "api_key='of the prompt'"
    assert saved.reward.functions == ("judge.py:f(api_key='***', model='m')", "judge.py:g(key=3, header='Bearer ***')")
    assert saved.environment.tools == ("mcp:API_TOKEN=*** npx server --password *** --port 3",)
    assert saved.vllm.arguments == {"hf_token": "***", "block_size": 32}
    with pytest.raises(
        RunFolderError, match=r"does not hold the secrets of data.train, vllm.arguments, environment.tools, reward.fun"
    ):
        check_secrets(folder.path, saved)
    check_secrets(folder.path, GRPOConfig(**settings))
    check_code(folder.path, saved, None)  # the settings are known, with whatever secret
    assert not any("s3cret" in record.read_text() for record in (tmp_path / "state").rglob("*") if record.is_file())


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml.part", "checkpoints", "rollouts/step-1.part", "logs"])
def test_nothing_is_written_through_links_out_of_a_run_folder(tmp_path, name):
    run = stranger(tmp_path / "run")
    (run / "rollouts").mkdir()
    (run / "link").symlink_to("rollouts")  # stays inside
    check_files(run)
    (tmp_path / "mine").write_text("mine")
    (run / name).symlink_to(tmp_path / ("mine" if "." in name else "elsewhere"))
    with pytest.raises(RunFolderError, match=f"{name} is a symbolic link to .* lead out"):
        check_files(run)
    with pytest.raises(RunFolderError, match="symbolic link"):
        RunFolder(run).check_resumable(GRPOConfig(), ())
    with pytest.raises(RunFolderError, match="symbolic link"):
        RunFolder(run).take()
    assert not (run / "run.lock").exists()
    linked = tmp_path / "linked"
    linked.symlink_to(run)
    (run / name).unlink()
    check_files(linked)


def test_the_logs_that_lie_in_a_new_run_folder_are_no_links(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    RunFolder(tmp_path / "run").check_free()
    (tmp_path / "run" / "logs" / "rank-1.log").symlink_to(tmp_path / "mine")
    with pytest.raises(RunFolderError, match="symbolic link"):
        RunFolder(tmp_path / "run").check_free()


def test_links_are_found_though_another_process_removes_a_file(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to(tmp_path.parent)
    lstat = Path.lstat

    def removed(path):
        if path.name == "a":
            raise FileNotFoundError(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", removed)
    with pytest.raises(RunFolderError, match="b is a symbolic link"):
        check_files(tmp_path)


def test_a_pipe_in_a_run_folder(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(RunFolderError, match="neither a file nor a folder"):
        check_files(tmp_path)


def test_odd_names_under_checkpoints(tmp_path):
    for name in (
        "step-3",
        "step-²",
        "step-٣",
        "step-07",
        "step--1",
        "step-1e3",
        "step-",
        "step-5.part",
        "step-" + "9" * 60,
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-9").write_text("a file")
    assert RunFolder(tmp_path).checkpoint_steps() == [3]


@pytest.mark.parametrize("text", ["", "[]", "{}", "nan", "\ud800", "[" * 100_000, "\0" * 9])
def test_damaged_files_have_clean_errors(tmp_path, text):
    (tmp_path / "best").mkdir()
    data = text.encode("utf-8", "surrogatepass")
    (tmp_path / "best" / "best.json").write_bytes(data)
    with pytest.raises(RunFolderError, match=r"best\.json is damaged"):
        RunFolder(tmp_path).best_record()
    (tmp_path / "metrics.jsonl").write_bytes(data + b'\n{"step": 1}\n{')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 1, is damaged"):
        RunFolder(tmp_path).evaluations()


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": True}, {"metric": 1}, {"value": "1"}, {"value": math.inf}, {"measured": 0}]
)
def test_a_best_record_has_the_right_types(tmp_path, change):
    record = {"step": 1, "metric": "eval/reward/mean", "value": 0.5, "measured": {}}
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text(json.dumps(record))
    assert RunFolder(tmp_path).best_record() == record
    (tmp_path / "best" / "best.json").write_text(json.dumps(record | change))
    with pytest.raises(RunFolderError, match=f"is damaged: {next(iter(change))}, got"):
        RunFolder(tmp_path).best_record()
