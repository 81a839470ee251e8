"""``cohort replay`` on a run that was trained, and on run folders of every other kind."""

import json
import shutil

import pyarrow.parquet
import pytest

from cohort.cli import main
from cohort.config import GRPOConfig, to_toml
from cohort.errors import CohortError, RunFolderError
from cohort.replay import command
from cohort.replay.command import Request, replay, result_name
from cohort.runs.tables import write_table
from tests.conftest import tiny_llama
from tests.replay.steps import FACTS, made_up_step
from tests.replay.test_coefficients import TWO
from tests.train.harness import ROWS, make_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_tokenizer):
    """A run of two steps, each with 2 x 2 updates, and its initial model."""
    folder = tmp_path_factory.mktemp("trained")
    model = tiny_llama(vocab_size=len(demo_tokenizer), num_hidden_layers=1, hidden_size=8, intermediate_size=8)
    model.save_pretrained(folder / "model")
    demo_tokenizer.save_pretrained(folder / "model")
    settings = {"save_steps": 1, "minibatches": 2, "num_iterations": 2, "beta": 0.05, "lr_scheduler_type": "linear"}
    make_trainer(demo_tokenizer, folder / "run", model=str(folder / "model"), rows=ROWS[:8], **settings).train()
    return folder / "run"


@pytest.fixture
def made_up(tmp_path):
    """A run folder with one step of two completions, without what its updates saw of each token."""
    made_up_step(tmp_path, TWO)
    (tmp_path / "config.toml").write_text(to_toml(GRPOConfig(max_completion_length=8)))
    return tmp_path


# A run ----------------------------------------------------------------------------------------------------------------


def test_the_same_objective_changes_nothing(trained):
    found = replay(trained, Request(str(trained), step=2))
    assert found["stored_gap"] == 0
    assert found["identical"]
    assert found["sentence"].startswith("Under the run's own objective nothing changes: all ")
    assert found["weights"] == "checkpoints/step-1"
    assert found["gradient"]["space"] == "parameters"
    assert found["gradient"]["cosine"] == pytest.approx(1, abs=1e-9)  # sums in float64
    assert found["parameters"]["terms"].keys() == {"policy", "kl"}
    assert found["tokens"]["estimated"] == found["tokens"]["changed"] == 0
    stored = pyarrow.parquet.read_schema(trained / "rollouts" / "step-2.parquet").metadata
    updates = json.loads(stored[b"cohort_step"])["updates"]
    norms = [one["norm_run"] for one in found["parameters"]["updates"]]
    assert norms == pytest.approx([one["grad_norm"] for one in updates[:2]], rel=1e-5)  # float32, in another order


def test_the_first_step_begins_with_the_initial_model(trained):
    found = replay(trained, Request(str(trained), step=1, changes=["beta=0"]))
    assert found["stored_gap"] == 0
    assert found["weights"].startswith("the initial model, ")
    assert found["objective"] == {
        "run": "default@1",
        "replay": "the run's objective with beta=0",
        "changes": ["kl.beta 0.05 -> 0"],
    }


def test_the_command_without_weights(trained, tmp_path, capsys):
    shutil.copytree(trained, copy := tmp_path / "run", ignore=shutil.ignore_patterns("step-1"))
    assert main(["replay", str(copy), "--objective", "dr_grpo"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Under dr_grpo, ")
    assert "the run has no checkpoint of step 1, whose weights step 2 began with; it has those of steps 2" in printed
    found = json.loads((copy / "replays" / "step-2-dr_grpo.json").read_text())
    assert (found["gradient"]["space"], found["parameters"], found["weights"]) == ("logits", None, None)
    assert found["strongest"][0]["text"] is not None  # by the tokenizer of another checkpoint
    assert main(["replay", str(copy), "--objective", "dr_grpo", "--no-model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


def test_a_damaged_checkpoint_leaves_the_logits(trained, tmp_path):
    shutil.copytree(trained, copy := tmp_path / "run", ignore=shutil.ignore_patterns("step-2", "replays"))
    weights = copy / "checkpoints" / "step-1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = replay(copy, Request("", step=2, objective="dr_grpo"))
    assert found["weights"] is None
    assert any("compared in the space of the logits" in note and "model.safetensors" in note for note in found["notes"])


def test_another_reference_is_the_initial_model(tmp_path, trained, demo_tokenizer):
    """The run had beta 0: the reference's log-probs are computed with the initial model."""
    model = trained.parent / "model"
    make_trainer(demo_tokenizer, tmp_path / "run", model=str(model), max_steps=2, save_steps=1).train()
    found = replay(tmp_path / "run", Request("", changes=["beta=0.1"]))
    assert found["parameters"]["terms"]["kl"]["norm_replay"] > 0
    assert found["parameters"]["terms"]["kl"]["norm_run"] == 0
    with pytest.raises(RunFolderError, match="none for 125 of the 125 .*: the run's beta was 0"):
        replay(tmp_path / "run", Request("", changes=["beta=0.1"], no_model=True))


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_term_without_coefficients_is_a_change(made_up):
    found = replay(made_up, Request("", changes=["entropy.coefficient=0.1"]))
    assert found["tokens"]["changed"] == 0
    assert not found["identical"]
    assert any("the other objective has a term over the whole vocabulary" in note for note in found["notes"])


def test_what_an_objective_does_to_rewards_is_said(made_up):
    request = Request("", objective=None, changes=["soft_overlong.cache_share=1.0", "soft_overlong.max_length=4"])
    found = replay(made_up, request)
    lengths = [len(ids) for ids in pyarrow.parquet.read_table(made_up / "rollouts" / "step-1.parquet")["token_ids"]]
    longer = sum(length > 0 for length in lengths)
    assert [note for note in found["notes"] if "soft_overlong" in note] == [
        "the other objective has soft_overlong, which lowers the rewards of completions of more than 0 tokens: "
        f"{longer} of {len(lengths)} here. Rewards in these tables are those without it"
    ]


def test_log_probs_that_are_not_stored_are_estimated(made_up):
    found = replay(made_up, Request("", objective="dr_grpo"))
    assert found["gradient"]["cosine"] == pytest.approx(1)
    assert found["stored_gap"] is None
    assert "those of the sampler" in found["notes"][-1]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"step": 7}, "has no rollouts/step-7.parquet: the stored steps are 1"),
        ({"objective": "dr_grop"}, "unknown preset 'dr_grop'; did you mean dr_grpo"),
        ({"changes": ["learning_rate=1"]}, "learning_rate is not a part of an objective but a setting of a run"),
        ({"changes": ["scale"]}, "expected PART=VALUE"),
    ],
)
def test_bad_requests(made_up, request_, message):
    with pytest.raises(CohortError, match=message):
        replay(made_up, Request("", **request_))


def test_nothing_is_written_through_links(made_up, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "file").touch()
    (made_up / "replays").symlink_to(other)
    assert main(["replay", str(made_up)]) == 2
    assert [path.name for path in other.iterdir()] == ["file"]


def test_code_of_strangers_does_not_run(made_up):
    config = GRPOConfig(max_completion_length=8, functions=["rewards.py:score"], baseline="evil.py:baseline")
    (made_up / "config.toml").write_text(to_toml(config))
    with pytest.raises(
        RunFolderError, match=r"(?s)name code, this account has not run.*objective.baseline: evil.py"
    ) as error:
        replay(made_up, Request(""))
    assert "rewards.py" not in str(error.value)  # a replay calls no reward function


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["reward"]), "it has no column reward"),
        (lambda table: table.slice(0, 0), "it holds no completions"),
        (lambda table: table.set_column(0, "group", table["token_ids"]), "column 'group' holds list"),
        (lambda table: table.append_column("segment_lengths", [[[2], [1]]]), "does not fit token_ids"),
        (lambda table: table.append_column("logps", [[[1.0, 2.0], [1.0]]]), "does not fit"),
        (lambda table: table.append_column("logps", [[[-float("inf")], [1.0]]]), "a number of a token is infinite"),
        (lambda table: table.replace_schema_metadata({"cohort_store_version": "9"}), "of a newer Cohort"),
    ],
)
def test_damaged_steps(made_up, change, message):
    path = made_up / "rollouts" / "step-1.parquet"
    write_table(change(pyarrow.parquet.read_table(path)), path)
    with pytest.raises(RunFolderError, match=message):
        replay(made_up, Request(""))


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder"):
        replay(tmp_path, Request(""))
    (tmp_path / "config.toml").write_text(to_toml(GRPOConfig()))
    with pytest.raises(RunFolderError, match="no run was started here"):
        replay(tmp_path, Request(""))
    (tmp_path / "starts.jsonl").touch()
    with pytest.raises(RunFolderError, match="has no rollouts"):
        replay(tmp_path, Request(""))


def test_a_name_for_a_file():
    assert result_name(Request("", objective="gspo@1", changes=["scale=none"])) == "gspo@1+scale=none"
    assert result_name(Request("", name="../../x y")) == "x-y"
    assert result_name(Request("", name="..")) == "replay"


def test_an_objective_with_a_hidden_secret_is_refused(made_up):
    config = GRPOConfig(
        max_completion_length=8, baseline="mine.py:make(api_key='sk-abc')", functions=["b.py:s(token='x')"]
    )
    (made_up / "config.toml").write_text(to_toml(config))
    with pytest.raises(RunFolderError, match=r"has \*\*\* in place of a secret in objective.baseline, so") as error:
        replay(made_up, Request("", trust=str(made_up)))
    assert "reward" not in str(error.value)


def test_where_the_result_goes_is_checked_first(made_up, monkeypatch, capsys):
    monkeypatch.setattr(command, "replay", None)  # no work is done
    (made_up / "replays").touch()
    assert main(["replay", str(made_up)]) == 2
    assert "replays is not a folder" in capsys.readouterr().err
    (made_up / "replays").unlink()
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)
    assert main(["replay", str(made_up)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_json_is_printed_even_if_the_disk_is_full(made_up, monkeypatch, capsys):
    def full(path, text):
        raise OSError("no space left")

    monkeypatch.setattr(command, "write_atomically", full)
    assert main(["replay", str(made_up), "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step"] == 1
    assert "no space left" in printed.err


def test_groups_that_are_not_stored_are_said(made_up):
    path = made_up / "rollouts" / "step-1.parquet"
    table = pyarrow.parquet.read_table(path)
    write_table(table.replace_schema_metadata({"cohort_step": json.dumps(FACTS | {"groups": 3})}), path)
    assert "1 of 3 groups are stored" in replay(made_up, Request(""))["notes"][0]
