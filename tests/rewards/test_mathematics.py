"""math, reasoning_answer and gsm8k: the answer of a text, and which answers are equal."""

import json
import math as maths
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.errors import RewardError
from cohort.rewards import resolve_reward, reward
from cohort.rewards.mathematics import final_answer, final_number, gsm8k, math, number_of, read_gold, reasoning_answer
from tests.conftest import GSM8K, each
from tests.rewards.conftest import rollout

BOXES = [
    (r"It is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{3} no, wait: \boxed{4}", "4"),
    (r"\boxed{1} and \boxed{2}", "1,2"),  # one list
    (r"$\boxed{x=1}$ or $\boxed{x=2}$.", "x=1,x=2"),
    (r"\boxed{a_{1}+\{2\}}", r"a_{1}+\{2\}"),
    (r"\boxed 5 apples", "5"),
    (r"\fbox{7}", "7"),
    (r"so \boxed{12} and \boxed{7", None),  # cut off: the answer is unknown
    (r"so \boxed{12", None),
    (r"so \boxed{7, I mean \boxed{12}", "12"),
    (r"so \boxed{}", None),
    (r"\boxed{\boxed{5}}", r"\boxed{5}"),
    ("steps\n#### 5\n", "5"),
    ("#### $1,200", "$1,200"),
    ("#### Step 3: Sum\nso 7", "7"),  # a heading
    (r"#### 5 and then \boxed{6}", "6"),  # the last mark counts
    (r"\boxed{6} and then" + "\n#### 5", "5"),
    (r"\boxed{6} is it. Tell me whether the answer is clear.", "6"),  # a mark has precedence over a phrase
]
PHRASES = [
    ("The answer is 3.5. Bye 7", "3.5"),
    ("**Answer:** 5", "5"),
    ("Answer:\n\n$$\n\\frac{3}{4}\n$$\n", r"\frac{3}{4}"),
    ("The answer is (B) 12 apples", "B"),
    ("The answer is $2$ and $3$.", "2,3"),
    ("The answer is $2$, and $3$.", "2,3"),
    ("The answers are 3 and 5.", "3 and 5"),
    ("The answer is 5 because 3 and 2 are added", "5"),
    ("The answer is Monday.", "Monday"),
    ("The answer is 3, not 4.", "3"),  # up to the first ordinary word
    ("The answer is 5 (five).", "5"),
    ("The answer is twelve (12).", "12"),
    ("The answer is about 3.14", "3.14"),
    ("The answer is a total of 5 apples", "5"),
    ("The answer is not 4 but 5.", "5"),
    ("The answer is 5x + 3, because both are there.", "5x + 3"),
    ("The answer is 5 or 6 apples.", "5 or 6"),
    ("The answer is 2ab.", "2ab"),  # letters next to a digit or an operator are not a word
    ("The answer is ab + 3.", "ab + 3"),
    ("The answer is ab.", "ab"),
    ("The answer is **5** apples and no more.", "5"),
    (r"The answer is 5\text{ cm} because", r"5\text{ cm}"),
    ("The answer is A because it is big", "A"),
    ("The answer is option C", "C"),
    ("The answer is choice (C), as said.", "C"),
    ("The correct option is **B**.", "B"),
    ("The answer is A, B and C", "A, B and C"),
    ("所以答案是5个苹果。", "5"),
    ("答案:\\(5\\)。", "5"),
]
UNMARKED = [
    ("一共有12个", "12"),
    ("The answer is what comes out when all of these are put in. So 8.", "8"),  # a phrase without an answer
    ("First 3, then 4.", "4"),
    ("cost $5 and $6", "$6"),  # currency, not a formula
    ("so $3+4=7$", "3+4=7"),
    ("17 apples, where $x$ is their number.", "17"),  # a lone letter is a name
    ("so 1 1/2 cups", "1 1/2"),
    ("about 1,234,567 people", "1,234,567"),
    ("it is 5:30", "5:30"),
    ("5x + 3", "5x + 3"),  # nothing but an answer
    ("no real root", "no real root"),
    ("nothing here that could be an answer", None),
    ("", None),
]


def test_the_final_answer_of_a_text():
    assert [final_answer(text) for text, _ in BOXES + PHRASES + UNMARKED] == [
        answer for _, answer in BOXES + PHRASES + UNMARKED
    ]
    assert [final_answer(text, marked=True) for text, _ in PHRASES] == [answer for _, answer in PHRASES]
    assert {final_answer(text, marked=True) for text, _ in UNMARKED} == {None}


EQUAL = {  # pairs of a row's and a completion's answer
    "thousands": [("1200", r"1{,}200"), ("1200000", "1 200 000"), ("1200", "$1,200"), ("3.5", r"\$3.50")],
    "units": [("5", "5 apples"), ("5", r"5\text{ cm}^2"), ("5 square meters", "5"), ("5", "5 m²"), ("5", "5 m/s"), ("5", r"5 m/s^2")],
    "scales": [("3000000", "3 million"), ("1500000", r"1.5\text{ million}"), (r"1.5\text{ million dollars}", "1500000")],
    "degrees": [("30", r"30^\circ"), ("30", "30°")],
    "sign": [("-7", "\u22127"), ("-3/2", r"-1\frac12")],
    "fractions": [("0.5", r"\frac{1}{2}"), ("1/2", ".5"), (r"\frac{3}{4}", r"\dfrac34"), ("3/2", r"1\frac{1}{2}"), ("3/2", "1 1/2"), ("0.1", "1/10"), ("3.5", "3½")],
    "percent": [("50%", "0.5"), ("50%", "50"), ("50", r"50\%"), ("50", "50 percent")],
    "powers": [("1500", r"1.5 \times 10^{3}"), ("0.001", "1e-3"), ("2^{100}", "1267650600228229401496703205376")],
    "rounding": [("1/3", "0.333333"), (r"\pi", "3.141593")],
    "repeating": [("1/3", r"0.\overline{3}"), (r"0.\overline{3}", "1/3"), ("7/6", r"1.1\overline{6}"), (r"0.\overline{34}", r"\frac{34}{99}")],
    "algebra": [(r"\sqrt{8}", r"2\sqrt{2}"), ("2x+1", "1+2x"), ("(x+1)^2", "x^2+2x+1"), ("x^2 - 1", "(x-1)(x+1)"), (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}")],
    "functions": [(r"\log_2 8", "3"), (r"\binom{5}{2}", "10"), ("5!", "120")],
    "equations": [("x=5", "5"), ("5", "x=5"), ("5", r"2+3=5"), ("5", r"\frac{26}{5} \approx 5"), ("y=2x+3", "2x+3")],
    "lists": [("1,2", "2,1"), (r"\{1,2,3\}", "3, 2, 1"), ("1,1,2", "2,1,1"), (r"\{1\}", r"\{1,1\}"), (r"1\pm\sqrt2", r"1 + \sqrt{2}, 1 - \sqrt{2}")],
    "tuples": [("(1,2)", "(1,2)"), ("(3,1)", "( 3, 1 )"), (r"\left(\frac{1}{2}, 3\right)", "(0.5, 3)")],
    "intervals": [("[1,2)", r"[1, \frac{4}{2})"), (r"(-\infty,2]\cup[3,\infty)", r"[3,\infty) \cup (-\infty,2]"), (r"1 \le x < 2", "[1,2)"), (r"(-\infty,3]", r"x \le 3"), ("(3,5)", "3 < x < 5")],
    "sets": [(r"\emptyset", r"\varnothing"), (r"\varnothing", "∅")],
    "matrices": [(r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}")],
    "words": [("B", "(B)"), (r"\text{(B)}", "B"), (r"\text{Monday}", "monday"), ("no real root", r"\text{No real root}"), ("No", "no")],
    "times": [("12:30", "12:30"), (r"7\text{ pm}", "7 p.m."), ("7 pm", "7"), ("3:30 PM", r"3:30\text{ p.m.}")],
    "directions": [(r"3\sqrt{2}\text{ miles north}", r"\sqrt{18}\text{ miles north}"), ("5 miles north", r"5\text{ mi north}")],
    "numbers": [(7, "7"), (0.25, r"\frac14"), (1e-07, "0.0000001")],
    "sentences": [("The total is $18$ dollars.", "18"), (r"So it is \boxed{18}, by 2*9.", "18")],
    "bases": [("2516_8", "2516_{8}"), ("2516_8", r"2516_{\text{eight}}"), ("2516_8", "2516₈"), ("2516_8", "2516 (base 8)"), ("2516_8", "(2516)_8"), ("1A3_{16}", r"\text{1A3}_{16}")],
    "bases of one answer only": [("2516_8", "2516"), ("2516", "2516_8")],  # the question names the base
    "variables": [("a_1", "a_{1}"), ("5m", "5 m")],
    "Unicode": [(r"2\sqrt{2}", "√8"), (r"\sqrt{x+1}", "√(x+1)"), ("6", "2·3"), ("x^2+1", "x²+1"), ("x^{10}", "x¹⁰")],
    "choices": [("B", r"\textbf{(B)} 12"), ("B", r"\textbf{(B) }12"), ("D", r"\text{(D) }\frac12"), ("C", "C. 5"), ("12", r"\textbf{(B) }12"), ("12", "(B) 12")],
    "choices with a letter in the row": [(r"\textbf{(B)}\ 12", "12"), (r"\textbf{(B)}\ 12", "B"), (r"\textbf{(B)}\ 12", "(B) 12")],
}  # fmt: skip
UNEQUAL = {
    "numbers": [("72", "73"), ("-7", "7"), ("0.1", "0.1000001"), ("10000000000000000001", "10000000000000000000"), ("5", "5000"), ("2", r"2\pi")],
    "rounding": [("1/3", "0.333"), ("1/3", "0.3"), ("1/3", "0.333334"), ("370369/3", "123456.333"), ("2/3", "0.666666"), ("0.00000001", "0.000000"), (r"\sqrt{2}", "1.41")],
    "repeating": [(r"0.\overline{3}", r"0.\overline{4}")],
    "percent": [("50%", "5"), ("50%", "0.05")],
    "scales": [("3", "3 million"), ("1.5", r"1.5\text{ million}")],
    "variables": [("5", "5x"), ("5", "5 x"), ("a_1", "a_2"), ("x+1", "x-1")],
    "tuples and intervals": [("(1,2)", "(2,1)"), ("(3,1)", "(2,1)"), ("[1,2)", "(1,2)"), (r"(-\infty,3]", "x < 3"), ("x > 2", "x < 2")],
    "lists": [("1,2", "1,2,3"), ("1", "1,1"), ("1,2", "1,2,2"), ("1,1,2", "1,2,2"), ("1234", r"\{1, 234\}")],
    "equations": [("x=5", "y=5"), ("x=1,y=1", "1")],
    "words": [("A", "B"), ("dog", "god"), ("Monday", "Tuesday"), ("Yes", "No"), ("Monday", "5")],
    "sets and matrices": [(r"\emptyset", "0"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}")],
    "unreadable": [("5", r"\frac{5}{}"), ("5", "1/0"), ("5", "5" * 2000), ("5", "5" + "+0" * 300)],
    "times": [("12:30", "12:45"), ("7 pm", "7 am"), (r"7\text{ pm}", r"7\text{ am}"), ("3:30 PM", "3:30 AM")],
    "bases": [("2516_8", "2516_9"), ("2516_8", "1358"), ("11_2", "11_{10}"), ("-11_2", "-11_3"), ("11_2", "11 base 3"), ("1A3_{16}", "3A1_{16}")],
    "directions": [("5 south", "5 north"), (r"5\text{ miles south}", "5 miles north")],
    "choices": [("B", r"\textbf{(C)} 12"), ("12", r"\textbf{(B) }13"), (r"\textbf{(B)}\ 12", "C"), (r"\textbf{(B)}\ 12", "(C) 12")],
}  # fmt: skip


@each(("topic", "expected"), [(topic, 1.0) for topic in EQUAL] + [(topic, 0.0) for topic in UNEQUAL])
def test_equal_and_unequal_answers(topic, expected):
    pairs = (EQUAL if expected else UNEQUAL)[topic]
    assert [(gold, text) for gold, text in pairs if math(rf"so \boxed{{{text}}}", gold) != expected] == []


def test_answers_in_sentences():
    sentences = [
        ("The answer is 5 m/s.", "5"),
        ("The answer is 5 km/h.", "5"),
        ("The answer is y = 2x + 3, a line.", "y=2x+3"),
        ("The answer is 2516 in base 8.", "2516_8"),
        ("The answer is 3 people going north.", "3"),
    ]
    assert [math(text, gold, marked=True) for text, gold in sentences] == [1.0] * 5
    assert [math(text, "17", marked=True) for text, _ in sentences] == [0.0] * 5
    assert math("The answer is 5:30 am.", "5:30 pm") == 0.0
    assert math("The answer is 2516 base 9.", "2516_8") == 0.0


def test_a_row_without_a_readable_answer_is_unscored():
    for gold in (None, "", "  ", maths.nan, maths.inf, r"\frac{1", "It takes 2 hours and 30 minutes."):
        assert math(r"\boxed{5}", gold) is None
        assert reasoning_answer(r"</think>\boxed{5}", gold) is None
        assert math("nothing", gold) is None
    for gold in (["5"], True, {"a": 1}):
        with pytest.raises(RewardError, match="the column 'answer' must hold text or numbers, got"):
            math("5", gold)


def test_whole_texts_conversations_and_prefills():
    chat = [
        {"role": "assistant", "content": r"\boxed{3}"},
        {"role": "tool", "content": r"\boxed{4}"},
        {"role": "assistant", "content": [{"type": "text", "text": r"\boxed{5}"}]},
    ]
    assert [math(chat, answer) for answer in (3, 4, 5)] == [0.0, 0.0, 1.0]  # the last assistant message
    assert math(chat[:2], 4) == math(chat[1:2], 4) == 0.0  # never the message of a tool
    assert math("5}", 5, prefill=r"The answer is \boxed{") == 1.0
    assert math(chat, 5, prefill=r"\boxed{") == 1.0  # the prefill belongs to the first turn
    assert math("July 4", "July 4") == 1.0  # the whole text, not its number
    assert math("July 5", "July 4") == 0.0
    assert math("11:30 PM", "11:30 PM") == math(" A.\n", "A") == math("3+5x", "5x+3") == 1.0
    assert math("7", "7", marked=True) == 0.0
    assert math("#### 7", "7", marked=True) == 1.0


def test_the_logged_answer_is_the_same_for_equal_answers():
    for text, logged in [
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
    ]:
        logs = []
        math(text, "5", log_extra=lambda *pair, logs=logs: logs.append(pair))
        assert logs == [("answer", logged)]


def test_reasoning_must_have_ended():
    assert reasoning_answer("7 is it</think>", 7) == 0.0  # nothing follows
    assert reasoning_answer("a</think>b 8</think>so 7", 7) == 1.0
    assert reasoning_answer("so 7", 7, prefill="<think></think>") == 1.0
    assert reasoning_answer("hm 7</think>7", 7, prefill="<think>") == 1.0
    assert reasoning_answer("[/r] 7", 7, end="[/r]") == 1.0
    assert reasoning_answer("x</think>so 7", 7, marked=True) == 0.0


numbers = st.fractions(min_value=-(10**12), max_value=10**12, max_denominator=10**6)


@settings(deadline=None, max_examples=50)
@given(numbers, numbers)
def test_a_number_equals_itself_however_it_is_written_and_no_other(value, other):
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
        assert number_of(text).value == value, text
        assert math(rf"\boxed{{{text}}}", str(value)) == 1.0
    assert number_of(str(value)).equals(number_of(str(other))) is (value == other)


@settings(deadline=None, max_examples=50)
@given(st.decimals(min_value=-(10**15), max_value=10**15, places=4))
def test_a_decimal_equals_itself_however_it_is_written(value):
    for text in (f"{value}", f"{value:,}", f"${value:,}", f"{value} dollars", rf"{value}\text{{ cm}}", f"{value:.8f}"):
        assert number_of(text).value == Fraction(value), text
    assert number_of(f"{value:e}").value == Fraction(value)
    assert math(f"So {value:,}.", str(value)) == 1.0


def test_the_final_number_of_a_text_is_compared_by_value_and_logged():
    numbers = {
        "#### 72": "72", "a\n####72": "72", "#### 1,234": "1234", "#### $1,234.50": "1234.50", "#### $ 5": "5", "#### -3": "-3",
        "#### -$3": "-3", "#### 5.": "5", "#### .5": ".5", "#### 5 apples": "5", "#### 1\n#### 2": "2",
    }  # fmt: skip
    assert {text: final_number(text) for text in numbers} == {text: Decimal(n) for text, n in numbers.items()}
    assert [final_number(text) for text in ("", "72", "####", "#### x 5", "### 5")] == [None] * 5
    logged = []
    texts = ["#### 1,200.0", "#### 1200", "#### -0.50", "none", [{"role": "assistant", "content": "#### 1200"}]]
    found = [gsm8k(text, "#### 1200", log_extra=lambda _, value: logged.append(value)) for text in texts]
    assert found == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert logged == ["1200", "1200", "-0.5", None, "1200"]
    assert gsm8k("3", "#### 3", prefill="#### ") == 1.0
    assert [gsm8k("#### 3", gold) for gold in ("no number", None)] == [None, None]


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not beside the repository")
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rows_of_gsm8k(every):
    paths = [GSM8K / "train.jsonl", GSM8K / "test.jsonl"]
    answers = [json.loads(line)["answer"] for path in paths for line in path.read_text().splitlines()]
    assert len(answers) == 8792
    answers = answers[::every]
    golds = [final_number(answer) for answer in answers]
    assert [read_gold(answer).number.value for answer in answers] == [Fraction(gold) for gold in golds]
    shifted = answers[1:] + answers[:1]
    same = [float(a == b) for a, b in zip(golds[1:] + golds[:1], golds, strict=True)]
    assert 0 < sum(same) < 400
    for function in (gsm8k, math):
        assert [function(answer, answer) for answer in answers] == [1.0] * len(golds)
        assert [function(other, answer) for other, answer in zip(shifted, answers, strict=True)] == same
    sentences = [f"So it is {gold:,} in all. The answer is ${gold}." for gold in golds]
    assert [math(text, answer) for text, answer in zip(sentences, answers, strict=True)] == [1.0] * len(golds)
    assert {gsm8k(text, answer) for text, answer in zip(sentences, answers, strict=True)} == {0.0}  # no ####


def test_in_a_worker_process_as_in_a_run(runner_of):
    texts = [r"\boxed{2\sqrt{2}}", r"\boxed{3}", "??", r"\boxed{\sqrt{8}}"]
    specs = ["math", "reasoning_answer", f"cosine_length(max_length={2 * len(texts[0])})"]
    scores = runner_of(*map(resolve_reward, specs)).score(rollout(texts, answer=r"\sqrt{8}"))
    assert scores.by_function_SK[:, :2].tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]
    assert scores.by_function_SK[0, 2] == pytest.approx(0.75, abs=1e-12)  # half way between 1 and 0.5
    assert scores.extras["answer/math"] == ["2*sqrt(2)", "3", None, "2*sqrt(2)"]
    with ThreadPoolExecutor() as threads:  # math-verify's own alarm would need the main thread
        assert threads.submit(math, texts[0], r"\sqrt{8}").result() == 1.0


def test_a_comparison_that_does_not_end_is_killed_and_unscored(runner_of):
    @reward(isolated=True, timeout=1.0)
    def hurried(completion, answer):
        return math(completion, answer)

    scores = runner_of(hurried).score(rollout([r"\boxed{9^{9^{9^9}}}", r"\boxed{3}"], answer="3"))
    assert maths.isnan(scores.rewards_S[0])
    assert scores.rewards_S[1] == 1.0
    assert "took more than 1 s" in scores.errors[0]
