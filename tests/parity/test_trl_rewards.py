"""``cohort.trl.rewards`` beside TRL's own functions: the same scores, or a difference that docs/trl.md lists."""

import pytest

from cohort.trl import rewards as ours

theirs = pytest.importorskip("trl.rewards")


def turns(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


IDS = [[], [1], [1, 2, 3, 4], [5] * 7, [1, 2, 1, 2, 1, 2], list(range(90)), [7] * 99, [7] * 100, [7] * 120]


def test_functions_of_tokens():
    for make in (
        lambda source: source.get_soft_overlong_punishment(100, 20),
        lambda source: source.get_soft_overlong_punishment(max_completion_len=7, soft_punish_cache=0),
        lambda source: source.get_repetition_penalty_reward(),
        lambda source: source.get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.3),
    ):
        # One rounding of float64 differs: (1 - a / b) c and (b - a) / b c.
        assert make(ours)(IDS) == pytest.approx(make(theirs)(IDS), rel=1e-14, abs=1e-15)


def test_formats():
    texts = [
        *("<think>a</think>b", "<think>a</think>", "<think>\na\n</think>\nb\n", "a</think>b", "<think>a", ""),
        *(" <think>a</think>b", "<think>a<think>b</think>c", "<think>a</think>b</think>c", "<think></think>"),
    ]
    assert ours.think_format_reward(turns(texts)) == theirs.think_format_reward(turns(texts))


ANSWERS = [
    *((r"so \boxed{\frac{1}{3}}", r"$\frac{1}{3}$"), (r"\boxed{\frac{1}{2}}", r"$\frac{1}{3}$"), (r"\boxed{72}", "72")),
    *((r"\boxed{72.0}", "72"), (r"\boxed{71}", "72"), ("72", "72"), (r"\boxed{1,200}", "1200"), ("", "3")),
    *((r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$"), (r"\boxed{x+1}", "$1+x$"), (r"\boxed{(1,2)}", "$(1,2)$")),
    *((r"The final answer is $\frac{2}{4}$. I hope it is correct.", r"$\frac12$"), ("3 + 4 = 7", "7")),
    *((r"\boxed{3} or \boxed{4}", "4"),),
]


@pytest.mark.slow  # computer algebra is imported twice
def test_answers():
    texts, solutions = zip(*ANSWERS, strict=True)
    assert ours.accuracy_reward(turns(texts), solutions) == theirs.accuracy_reward(turns(texts), list(solutions))
    thought = [f"I think.</think>{text}" for text in texts] + list(texts)
    named = {"solution": [*solutions] * 2}
    assert ours.reasoning_accuracy_reward(turns(thought), **named) == theirs.reasoning_accuracy_reward(
        turns(thought), **named
    )
    given = turns(["\\boxed{4}"] * len(IDS) + ["\\boxed{5}"] * len(IDS)), ["4"] * 2 * len(IDS), IDS * 2
    assert ours.get_cosine_scaled_reward(100)(*given) == pytest.approx(theirs.get_cosine_scaled_reward(100)(*given))


@pytest.mark.slow
def test_answers_that_are_read_differently():
    """docs/trl.md: answers after "####" or "answer is" count without a formula, as the built-in reward reads them."""
    for text, solution in (("The answer is 7.", "7"), ("#### 7", "7")):
        assert (ours.accuracy_reward([text], [solution]), theirs.accuracy_reward(turns([text]), [solution])) == (
            [1.0],
            [0.0],
        )
