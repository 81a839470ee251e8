"""Rewards by name, their settings, and the output of ``cohort rewards``."""

import inspect
import subprocess
import sys
from functools import partial

import pytest

from cohort.cli import main
from cohort.errors import RewardError
from cohort.rewards import BUILTIN_REWARDS, resolve_reward
from cohort.rewards.contract import call_options
from cohort.rewards.mathematics import gsm8k
from cohort.rewards.names import columns_of, settings_of, split_spec
from tests.conftest import each
from tests.rewards.conftest import rollout

REQUIRED = {
    "regex": "(pattern='a')",
    "json_schema": "(schema={})",
    "soft_overlong": "(max_length=8, buffer=2)",
    "cosine_length": "(max_length=8)",
}


def test_functions_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine_reward.py").write_text("import helper_mod\ndef f(completions, **_):\n    return helper_mod.x\n")
    (tmp_path / "helper_mod.py").write_text("x = [1]\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine_module.py").write_text("def g(**_): return [2]\n")
    assert resolve_reward("gsm8k") is gsm8k
    assert resolve_reward("cohort.rewards.mathematics:gsm8k") is gsm8k
    assert resolve_reward(f"{tmp_path}/mine_reward.py:f")(completions=[]) == [1]
    monkeypatch.chdir(tmp_path / "sub")
    assert resolve_reward("mine_module:g")() == [2]
    (tmp_path / "bad_reward.py").write_text("1/0\n")
    with pytest.raises(RewardError, match="failed to load: ZeroDivisionError"):
        resolve_reward(f"{tmp_path}/bad_reward.py:f")


@each(
    ("spec", "parts"),
    [
        ("math", ("math", {})),
        (" math ( ) ", ("math", {})),
        (
            "f(a=1, b=-2.5, c='x(y)', d=[1, {'k': None}], e=True)",
            ("f", {"a": 1, "b": -2.5, "c": "x(y)", "d": [1, {"k": None}], "e": True}),
        ),
        ("dir (1)/mine.py:f(a=1)", ("dir (1)/mine.py:f", {"a": 1})),
        ("dir (1)/mine.py:f", ("dir (1)/mine.py:f", {})),
        ("mine.py:f(a='b:c(d')", ("mine.py:f", {"a": "b:c(d"})),
    ],
)
def test_a_spec_is_a_name_and_values(spec, parts):
    assert split_spec(spec) == parts


@each(
    ("spec", "message"),
    [
        ("maths", "unknown reward 'maths': built in are math, reasoning_answer, gsm8k, .*; did you mean math"),
        ("maths(a=1)", "unknown reward 'maths'"),
        ("nowhere.py:f", "no reward file nowhere.py"),
        ("no_such_module_x:f", "cannot import reward module"),
        ("cohort.rewards.mathematics:gsm9k", "has no function 'gsm9k'; it has: .*gsm8k"),
        ("cohort.rewards.names:BUILTIN_REWARDS", "has no function"),
        ("soft_overlong", r"needs max_length, buffer: write soft_overlong\(max_length=..., buffer=...\)"),
        ("soft_overlong(max_length=8)", r"needs buffer: write soft_overlong\(max_length=8, buffer=...\)"),
        ("soft_overlong(max_len=8)", "no setting 'max_len'; it has: max_length, buffer"),
        ("gsm8k(strict=True)", "no setting 'strict'; it has: none"),
        ("exact_match(answer='x')", "no setting 'answer'"),  # a column
        ("soft_overlong(8, 2)", "values are given by name"),
        ("soft_overlong(**{'max_length': 8})", "values are given by name"),
        ("soft_overlong(max_length=n, buffer=2)", "max_length must be a literal value .*, got n"),
        ("soft_overlong(max_length=8", "the bracket is not closed"),
        ("soft_overlong(max_length 8)", "expected NAME"),
        ("soft_overlong(max_length=8, max_length=9)", "max_length is given twice"),
        ("soft_overlong(max_length=0, buffer=2)", "max_length=0: input should be greater than 0"),
        ("soft_overlong(max_length='8', buffer=2)", "max_length='8': input should be a valid integer"),
        ("soft_overlong(max_length=True, buffer=2)", "max_length=True: input should be a valid integer"),
        ("repetition_penalty(max_penalty=1.0)", "less than or equal to 0"),
        ("repetition_penalty(of='letters')", "input should be 'words' or 'tokens'"),
        ("regex(pattern='(')", "not a regular expression: missing \\)"),
        ("json_schema(schema={'type': 'text'})", "expected a JSON schema.*: 'text' is not valid"),
        ("json_schema(schema='nowhere.json')", "expected a JSON schema.*No such file"),
        ("language(code='klingon')", "unknown language code; supported: ace, af"),
        ("cosine_length(max_length=8, correct='maths')", "correct='maths': unknown reward 'maths'"),
    ],
)
def test_wrong_specs_are_refused(spec, message):
    with pytest.raises(RewardError, match=message):
        resolve_reward(spec)


def test_values_for_a_user_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Odd: pass\n"
        "def f(completion, strict: bool = False, odd: Odd | None = None, *, low: int, **_):\n    return (strict, low)\n"
        "def unknown_type(completion, size: 'Nowhere'):\n    return size\n"
        "def g(completion):\n    return 0\n"
        "def any_setting(completion, **settings):\n    return settings\n"
    )
    path = f"{tmp_path}/mine.py"
    bound = resolve_reward(f"{path}:f(strict=True, low=3)")
    assert bound(completion="") == (True, 3)
    assert call_options(bound).per == "sample"
    assert not isinstance(resolve_reward(f"{path}:g()"), partial)
    assert resolve_reward(f"{path}:unknown_type(size=4)")(completion="") == 4  # its annotation cannot be evaluated
    assert resolve_reward(f"{path}:f(low=1, odd=None)")(completion="") == (False, 1)
    with pytest.raises(RewardError, match=r"f has no setting 'strickt'; it has: .*; did you mean strict"):
        resolve_reward(f"{path}:f(strickt=True, low=3)")  # ``**_`` takes columns, not what is misspelt
    assert resolve_reward(f"{path}:any_setting(depth=2)")(completion="") == {"depth": 2}
    with pytest.raises(RewardError, match=r"f: low='3': input should be a valid integer"):
        resolve_reward(f"{path}:f(low='3')")
    with pytest.raises(RewardError, match="has no setting 'strict'; it has: completion"):
        resolve_reward(f"{path}:g(strict=True)")
    assert resolve_reward("cosine_length(max_length=8, r0c=2)").keywords["r0c"] == 2  # an int for a float


def test_a_setting_is_never_read_from_a_column(tmp_path, runner_of):
    (tmp_path / "mine.py").write_text(
        "def f(completion, level, extra=0, **rest):\n    return level + extra + len(rest)\n"
    )
    columns = {"ignore_case": True, "answer": "A", "level": 5, "extra": 7}
    specs = ["exact_match", "exact_match(ignore_case=True)", f"{tmp_path}/mine.py:f(level=1)"]
    scores = runner_of(*map(resolve_reward, specs)).score(rollout(["a"], **columns))
    # f: level is the setting 1, extra the column's 7. The rest are 9: prompt, prefill, trainer_state, ignore_case,
    # answer, completion_ids, finish_reason, log_extra, log_metric.
    assert scores.by_function_SK.tolist() == [[0.0, 1.0, 1 + 7 + 9]]


@pytest.mark.parametrize("name", BUILTIN_REWARDS)
def test_every_built_in_reward_is_per_sample_and_explained(name, capsys):
    row = BUILTIN_REWARDS[name]
    if row.package == "reasoning_gym":
        pytest.importorskip(row.package)  # of an extra that "dev" leaves out
    function = row.load()
    assert call_options(function).per == "sample"
    bound = resolve_reward(name + REQUIRED.get(name, ""))
    assert set(getattr(bound, "keywords", {})) == set(settings_of(function))
    assert main(["rewards", name]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 104  # 100, except examples
    for setting in settings_of(function):
        assert f"{setting}:" in printed or f"{setting}," in printed or f", {setting}" in printed
    for column in columns_of(function):
        assert f"the column {column}" in printed
    assert (f"{row.package}: pip install 'cohort-rl[{row.extra}]'" in " ".join(printed.split())) is (
        row.package is not None
    )
    assert "``" not in printed


def test_the_list_of_rewards(capsys):
    assert main(["rewards"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    for name, row in BUILTIN_REWARDS.items():
        assert f"\n{name}(" in "\n" + printed
        summary = inspect.getdoc(row.load()).partition("\n")[0].replace("``", "")
        assert summary in " ".join(printed.split())
    assert main(["rewards", "maths"]) == 2
    assert "unknown reward 'maths': built in are math" in capsys.readouterr().err


def test_the_list_imports_no_large_package():
    large = ["torch", "transformers", "sympy", "math_verify", "jsonschema", "rapidfuzz", "py3langid"]
    script = (
        f"import sys\nfrom cohort.cli import main\nmain(['rewards'])\nprint([m for m in {large} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_missing_package_is_named(monkeypatch):
    from cohort.rewards.text import fuzzy_match

    monkeypatch.setitem(sys.modules, "rapidfuzz.fuzz", None)
    with pytest.raises(RewardError, match=r"fuzzy_match needs rapidfuzz.fuzz.*pip install 'cohort-rl\[rewards\]'"):
        fuzzy_match("a", "a")
    monkeypatch.setattr("cohort.rewards.names.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match="math needs math_verify, which is not installed: pip install 'cohort-rl"):
        resolve_reward("math")
    assert resolve_reward("gsm8k")
