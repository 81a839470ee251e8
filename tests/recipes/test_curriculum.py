"""Recipe curriculum: pass rates are measured, written into the rows, filtered by and ordered by."""

import json

import pyarrow.parquet
import pytest

from cohort import shipped
from cohort.cli import main
from cohort.demo.task import solution
from cohort.errors import DataError

SMALL = ("--data.eval", "", "--optim.warmup_steps", "0", "--run.max_steps", "1", "--rollout.num_generations", "2")


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def kinds():
    """The rows of the recipe, which of them have a wrong answer, and which are sums without a carry."""
    rows = rows_of(shipped.recipes()["curriculum"].folder / "data.jsonl")
    sums = [tuple(map(int, row["question"].split("+"))) for row in rows]
    wrong = [row["answer"] != f"#### {a + b}" for row, (a, b) in zip(rows, sums, strict=True)]
    return rows, (wrong, ["carry" not in solution(a, b) for a, b in sums])


def test_the_data_is_what_the_page_says():
    rows, (wrong, plain) = kinds()
    assert (len(rows), sum(wrong), sum(plain), sum(map(min, wrong, plain))) == (1000, 150, 600, 0)


def test_only_rows_with_a_signal_are_used_from_easy_to_hard(run_recipe, tmp_path, monkeypatch):
    folder = shipped.recipes()["curriculum"].folder
    rows, (wrong, plain) = kinds()
    useful = [row for row, *other in zip(rows, wrong, plain, strict=True) if not any(other)]
    chosen = [rows[wrong.index(True)], rows[plain.index(True)], *useful[:8]]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    monkeypatch.chdir(tmp_path)
    measure = ("--config", str(folder / "config.toml"), "--data", "data.jsonl", "--n", "4", "--pass-rates")
    assert main(["eval", "cohort:demo", *measure, "rated.jsonl", "--quiet"]) == 0
    rates = {row["question"]: row["pass_rate"] for row in rows_of(tmp_path / "rated.jsonl")}
    kept = sorted((rate for rate in rates.values() if 0.1 <= rate <= 0.8), reverse=True)
    assert 3 <= len(kept) <= 8
    run = run_recipe(
        "curriculum", "--data.train", tmp_path / "rated.jsonl", *SMALL, "--rollout.prompts_per_step", len(kept)
    )
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    used = [rates[row["prompt"].removeprefix("<|user|>").removesuffix("<|assistant|>")] for row in table[::2]]
    assert used == kept


def test_without_measured_rates_the_missing_file_is_named(run_recipe):
    with pytest.raises(DataError, match="rated.jsonl"):
        run_recipe("curriculum", *SMALL)
