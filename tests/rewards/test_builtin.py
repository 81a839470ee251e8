"""Built-in rewards of text, format, length and language: values by hand, for text and messages."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.errors import RewardError
from cohort.rewards import BUILTIN_REWARDS, resolve_reward
from cohort.rewards.messages import completion_text, turn_text, whole_text
from cohort.rewards.text import (
    cosine_length,
    exact_match,
    fuzzy_match,
    json_schema,
    language,
    regex,
    repetition_penalty,
    soft_overlong,
    think_format,
)
from tests.rewards.conftest import rollout


def chat(*texts):
    """A completion with several assistant messages, and messages of a tool between them."""
    tool = {"role": "tool", "content": "tool tool tool"}
    return [message for text in texts for message in (assistant(text), tool)][:-1]


def assistant(content):
    return {"role": "assistant", "content": content}


def test_the_text_of_the_assistant():
    parts = assistant([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}])
    call = assistant(None) | {"tool_calls": []}
    assert completion_text("x") == whole_text("x") == "x"
    assert completion_text(chat("x", "y")) == "y"
    assert whole_text(chat("x", "y")) == "x\ny"
    assert completion_text([assistant("x"), {"role": "tool", "content": "z"}]) == "x"
    assert completion_text([{"role": "tool", "content": "z"}]) == whole_text([]) == ""
    assert completion_text([parts]) == "ab"
    assert whole_text([assistant("x"), call]) == "x"
    assert completion_text([assistant("x"), call]) == ""  # the last message is a call without text
    assert turn_text("x", "p") == turn_text([assistant("x")], "p") == "px"
    assert turn_text(chat("x", "y"), "p") == "y"  # the prefill belongs to the first turn


def test_exact_match():
    assert exact_match(chat("no", " blue\n"), "blue") == 1.0
    assert exact_match(" blue", "blue", strip=False) == 0.0
    assert exact_match("STRASSE", "straße", ignore_case=True) == 1.0
    assert exact_match("7", 7) == 1.0
    assert exact_match("None", None) is None


def test_fuzzy_match():
    assert fuzzy_match("abcd", "abxd") == pytest.approx(0.75, abs=1e-12)  # a, b, d: 2 * 3 / 8
    assert fuzzy_match(chat("x", "ABC"), "abc", ignore_case=True) == 1.0
    assert fuzzy_match("abc", "xyz") == 0.0
    assert fuzzy_match("", "") == 1.0
    assert fuzzy_match("", "a") == 0.0
    assert fuzzy_match(" a ", "a", strip=False) == 0.5
    assert fuzzy_match("a", None) is None


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30), st.text(max_size=30))
def test_fuzzy_match_is_a_symmetric_share(one, other):
    value = fuzzy_match(one, other)
    assert 0 <= value <= 1
    assert value == fuzzy_match(other, one)
    assert (value == 1.0) is (one.strip() == other.strip())


def test_repetition_penalty():
    text = "a b c a b c"  # 3-grams: abc bca cab abc: one of four is a repetition
    assert repetition_penalty(text) == -0.25
    assert repetition_penalty(chat("A B c", "a b C")) == -0.25  # all messages, without case; not the tool's
    assert repetition_penalty(text, max_penalty=-2.0) == -0.5
    assert repetition_penalty(text, ngram=1) == -0.5
    assert repetition_penalty(text, ngram=7) == 0.0
    assert repetition_penalty("") == 0.0
    assert math.copysign(1, repetition_penalty("a b c d")) == 1  # 0, not -0
    assert repetition_penalty("我我我我", [5, 5, 5, 5], of="tokens") == -0.5  # 555 and 555
    assert repetition_penalty("我我我我", [5, 5, 5, 5]) == 0.0  # one word


def test_soft_overlong():
    def penalty(tokens, max_length=10, buffer=4):
        return soft_overlong("", [0] * tokens, max_length=max_length, buffer=buffer)

    assert [penalty(tokens) for tokens in (0, 6, 7, 8, 9, 10, 11, 99)] == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert [penalty(tokens, buffer=0) for tokens in (10, 11)] == [0.0, -1.0]
    assert [penalty(tokens, buffer=10) for tokens in (0, 5)] == [0.0, -0.5]
    with pytest.raises(RewardError, match="buffer must be at most max_length = 10, got 11"):
        penalty(1, buffer=11)


def test_cosine_length():
    def value(text, tokens, **changes):
        numbers = {"r0c": 2.0, "rLc": 1.0, "r0w": -10.0, "rLw": 0.0, "exceeded": -20.0} | changes
        return cosine_length(text, [0] * tokens, max_length=12, answer="4", **numbers)

    third = (1 + math.cos(math.pi / 3)) / 2  # at a third of the length, 0.75 of the way remains
    assert [value("4", tokens) for tokens in (0, 6, 12, 13)] == [2.0, 1.5, -20.0, -20.0]
    assert value("4", 4) == pytest.approx(1 + third, abs=1e-12)
    assert [value("5", tokens) for tokens in (0, 6, 12)] == [-10.0, -5.0, -20.0]
    assert value("5", 4) == pytest.approx(-10 * third, abs=1e-12)
    assert value("#### 4", 0, correct="gsm8k") is None  # the row's answer has no ####
    assert value("x4", 0, correct="regex(pattern='4')") == 2.0
    assert value("x4", 0, correct="exact_match") == -10.0
    assert cosine_length("#### 4", [], max_length=9, answer="#### 4", correct="gsm8k", other=1, prefill="") == 1.0


def test_cosine_length_passes_on_the_arguments_of_its_judge(tmp_path):
    (tmp_path / "judge.py").write_text(
        "def easy(completion, level, log_extra, bonus=0):\n    log_extra('level', level)\n    return 1 - level + bonus\n"
        "def all_of_them(completions, **_):\n    return [1.0] * len(completions)\n"
        "async def slow(completion):\n    return 1.0\n"
    )
    logs = []
    given = {"max_length": 9, "level": 1, "log_extra": lambda *pair: logs.append(pair), "bonus": 5}
    assert cosine_length("", [], correct=f"{tmp_path}/judge.py:easy", **given) == 1.0  # bonus 5 from the column
    of_setting = f"{tmp_path}/judge.py:easy(bonus=0)"
    assert cosine_length("", [], correct=of_setting, **given) == -1.0
    assert logs == [("level", 1)] * 2
    for name in ("all_of_them", "slow"):
        with pytest.raises(RewardError, match="sees one sample and is not async"):
            resolve_reward(f'cosine_length(max_length=9, correct="{tmp_path}/judge.py:{name}")')


def test_think_format():
    cases = [
        ("<think>a</think>b", "", 1),
        ("\n <think>\na\n</think>\n\nb", "", 1),
        ("a</think>b", "<think>", 1),
        ("b", "<think>\n\n</think>\n", 1),  # the template turned thinking off
        ("<think></think>b", "", 1),
        ("a</think>b", "", 0),
        ("<think>a</think>b", "<think>\n", 0),  # twice
        ("x<think>a</think>b", "", 0),
        ("<think>a</think>b</think>", "", 0),
        ("<think>a</think><think>b", "", 0),
        ("<think>a</think> \n", "", 0),  # no answer
        ("</think><think>b", "", 0),
        ("", "<think>", 0),
    ]
    for form in (str, lambda text: [assistant(text)]):
        assert [think_format(form(text), prefill) for text, prefill, _ in cases] == [value for _, _, value in cases]
    assert think_format("[r]a[/r]b", start="[r]", end="[/r]") == 1.0
    assert think_format(chat("look it up", "<think>a</think>b")) == 1.0
    assert think_format(chat("<think>a</think>b", "c")) == 0.0


def test_regex():
    assert regex(chat("no", "x 42"), pattern=r"\d+") == 1.0
    assert regex("a\nb", pattern="a.b") == 0.0
    assert regex("A\nB", pattern="(?is)a.b") == 1.0
    assert regex("ab", pattern="a", full=True) == 0.0
    assert regex("b", prefill="a", pattern="ab", full=True) == 1.0


def test_a_pattern_that_does_not_end_fails(monkeypatch):
    monkeypatch.setattr("cohort.rewards.text.MATCH_SECONDS", 0.2)
    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        regex("a" * 40, pattern="(a|a)*[bc]")  # 2^40 ways
    assert time.perf_counter() - start < 10


AGE = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}


def test_json_schema():
    values = {
        '{"age": 7}': 1,
        ' {"age": 7, "more": [1]}\n': 1,
        '{"age": "7"}': 0,
        "{}": 0,
        '{"age": 7} and more': 0,
        '```json\n{"age": 7}\n```': 0,
        '{"age": 7': 0,
        '{"age": NaN}': 0,
        "": 0,
        "[" * 100_000: 0,
        '{"age": ' + "9" * 5000 + "}": 0,  # more digits than Python converts
    }
    assert {text: json_schema(text, schema=AGE) for text in values} == values


def test_json_schema_in_a_fence_in_a_file_and_after_a_prefill(tmp_path):
    fenced = '```json\n{}\n```\nor rather:\n```json\n{"age": 7}\n```\nGood?'
    assert json_schema(fenced, schema=AGE, fenced=True) == 1.0  # the last
    assert json_schema(chat("x", fenced), schema=AGE, fenced=True) == 1.0
    assert json_schema('{"age": 7}', schema=AGE, fenced=True) == 0.0
    assert json_schema("```json\n{}\n", schema={}, fenced=True) == 0.0  # not closed
    (tmp_path / "age.json").write_text('{"type": "integer"}')
    assert json_schema("7", schema=f"{tmp_path}/age.json") == 1.0
    assert json_schema('"7"', schema='{"type": "string"}') == 1.0
    assert json_schema(": 7}", prefill='{"age"', schema=AGE) == 1.0
    assert json_schema("7", schema=False) == json_schema("[NaN]", schema={}) == 0.0
    with pytest.raises(RewardError, match="reference that cannot be resolved"):  # not fetched
        json_schema("7", schema={"$ref": "http://localhost:9/schema.json"})


SENTENCES = {
    "en": "The train leaves at noon and arrives before the shops close. First we add the two numbers, then we divide.",
    "de": "Der Zug fährt mittags ab und kommt an, bevor die Läden schließen. Dann teilen wir die Zahl durch drei.",
    "fr": "Le train part à midi et arrive avant la fermeture des magasins. On divise ensuite le nombre par trois.",
    "ru": "Поезд отправляется в полдень и прибывает до закрытия магазинов. Потом мы делим число на три.",
    "zh": "火车中午出发,在商店关门之前到达。首先把这两个数字相加,然后再把结果除以三,就得到平均数。",
    "ar": "يغادر القطار عند الظهر ويصل قبل إغلاق المتاجر. ثم نقسم العدد على ثلاثة.",
}


def test_each_language_is_told_from_the_others():
    shares = {code: [language(text, code=code) for text in SENTENCES.values()] for code in SENTENCES}
    assert shares == {code: [float(code == other) for other in SENTENCES] for code in SENTENCES}


def test_language_of_mixed_short_and_formal_texts():
    mixed = SENTENCES["en"] + "\n" + SENTENCES["zh"]
    letters = {code: sum(map(str.isalpha, SENTENCES[code])) for code in ("en", "zh")}
    assert language(mixed) == pytest.approx(letters["en"] / sum(letters.values()), abs=1e-12)
    assert language(chat(SENTENCES["de"], SENTENCES["de"]), code="de") == 1.0
    assert language("Yes, it is.") is None
    assert language("Yes, it is so, I think.", min_letters=10) == 1.0
    # A rest that is too short is judged with the sentence before it.
    assert language("Yes, it is so, I think. Поезд отправля", min_letters=15) == 0.0
    assert language("") is None
    assert language("12 + 30 = 42, $x^2$") is None
    formulas = r"Also ist $f(the) = and$ und \(then\) so `for the while` gleich \frac{1}{2}, was zu zeigen war."
    assert language(formulas, code="de") == 1.0


REPEATED = [
    "\\(x ", "\\[x ", "answer is \\(x ", "answer is $", "answer is ", "answer: about ", "\\boxed{", "\\boxed{1},", "{", "}",
    "$", "$$", "$a ", "#", "#### 5 ", "#### 5\n", "####\n", "1 ", "1.\n", "1,", "1/", "1:", "1", "-", "( ", "[", "(A) ",
    "a", "A. ", "\n", "\t", "```json\n", "```json\n{}\n``` x\n", "`a", "```", "<think>", "</think>", "<a", "http://",
    "\\text{", "\\frac{", "^{", "_{", "√(", "答案是 ", "not ", "and ",
]  # fmt: skip
BETWEEN_SPACES = [
    ("#### ", "I"), ("a", "b"), ("(", "b"), ("^", "x"), ("answer is", ""), ("answer is $2$", "x"), ("answer is 5", "b"),
    ("\\boxed{1}", "\\boxed{2}"), ("\\boxed{", "5}"), ("1", "/"), ("{", ",}"), ("5\\text", "{m}"), ("```json", "x"),
]  # fmt: skip
LENGTH = 10_000


def test_no_text_takes_much_time(runner_of):
    """Work that grows linearly with the length takes a fraction of a second; work that grows quadratically, minutes."""
    texts = [unit * (LENGTH // len(unit)) for unit in REPEATED]
    texts += [before + space * LENGTH + after for before, after in BETWEEN_SPACES for space in " \n"]
    specs = [
        "gsm8k", "math", "reasoning_answer", "exact_match", "fuzzy_match", "think_format", "repetition_penalty",
        "language", "json_schema(schema={}, fenced=True)", "json_schema(schema={})", "regex(pattern='x$')",
        "soft_overlong(max_length=9, buffer=1)", "cosine_length(max_length=9, correct='gsm8k')",
    ]  # fmt: skip
    assert {spec.partition("(")[0] for spec in specs} == set(BUILTIN_REWARDS) - {
        "code",
        "environment_reward",
        "reasoning_gym",
    }
    runner = runner_of(*map(resolve_reward, specs), timeout=10.0, workers=2)
    groups = rollout(texts, ids=(3,), answer="#### 5")
    assert runner.score(groups).errors == {}
