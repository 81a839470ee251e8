"""math, reasoning_answer and gsm8k: what is the answer of a text, and which answers are equal."""

import json
import math as maths
import threading
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.errors import RewardError
from cohort.rewards import RewardRunner, resolve_reward, reward
from cohort.rewards.answers import final_answer
from cohort.rewards.mathematics import final_number, gsm8k, math, read_gold, reasoning_answer
from cohort.rewards.values import number_of
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.conftest import GSM8K

needs_gsm8k = pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not beside the repository")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"It is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3} no, wait: \boxed{4}", "4"),  # the last one
        (r"\boxed{1} and \boxed{2}", "1,2"),  # one list
        (r"$\boxed{x=1}$ or $\boxed{x=2}$.", "x=1,x=2"),
        (r"\boxed{a_{1}+\{2\}}", r"a_{1}+\{2\}"),
        (r"\boxed 5 apples", "5"),
        (r"\fbox{7}", "7"),
        (r"so \boxed{12} and \boxed{7", None),  # cut off: what it would have been is not known
        (r"so \boxed{12", None),
        (r"so \boxed{7, I mean \boxed{12}", "12"),
        (r"so \boxed{}", None),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("steps\n#### 5\n", "5"),
        ("#### $1,200", "$1,200"),
        ("#### Step 3: Sum\nso 7", "7"),  # a heading, not an answer
        (r"#### 5 and then \boxed{6}", "6"),
        (r"\boxed{6} and then" + "\n#### 5", "5"),  # whichever comes last
        (r"\boxed{6} is it. Tell me whether the answer is clear.", "6"),  # a mark outranks a phrase
        ("The answer is 3.5. Bye 7", "3.5"),
        ("**Answer:** 5", "5"),
        ("Answer:\n\n$$\n\\frac{3}{4}\n$$\n", r"\frac{3}{4}"),
        ("The answer is (B) 12 apples", "B"),
        ("The answer is $2$ and $3$.", "2,3"),
        ("The answers are 3 and 5.", "3 and 5"),
        ("The answer is 5 because 3 and 2 are added", "5"),  # the first of a sentence that begins with it
        ("The answer is Monday.", "Monday"),
        ("The answer is 3, not 4.", "3"),  # up to the first ordinary word
        ("The answer is 5 (five).", "5"),
        ("The answer is twelve (12).", "12"),
        ("The answer is about 3.14", "3.14"),
        ("The answer is a total of 5 apples", "5"),
        ("The answer is not 4 but 5.", "5"),
        ("The answer is 5x + 3, because both are there.", "5x + 3"),
        ("The answer is 5 or 6 apples.", "5 or 6"),
        ("The answer is 2ab.", "2ab"),  # letters at a digit or an operator are no word
        ("The answer is ab + 3.", "ab + 3"),
        ("The answer is ab.", "ab"),
        ("The answer is **5** apples and no more.", "5"),
        (r"The answer is 5\text{ cm} because", r"5\text{ cm}"),
        ("The answer is $2$, and $3$.", "2,3"),
        ("The answer is A because it is big", "A"),
        ("The answer is option C", "C"),
        ("The answer is choice (C), as said.", "C"),
        ("The correct option is **B**.", "B"),
        ("The answer is A, B and C", "A, B and C"),
        ("所以答案是5个苹果。", "5"),
        ("一共有12个", "12"),
        ("The answer is what comes out when all of these are put in. So 8.", "8"),  # says nothing
        ("First 3, then 4.", "4"),
        ("cost $5 and $6", "$6"),  # money, not a formula
        ("so $3+4=7$", "3+4=7"),
        ("17 apples, where $x$ is their number.", "17"),  # a lone letter is a name
        ("so 1 1/2 cups", "1 1/2"),
        ("about 1,234,567 people", "1,234,567"),
        ("it is 5:30", "5:30"),
        ("5x + 3", "5x + 3"),  # nothing but an answer
        ("no real root", "no real root"),
        ("so 7", "7"),
        ("nothing here that could be an answer", None),
        ("", None),
    ],
)
def test_the_answer_of_a_text(text, answer):
    assert final_answer(text) == answer


EQUAL = [
    ("72", "72"),
    ("72", "72.0"),
    ("1200", "1,200"),
    ("1200", r"1{,}200"),
    ("1200000", "1 200 000"),
    ("1200", "$1,200"),
    ("3.5", r"\$3.50"),
    ("5", "5 apples"),
    ("5", r"5\text{ cm}^2"),  # units are not compared
    ("5 square meters", "5"),
    ("3000000", "3 million"),
    ("30", r"30^\circ"),
    ("30", "30°"),
    ("-7", "\u22127"),  # the minus sign of typesetting
    ("0.5", r"\frac{1}{2}"),
    ("1/2", ".5"),
    (r"\frac{3}{4}", r"\dfrac34"),
    ("3/2", r"1\frac{1}{2}"),
    ("3/2", "1 1/2"),
    ("-3/2", r"-1\frac12"),
    ("50%", "0.5"),
    ("50%", "50"),  # asked for percent, the sign is often left out
    ("50", r"50\%"),  # and the other way round, where math-verify says no
    ("50", "50 percent"),
    ("1500", r"1.5 \times 10^{3}"),
    ("0.001", "1e-3"),
    ("1/3", "0.333333"),  # six places: the rounding of it
    (r"\pi", "3.141593"),
    ("0.1", "1/10"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("2x+1", "1+2x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("5", r"2+3=5"),
    ("5", r"\frac{26}{5} \approx 5"),  # what it was rounded to, as said
    ("y=2x+3", "2x+3"),
    ("1,2", "2,1"),  # a list is a set
    (r"\{1,2,3\}", "3, 2, 1"),
    ("(1,2)", "(1,2)"),
    ("(3,1)", "( 3, 1 )"),
    ("[1,2)", "[1,2)"),
    ("[1,2)", r"[1, \frac{4}{2})"),
    (r"(-\infty,2]\cup[3,\infty)", r"[3,\infty) \cup (-\infty,2]"),
    (r"1 \le x < 2", "[1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\log_2 8", "3"),
    (r"\binom{5}{2}", "10"),
    ("5!", "120"),
    ("2^{100}", "1267650600228229401496703205376"),
    ("B", "(B)"),
    (r"\text{(B)}", "B"),
    (r"\text{Monday}", "monday"),
    ("no real root", r"\text{No real root}"),
    ("No", "no"),
    ("12:30", "12:30"),
    (7, "7"),
    (0.25, r"\frac14"),
    (1e-07, "0.0000001"),
    ("The total is $18$ dollars.", "18"),  # a sentence with one number
    (r"So it is \boxed{18}, by 2*9.", "18"),
    (r"\left(\frac{1}{2}, 3\right)", "(0.5, 3)"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("x^2 - 1", "(x-1)(x+1)"),
    ("2516_8", "2516_{8}"),
    ("2516_8", r"2516_{\text{eight}}"),
    ("2516_8", "2516₈"),
    ("2516_8", "2516 (base 8)"),
    ("2516_8", "(2516)_8"),
    ("2516_8", "2516"),  # the question says which base it asks for
    ("2516", "2516_8"),
    ("1A3_{16}", r"\text{1A3}_{16}"),
    ("a_1", "a_{1}"),
    ("1,1,2", "2,1,1"),
    (r"3\sqrt{2}\text{ miles north}", r"\sqrt{18}\text{ miles north}"),
    (r"\{1\}", r"\{1,1\}"),  # a set
    (r"1\pm\sqrt2", r"1 + \sqrt{2}, 1 - \sqrt{2}"),
    (r"7\text{ pm}", "7 p.m."),
    ("7 pm", "7"),
    ("3:30 PM", r"3:30\text{ p.m.}"),
    ("5 miles north", r"5\text{ mi north}"),
    ("1500000", r"1.5\text{ million}"),
    (r"1.5\text{ million dollars}", "1500000"),
    (r"2\sqrt{2}", "2√2"),
    (r"2\sqrt{2}", "√8"),
    (r"\sqrt{x+1}", "√(x+1)"),
    ("6", "2·3"),
    ("x^2+1", "x²+1"),
    ("x^{10}", "x¹⁰"),
    ("3.5", "3½"),
    ("5", "5 m²"),
    ("5", "5 m/s"),
    ("5", r"5 m/s^2"),
    ("5m", "5 m"),  # here it is a variable
    (r"\emptyset", r"\varnothing"),
    (r"\varnothing", "∅"),
    (r"(-\infty,3]", r"x \le 3"),
    ("(3,5)", "3 < x < 5"),
    ("1/3", r"0.\overline{3}"),
    (r"0.\overline{3}", "1/3"),
    ("7/6", r"1.1\overline{6}"),
    (r"0.\overline{34}", r"\frac{34}{99}"),
    ("B", r"\textbf{(B)} 12"),
    ("B", r"\textbf{(B) }12"),
    ("D", r"\text{(D) }\frac12"),
    ("C", "C. 5"),
    ("12", r"\textbf{(B) }12"),
    ("12", "(B) 12"),
    (r"\textbf{(B)}\ 12", "12"),  # a row may give both
    (r"\textbf{(B)}\ 12", "B"),
    (r"\textbf{(B)}\ 12", "(B) 12"),
]
UNEQUAL = [
    ("72", "73"),
    ("1234", r"\{1, 234\}"),
    ("0.1", "0.1000001"),  # exact: no tolerance of its own
    ("10000000000000000001", "10000000000000000000"),  # not as floats
    ("1/3", "0.333"),  # three places are not enough
    ("1/3", "0.333334"),
    ("2/3", "0.666666"),  # cut, not rounded
    ("0.00000001", "0.000000"),  # six places, but no digit of it
    ("50%", "5"),
    ("50%", "0.05"),
    ("-7", "7"),
    ("2", r"2\pi"),
    ("5", "5x"),
    ("5", "5000"),
    ("3", "3 million"),
    ("(1,2)", "(2,1)"),  # order counts in a pair
    ("(3,1)", "(2,1)"),
    ("[1,2)", "(1,2)"),
    ("1,2", "1,2,3"),
    ("x=5", "y=5"),
    ("x=1,y=1", "1"),
    ("x+1", "x-1"),
    ("A", "B"),
    ("dog", "god"),  # words, not products of letters
    ("Monday", "Tuesday"),
    ("Yes", "No"),
    ("Monday", "5"),
    (r"\sqrt{2}", "1.41"),
    ("x > 2", "x < 2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("5", r"\frac{5}{}"),  # cannot be read
    ("5", "1/0"),
    ("5", "5" * 2000),  # far longer than the row's
    ("12:30", "12:45"),
    ("2516_8", "2516_9"),
    ("2516_8", "1358"),
    ("11_2", "11_{10}"),
    ("-11_2", "-11_3"),
    ("11_2", "11 base 3"),
    ("1A3_{16}", "3A1_{16}"),
    ("a_1", "a_2"),
    ("1", "1,1"),
    ("1,2", "1,2,2"),
    ("1,1,2", "1,2,2"),
    ("7 pm", "7 am"),
    (r"7\text{ pm}", r"7\text{ am}"),
    ("3:30 PM", "3:30 AM"),
    ("5 south", "5 north"),
    (r"5\text{ miles south}", "5 miles north"),
    ("1.5", r"1.5\text{ million}"),
    ("5", "5 x"),
    (r"\emptyset", "0"),
    (r"(-\infty,3]", "x < 3"),
    (r"0.\overline{3}", r"0.\overline{4}"),
    ("1/3", "0.3"),
    ("B", r"\textbf{(C)} 12"),
    ("12", r"\textbf{(B) }13"),
    (r"\textbf{(B)}\ 12", "C"),
    (r"\textbf{(B)}\ 12", "(C) 12"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers(gold, answer):
    assert math(rf"so \boxed{{{answer}}}", gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_unequal_answers(gold, answer):
    assert math(rf"so \boxed{{{answer}}}", gold) == 0.0


@pytest.mark.parametrize("gold", [None, "", "  ", maths.nan, maths.inf, r"\frac{1", "It takes 2 hours and 30 minutes."])
def test_a_row_whose_answer_cannot_be_read_is_unscored(gold):
    assert math(r"\boxed{5}", gold) is None
    assert reasoning_answer(r"</think>\boxed{5}", gold) is None
    assert math("nothing", gold) is None


@pytest.mark.parametrize("gold", [["5"], True, {"a": 1}])
def test_a_row_whose_answer_is_neither_text_nor_number(gold):
    with pytest.raises(RewardError, match="the column 'answer' must hold text or numbers, got"):
        math("5", gold)


def test_whole_texts_conversations_and_prefills():
    chat = [
        {"role": "assistant", "content": r"\boxed{3}"},
        {"role": "tool", "content": r"\boxed{4}"},
        {"role": "assistant", "content": [{"type": "text", "text": r"\boxed{5}"}]},
    ]
    assert [math(chat, answer) for answer in (3, 4, 5)] == [0.0, 0.0, 1.0]  # what the assistant said last
    assert math(chat[:2], 4) == 0.0  # what a tool said is not the policy's
    assert math(chat[1:2], 4) == 0.0
    assert math("5}", 5, prefill=r"The answer is \boxed{") == 1.0
    assert math([{"role": "assistant", "content": "5}"}], 5, prefill=r"The answer is \boxed{") == 1.0
    assert math(chat, 5, prefill=r"\boxed{") == 1.0  # the prefill is of the first turn
    assert math("July 4", "July 4") == 1.0  # as a whole, not its number
    assert math("July 5", "July 4") == 0.0
    assert math("11:30 PM", "11:30 PM") == math(" A.\n", "A") == math("3+5x", "5x+3") == 1.0
    assert math("7", "7", marked=True) == 0.0
    assert math("#### 7", "7", marked=True) == 1.0


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        (r"\boxed{\frac{2}{4}}", "1/2"),
        (r"\boxed{0.50}", "1/2"),
        (r"\boxed{50\%}", "1/2"),
        (r"\boxed{\sqrt{8}}", "2*sqrt(2)"),
        (r"\boxed{(B)}", "b"),
        (r"\boxed{x = 1{,}200}", "1200"),
        ("\\boxed{2516₈}", "2516 base 8"),
        (r"\boxed{02:30\text{ p.m.}}", "02:30 pm"),
        ("nothing that can be called an answer", None),
        (r"\boxed{\frac{1}", None),  # cut off
    ],
)
def test_what_is_logged_is_the_same_for_equal_answers(text, logged):
    logs = []
    math(text, "5", log_extra=lambda *pair: logs.append(pair))
    assert logs == [("answer", logged)]


def test_reasoning_counts_only_once_it_has_ended():
    assert reasoning_answer("7 is it</think>", 7) == 0.0  # nothing follows
    assert reasoning_answer("a</think>b 8</think>so 7", 7) == 1.0
    assert reasoning_answer("so 7", 7, prefill="<think></think>") == 1.0
    assert reasoning_answer("hm 7</think>7", 7, prefill="<think>") == 1.0
    assert reasoning_answer("[/r] 7", 7, end="[/r]") == 1.0
    assert reasoning_answer("x</think>so 7", 7, marked=True) == 0.0


def test_no_alarm_is_set_and_any_thread_will_do():
    results = []
    thread = threading.Thread(target=lambda: results.append(math(r"\boxed{2\sqrt{2}}", r"\sqrt{8}")))
    thread.start()
    thread.join()
    assert results == [1.0]


SENTENCES = [
    ("The answer is 3, not 4.", "3"),
    ("The answer is 5 (five).", "5"),
    ("The answer is about 3.14", "3.14"),
    ("The answer is A because it is big", "A"),
    ("The correct option is B", "B"),
    ("The answer is option C", "C"),
    ("The answer is 5 m/s.", "5"),
    ("The answer is 5 km/h.", "5"),
    ("The answer is y = 2x + 3, a line.", "y=2x+3"),
    ("The answer is 2516 in base 8.", "2516_8"),
    ("The answer is not 4 but 5.", "5"),
    ("The answer is $2$, and $3$.", "2,3"),
    ("答案:\\(5\\)。", "5"),
]


@pytest.mark.parametrize(("text", "gold"), SENTENCES)
def test_answers_in_sentences(text, gold):
    assert math(text, gold, marked=True) == 1.0
    assert math(text, "17", marked=True) == 0.0


def test_marks_in_sentences_are_compared():
    assert math("The answer is 5:30 am.", "5:30 pm") == 0.0
    assert math("The answer is 2516 base 9.", "2516_8") == 0.0
    assert math("The answer is 3 people going north.", "3") == 1.0


numbers = st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**6)


@settings(deadline=None)
@given(numbers)
def test_a_number_equals_itself_however_it_is_written(value):
    sign, size = "-" if value < 0 else "", abs(value)
    whole, part = divmod(size.numerator, size.denominator)
    written = [
        str(value),
        rf"{sign}\frac{{{size.numerator}}}{{{size.denominator}}}",
        rf"${sign}\dfrac{{{size.numerator:,}}}{{{size.denominator}}}$",
        f"{sign}{size.numerator:,}/{size.denominator}",
        f"{value * 100}%" if (value * 100).denominator == 1 else str(value),
    ]
    if whole and part:
        written += [f"{sign}{whole} {part}/{size.denominator}", rf"{sign}{whole}\frac{{{part}}}{{{size.denominator}}}"]
    for text in written:
        found = number_of(text)
        assert found is not None
        assert found.value == value, text
        assert math(rf"\boxed{{{text}}}", str(value)) == 1.0


@settings(deadline=None)
@given(st.decimals(min_value=-(10**15), max_value=10**15, places=4))
def test_a_decimal_equals_itself_however_it_is_written(value):
    for text in (f"{value}", f"{value:,}", f"${value:,}", f"{value} dollars", rf"{value}\text{{ cm}}", f"{value:.8f}"):
        assert number_of(text).value == Fraction(value), text
    assert number_of(f"{value:e}").value == Fraction(value)
    assert math(f"So {value:,}.", str(value)) == 1.0


@settings(deadline=None)
@given(numbers, numbers)
def test_numbers_are_equal_only_to_themselves(one, other):
    assert number_of(str(one)).equals(number_of(str(other))) is (one == other)


# GSM8K


@pytest.fixture(scope="module")
def gsm8k_rows():
    paths = [GSM8K / "train.jsonl", GSM8K / "test.jsonl"]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@needs_gsm8k
def test_all_of_gsm8k(gsm8k_rows):
    answers = [row["answer"] for row in gsm8k_rows]
    golds = [final_number(answer) for answer in answers]
    assert len(golds) == 8792
    assert None not in golds
    assert [read_gold(answer).number.value for answer in answers] == [Fraction(gold) for gold in golds]
    shifted = answers[1:] + answers[:1]
    same = [float(a == b) for a, b in zip(golds[1:] + golds[:1], golds, strict=True)]
    assert 0 < sum(same) < 400
    for function in (gsm8k, math):
        assert [function(answer, answer) for answer in answers] == [1.0] * 8792
        assert [function(other, answer) for other, answer in zip(shifted, answers, strict=True)] == same
    said = [f"So it is {gold:,} in all. The answer is ${gold}." for gold in golds]
    assert [math(text, answer) for text, answer in zip(said, answers, strict=True)] == [1.0] * 8792
    assert {gsm8k(text, answer) for text, answer in zip(said, answers, strict=True)} == {0.0}  # not in the asked form


def scored(functions, texts, answer):
    completions = tuple(Completion.of_tokens((3, 1), (0.0, 0.0), FinishReason.EOS, text, 0) for text in texts)
    group = Group(Prompt(0, 0, (5,), "?", "?", {"answer": answer}), completions)
    return RewardRunner([resolve_reward(spec) for spec in functions]).score([group])


def test_in_a_worker_process_as_in_a_run():
    texts = [r"\boxed{2\sqrt{2}}", r"\boxed{3}", "", r"\boxed{\sqrt{8}}"]
    scores = scored(["math", "reasoning_answer", "cosine_length(max_length=4)"], texts, r"\sqrt{8}")
    assert scores.by_function_SK.tolist() == [
        # 2 of 4 tokens: half way between 1 and 0.5, or -1 and -0.5
        [1.0, 0.0, 0.75],
        [0.0, 0.0, -0.75],
        [0.0, 0.0, -0.75],
        [1.0, 0.0, 0.75],
    ]
    assert scores.extras["answer/math"] == ["2*sqrt(2)", "3", None, "2*sqrt(2)"]


@needs_gsm8k
def test_gsm8k_in_a_worker_process(gsm8k_rows):
    rows = gsm8k_rows[:20]
    groups = [
        Group(
            Prompt(number, number, (5,), "?", "?", {"answer": row["answer"]}),
            tuple(Completion.of_tokens((3,), (0.0,), FinishReason.EOS, other["answer"], 0) for other in rows),
        )
        for number, row in enumerate(rows)
    ]
    numbers = [final_number(row["answer"]) for row in rows]
    expected = [float(one == other) for one in numbers for other in numbers]
    assert RewardRunner([resolve_reward("math")]).score(groups).rewards_S.tolist() == expected


@reward(isolated=True, timeout=3.0)
def hurried(completion, answer):
    return math(completion, answer)


def test_what_takes_for_ever_is_killed_and_unscored():
    texts = [r"\boxed{9^{9^{9^9}}}", r"\boxed{3}"]
    completions = tuple(Completion.of_tokens((3,), (0.0,), FinishReason.EOS, text, 0) for text in texts)
    scores = RewardRunner([hurried]).score([Group(Prompt(0, 0, (5,), "?", "?", {"answer": "3"}), completions)])
    assert maths.isnan(scores.rewards_S[0])
    assert scores.rewards_S[1] == 1.0
    assert "took more than 3 s" in scores.errors[0]


def test_final_numbers_are_decimals():
    assert final_number("#### 1,234.50") == Decimal("1234.50")


def test_gsm8k_logs_the_number_for_votes():
    logged = []
    for text in ("#### 1,200.0", "#### 1200", "#### -0.50", "none"):
        gsm8k(text, "#### 1200", log_extra=lambda column, value: logged.append((column, value)))
    assert logged == [("answer", value) for value in ("1200", "1200", "-0.5", None)]
