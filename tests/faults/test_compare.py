"""``tests.faults.compare``: the first step and quantity in which two runs part."""

import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

from cohort.errors import RunFolderError
from tests.faults.compare import changed_facts, changed_settings, differences, main, only_in, read_whole
from tests.train.harness import ROWS, make_trainer


@pytest.fixture(scope="module")
def trained(demo_tokenizer, tmp_path_factory):
    """A run of two steps with evaluations and a best model."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    settings = {"eval_rows": ROWS[:2], "metric_for_best_model": "eval/reward/mean", "bootstrap_samples": 100}
    settings |= {"max_steps": 2, "save_steps": 1, "num_generations": 2, "max_completion_length": 4}
    make_trainer(demo_tokenizer, folder, **settings).train()
    return folder


@pytest.fixture
def pair(trained, tmp_path):
    """The run and a copy of it."""
    return read_whole(trained), read_whole(shutil.copytree(trained, tmp_path / "copy"))


def again(pair):
    """The differences, after the copy was changed."""
    return list(differences(pair[0], read_whole(pair[1].path)))


def change_table(path, column, row, change):
    table = pyarrow.parquet.read_table(path)
    values = table.column(column).to_pylist()
    values[row] = change(values[row])
    at = table.column_names.index(column)
    pyarrow.parquet.write_table(table.set_column(at, column, pyarrow.array(values, table.field(at).type)), path)


def change_metrics(run, step, **changes):
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    texts = [json.dumps(line | (changes if line["step"] == step else {})) for line in lines]
    (run.path / "metrics.jsonl").write_text("\n".join(texts) + "\n")


def change_weight(file):
    tensors = load_file(file)
    name = next(name for name in tensors if "up_proj" in name)
    tensors[name].view(-1)[5] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def test_a_copy_is_equal(pair):
    assert list(differences(*pair)) == []
    assert [only_in(*pair), only_in(*pair[::-1]), changed_settings(*pair), changed_facts(*pair)] == [[], [], [], []]


def test_times_are_not_compared(pair):
    change_metrics(pair[1], 1, **{"time": 1.0, "seconds/step": 2.0, "tokens_per_second": 3.0})
    assert again(pair) == []


def test_a_sampled_token(pair):
    change_table(pair[1].path / "rollouts" / "step-2.parquet", "token_ids", 3, lambda ids: [*ids[:-1], ids[-1] + 1])
    (found,) = again(pair)
    assert (found.step, found.quantity) == (2, "rollout: token_ids")
    assert found.detail.startswith("completion 3 (group 5), position ")
    assert found.detail.endswith("; 1 of 8 rows")


def test_the_order_is_that_of_the_computation(pair):
    change_weight(pair[1].path / "checkpoints" / "step-1" / "model.safetensors")
    change_metrics(pair[1], 1, **{"grad_norm": 7.0, "reward/mean": 0.25, "length/mean": 3.5})
    change_table(pair[1].path / "rollouts" / "step-1.parquet", "reward", 0, lambda _: 0.25)
    change_table(pair[1].path / "evaluations" / "step-0.parquet", "completion", 0, lambda text: text + "!")
    change_metrics(pair[1], 2, **{"eval/reward/mean": 0.5})
    assert [(one.step, one.quantity) for one in again(pair)] == [
        (0, "evaluation: completion"),
        (1, "rollout: reward"),
        (1, "metrics: length/mean"),
        (1, "metrics: reward/mean"),
        (1, "metrics: grad_norm"),
        (1, "checkpoint: weights"),
        (2, "metrics: eval/reward/mean"),
    ]


@pytest.mark.parametrize(("where", "quantity"), [("checkpoints/step-2", "checkpoint"), ("best", "best model")])
def test_one_weight(pair, where, quantity):
    name = change_weight(pair[1].path / where / "model.safetensors")
    (found,) = again(pair)
    assert found.quantity == f"{quantity}: weights"
    assert found.detail.startswith(f"{name}: ")
    assert " at 5, 1 of 960 numbers; 1 of " in found.detail


def test_the_state_beside_the_weights(pair):
    file = pair[1].path / "checkpoints" / "step-1" / "state" / "loop.json"
    loop = json.loads(file.read_text())
    loop["cursor"]["position"] += 1
    loop["identity"]["prompts"] = "other"
    file.write_text(json.dumps(loop))
    assert next(str(one) for one in again(pair)) == "step 1, checkpoint: cursor.position: 4 and 5"


def test_nan_equals_nan_and_zero_differs_from_minus_zero(pair):
    for run in pair:
        change_metrics(run, 1, entropy=float("nan"))
    assert list(differences(*map(read_whole, (run.path for run in pair)))) == []
    change_metrics(pair[0], 1, entropy=0.0)
    change_metrics(pair[1], 1, entropy=-0.0)
    (found,) = differences(*map(read_whole, (run.path for run in pair)))
    assert found.detail == "0.0 and -0.0"


def test_the_command(pair, capsys):
    a, b = (str(run.path) for run in pair)
    assert main(a, b) == 0
    assert capsys.readouterr().out == "no difference in what both runs have, up to step 2\n"
    shutil.rmtree(pair[1].path / "checkpoints" / "step-2")
    config = pair[1].path / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1").replace("[reward]", "[reward]\ntimeout = 9"))
    change_metrics(pair[1], 1, **{"reward/mean": 0.25, "grad_norm": 7.0})
    assert main(a, b) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("settings that differ:\n  ")
    assert "  reward.timeout: absent and 9\n" in shown
    assert "  run.seed: 0 and 1\n" in shown
    assert "\nthe runs part in step 1, metrics: reward/mean: " in shown
    assert "then in step 1:\n  metrics: grad_norm: " in shown
    assert shown.endswith("only A has checkpoints/step-2\n")


def test_runs_of_different_length(pair, capsys):
    b = pair[1].path
    for name in ("rollouts/step-2.parquet", "evaluations/step-2.parquet"):
        (b / name).unlink()
    shutil.rmtree(b / "checkpoints" / "step-2")
    (b / "metrics.jsonl").write_text("".join((b / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]))
    for name in ("summary.json", "best/best.json"):
        (b / name).write_text(json.dumps(json.loads((b / name).read_text()) | {"steps": 1, "step": 1}))
    assert main(str(pair[0].path), str(b)) == 0
    assert capsys.readouterr().out == "no difference in what both runs have, up to step 1\nonly A has step 2\n"
    change_metrics(pair[1], 1, grad_norm=7.0)
    assert main(str(b), str(pair[0].path)) == 1
    assert capsys.readouterr().out.endswith("only B has step 2\n")


@pytest.mark.parametrize(
    "text", ["[]\n{}\n", '{"step": 1e999}\n{}\n', '{"step": 1}\n{"step"\n{"step": 2}\n', "[" * 100_000 + "\n1\n"]
)
def test_metrics_that_are_none(pair, text):
    (pair[1].path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunFolderError, match=r"is damaged: metrics.jsonl, line [12]: "):
        read_whole(pair[1].path)


def test_a_line_that_is_being_written(pair):
    with (pair[1].path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "rew')
    assert again(pair) == []


@pytest.mark.parametrize("text", ["", "[]", "[[1]]", "3", "[" * 100_000, '{"a":' * 700 + "1" + "}" * 700, "\udc80"])
@pytest.mark.parametrize("name", ["best/best.json", "summary.json", "checkpoints/step-1/state/loop.json"])
def test_files_that_are_no_tables(pair, name, text):
    (pair[1].path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunFolderError, match="json is damaged|json cannot be read"):
        again(pair)


def test_no_run_folder(pair, tmp_path):
    with pytest.raises(RunFolderError, match="is not a run folder: it has none of config.toml"):
        read_whole(tmp_path)
    (pair[1].path / "rollouts" / "step-1.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunFolderError, match="cannot read .*step-1.parquet"):
        again(pair)
