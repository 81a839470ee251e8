"""The scores of reasoning-gym, through the rows that the data makes."""

import re
from pathlib import Path

import pytest

from cohort.data import load_rows
from cohort.errors import RewardError
from cohort.rewards import RewardRunner, resolve_reward
from cohort.rewards.text import EVALUATED, READ_AS_LITERALS, READ_AS_SUMS, reasoning_gym
from cohort.types import Group
from tests.rewards.conftest import completion, prompt

package = pytest.importorskip("reasoning_gym")


def rows(spec):
    return load_rows(f"reasoning_gym:{spec}")


def score(row, text, asked=None, **settings):
    columns = {name: row[name] for name in ("reasoning_gym", "reasoning_gym_index")}
    return reasoning_gym(text, **columns, prompt=asked or row["prompt"], **settings)


def test_the_answer_is_in_the_last_tag():
    first, second = rows("chain_sum?size=2&seed=3")
    assert score(first, f"<answer>1</answer> no, <answer>\n {first['answer']} </answer>") == 1.0
    assert score(first, f"<answer>{first['answer']}</answer> <answer>{second['answer']}</answer>") < 1.0
    assert score(first, first["answer"]) == 0.0  # without a tag there is no answer
    assert score(first, first["answer"], tag="") == 1.0
    assert score(first, f"<a.c>{first['answer']}</a.c>", tag="a.c") == 1.0
    assert score(first, f"{first['answer']}</answer>", prefill="<answer>") == 1.0


def test_the_score_is_of_the_row_made_again():
    # Metadata holds tuples and numbers that JSON would change; the item comes from settings and index.
    for spec in ("caesar_cipher?size=3&seed=7", "base_conversion?offset=40&size=3", "n_queens?size=1"):
        for row in rows(spec):
            answer = row["answer"] or ""
            assert score(row, f"<answer>{answer}</answer>") == 1.0
            assert score(row, "<answer>?</answer>") < 0.1


def test_in_a_run_with_conversations_and_rows_of_other_data():
    (row,) = rows("chain_sum?size=1")
    asked = [{"role": "system", "content": "Think."}, {"role": "user", "content": f"Q: {row['prompt']}"}]
    columns = {name: value for name, value in row.items() if name != "prompt"}
    groups = [
        Group(prompt(0, asked, **columns), (completion(f"<answer>{row['answer']}</answer>"), completion("no"))),
        Group(prompt(1, **dict.fromkeys(columns)), (completion("a"),)),
    ]
    scores = RewardRunner([resolve_reward("reasoning_gym")]).score(groups)
    assert scores.rewards_S[:2].tolist() == [1.0, 0.0]
    assert scores.rewards_S[2:].isnan().all()


def test_a_row_that_is_not_the_item_is_refused():
    first, second = rows("chain_sum?size=2")
    with pytest.raises(RewardError, match="item 0 of .*chain_sum.* has another question than the row"):
        score(first, "", asked=second["prompt"])


def test_scoring_does_not_change_the_item(monkeypatch):
    (row,) = rows("chain_sum?size=1&seed=11")
    dataset = type(package.create_dataset("chain_sum", size=1))
    monkeypatch.setattr(dataset, "score_answer", lambda self, answer, entry: len(entry.pop("metadata")) > 0)
    assert [score(row, "<answer>1</answer>") for _ in range(2)] == [1.0, 1.0]


def test_an_answer_that_the_scorer_fails_on_has_zero(monkeypatch):
    (row,) = rows("chain_sum?size=1&seed=12")
    dataset = type(package.create_dataset("chain_sum", size=1))
    monkeypatch.setattr(dataset, "score_answer", lambda self, answer, entry: int(answer))
    assert [score(row, f"<answer>{text}</answer>") for text in ("1", "one")] == [1.0, 0.0]


# Scorers that evaluate what the policy wrote --------------------------------------------------------------------------

HARM = "[c for c in ().__class__.__base__.__subclasses__()]"


@pytest.mark.parametrize("name", sorted(READ_AS_LITERALS | READ_AS_SUMS))
def test_no_scorer_runs_an_answer(name, monkeypatch, tmp_path):
    (row,) = rows(f"{name}?size=1")
    written = tmp_path / "written"
    call = f"__import__('pathlib').Path({str(written)!r}).touch()"
    for text in (
        call,
        f"[{call}]",
        f"({call},)",
        f"1+{call}",
        f"\n {call}",
        f"f'{{{call}}}'",
        "9**9**9**9**9",
        "exit()",
        HARM,
    ):
        assert score(row, f"<answer>{text}</answer>") <= 0.01
    assert not written.exists()


def test_answers_in_the_form_that_is_evaluated_have_their_score():
    (row,) = rows("countdown?size=1&min_numbers=2&max_numbers=2&operators=('+',)")
    expression = "+".join(re.findall(r"\d+", row["prompt"].split("numbers")[1])[:2])
    assert score(row, f"<answer>{expression}</answer>") in (0.05, 1.0)  # read as a sum, right or not
    (row,) = rows("spiral_matrix?size=1")
    assert score(row, f"<answer>{list(map(int, row['answer'].split()))}</answer>") == 0.1  # a list, not a line


@pytest.mark.parametrize("name", sorted(EVALUATED - {"polynomial_multiplication"}))
def test_scorers_of_any_expression_are_refused(name):
    (row,) = rows(f"{name}?size=1")
    with pytest.raises(RewardError, match=f"the scorer of {name} evaluates the answer as Python"):
        score(row, "<answer>x</answer>")


def test_the_lists_are_of_all_scorers_that_evaluate():
    folder = Path(package.__file__).parent
    pattern = re.compile(r"(?<![\w.])(?:eval|exec)\(|sympify\(|parse_expr\(")
    found = {path.stem for path in folder.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))}
    # These evaluate what the package wrote, or define a parser of their own.
    own = {"codeio", "number_sorting", "bitwise_arithmetic", "basic_arithmetic", "propositional_logic"}
    own |= {"generators_00_49", "generators_50_99"}
    assert found - own == READ_AS_LITERALS | READ_AS_SUMS | EVALUATED
