"""Rows to prompts: text and conversations, lengths, and rows that cannot be prompts."""

import copy

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import DataConfig, Source
from cohort.data import LengthLimit, PromptSet, check_data, load_data
from cohort.data.lengths import spread
from cohort.errors import DataError
from cohort.types import RESERVED_COLUMNS
from tests.data.templates import CHATML, byte_tokenizer

ROWS = [{"question": "1+2", "answer": "3"}, {"question": "4+5", "answer": "9"}]


def test_text_prompts_are_taken_as_they_are(demo_tokenizer):
    prompts = PromptSet(ROWS, demo_tokenizer, DataConfig(prompt_column="question"))
    prompt = prompts.prompt(1, uid=7)
    assert (prompt.uid, prompt.row_index, prompt.text, prompt.prompt) == (7, 1, "4+5", "4+5")
    assert prompt.columns == ROWS[1]
    assert not prompt.is_conversation
    assert prompt.source == ""


def test_chat_prompts_go_through_the_template(demo_tokenizer):
    config = DataConfig(prompt_template="{question}=", format="chat", system_prompt="carry")
    prompt = PromptSet(ROWS, demo_tokenizer, config).prompt(0, uid=0)
    assert prompt.text == "<|system|>carry<|user|>1+2=<|assistant|>".replace(
        "carry", demo_text(demo_tokenizer, "carry")
    )
    assert prompt.prompt == [{"role": "system", "content": "carry"}, {"role": "user", "content": "1+2="}]


def demo_text(tokenizer, text):
    """What the small vocabulary keeps of a text."""
    return tokenizer.decode(tokenizer(text)["input_ids"])


def test_message_lists_are_chat_in_auto(demo_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "1+2"}]}]
    prompt = PromptSet(rows, demo_tokenizer, DataConfig()).prompt(0, uid=0)
    assert prompt.text == "<|user|>1+2<|assistant|>"
    assert prompt.is_conversation


MESSAGES = [{"role": "user", "content": "1"}]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"q": "1"}, {}, r"row 1: no column 'prompt'; the row has: q. Set data.prompt_column, data.prompt_template or"),
        ({"prompt": ""}, {}, "row 1: the prompt is empty"),
        ({"prompt": " \n"}, {}, "row 1: the prompt is empty"),
        ({"prompt": 5}, {}, "row 1: the prompt must be a string or a list of messages, got int"),
        ({"prompt": None}, {}, "got NoneType"),
        ({"prompt": []}, {}, "expected a list of messages, got an empty one"),
        ({"prompt": [{"text": "x"}]}, {}, "expected a list of messages with 'role' and 'content'"),
        ({"prompt": ["x"]}, {}, "expected a list of messages with 'role' and 'content'"),
        ({"prompt": MESSAGES}, {"format": "text"}, "set data.format to 'chat' or 'auto'"),
        (
            {"prompt": MESSAGES},
            {},
            "text and conversations are mixed: the prompt of the training data, row 0 is a string, that of the training data, row 1 a list",
        ),
        (
            {"prompt": [{"role": "system", "content": "x"}, *MESSAGES]},
            {"system_prompt": "be", "format": "chat"},
            "row 1: has a system message of its own",
        ),
        ({"prompt": "1"}, {"system_prompt": "be"}, "data.system_prompt needs chat format"),
        (
            {"prompt": "1"},
            {"prompt_template": "{zzz}"},
            "row 0: data.prompt_template names column 'zzz'; the row has: prompt",
        ),
        ({"prompt": "1"}, {"prompt_template": "{prompt"}, "is not valid"),
        ({"prompt": "1"}, {"prompt_template": "{prompt:.2f}"}, "is not valid"),
        ({"prompt": "1"}, {"prompt_template": "{prompt.zzz}"}, "is not valid"),
        ({"prompt": "1", "x": None}, {"prompt_template": "{x}"}, "row 0: data.prompt_template names column 'x'"),
        (
            {"prompt": "1", "image": b"x"},
            {},
            "has a column 'image': Cohort trains language models, which see no images",
        ),
        ({"prompt": "1", "images": []}, {}, "has a column 'images'"),
    ],
)
def test_rows_that_cannot_be_prompts(row, settings, message):
    data = load_data([{"prompt": "1+2"}, row], DataConfig(**settings))
    with pytest.raises(DataError, match=message):
        check_data(data)  # before any tokenizer


def test_a_templates_column_must_have_a_value():
    data = load_data([{"x": None}], DataConfig(prompt_template="{x}"))
    with pytest.raises(DataError, match="row 0: column 'x', which data.prompt_template names, is empty"):
        check_data(data)


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS))
def test_names_that_rewards_get_from_elsewhere(name):
    data = load_data([{"prompt": "1", name: 2}], DataConfig())
    with pytest.raises(
        DataError, match=rf"has a column '{name}', which is an argument .*data.columns = {{ my_{name} ="
    ):
        check_data(data)
    check_data(load_data([{"prompt": "1", name: 2}], DataConfig(columns={f"my_{name}": name})))


def test_errors_name_the_row_of_the_file_and_its_source():
    rows = [{"prompt": "1", "n": 1}, {"prompt": "2", "n": 2}, {"prompt": "", "n": 2}]
    with pytest.raises(DataError, match="the training data, row 2: the prompt is empty"):
        check_data(load_data(rows, DataConfig(filter={"n": 2})))
    sources = [Source(path=rows[:2]), Source(path=rows, name="mine")]
    with pytest.raises(DataError, match="the training data, source 'mine', row 2: the prompt is empty"):
        check_data(load_data(sources, DataConfig()))
    mixed = [Source(path=rows[:1]), Source(path=[{"prompt": MESSAGES}])]
    with pytest.raises(
        DataError,
        match="prompt of the training data, source 'source 0', row 0 is a string, that of .* 'source 1', row 0",
    ):
        check_data(load_data(mixed, DataConfig()))
    check_data(load_data(mixed, DataConfig(format="chat")))


def test_a_column_that_only_some_rows_have_is_none_elsewhere(demo_tokenizer):
    prompts = PromptSet([{"prompt": "1"}, {"prompt": "2", "n": 3}], demo_tokenizer, DataConfig())
    assert prompts.prompt(0, uid=0).columns == {"prompt": "1", "n": None}
    data = load_data([Source(path=[{"prompt": "1"}]), Source(path=[{"prompt": "2", "n": 3}])], DataConfig())
    first, second = PromptSet(data, demo_tokenizer, DataConfig()).all()
    assert (first.columns, second.columns) == ({"prompt": "1", "n": None}, {"prompt": "2", "n": 3})
    assert (first.source, second.source) == ("source 0", "source 1")


def test_chat_needs_a_template(demo_tokenizer):
    tokenizer = copy.deepcopy(demo_tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template: set data.format to 'text'"):
        PromptSet(ROWS, tokenizer, DataConfig(prompt_column="question", format="chat"))


def test_half_a_surrogate_pair_is_refused_with_its_row(demo_tokenizer):
    # JSON can spell it, UTF-8 cannot; it used to be a bare TypeError of the tokenizer's.
    with pytest.raises(DataError, match="the training data, row 1: the tokenizer refused the prompt"):
        PromptSet([{"prompt": "1+2"}, {"prompt": "\ud800"}], demo_tokenizer, DataConfig())


@pytest.mark.parametrize("make", [list, Dataset.from_list])
@pytest.mark.parametrize("template", [None, CHATML])
def test_many_rows_are_tokenized_like_each_alone(make, template):
    tokenizer = byte_tokenizer(template)
    texts = [f"{n} é {'x' * (n % 50)}" for n in range(2500)]
    rows = make([{"prompt": text, "n": n} for n, text in enumerate(texts)])
    config = DataConfig(format="chat" if template else "text", filter={"n": {"min": 3}})
    data = load_data(rows, config)
    prompts = PromptSet(data, tokenizer, config)
    assert len(prompts) == 2497
    for index in (0, 1, 996, 997, 1000, 2496):
        prompt = prompts.prompt(index, uid=0)
        assert (prompt.row_index, prompt.columns["n"]) == (index + 3, index + 3)
        text = texts[index + 3]
        alone = tokenizer(text)["input_ids"]
        if template:
            alone = tokenizer.apply_chat_template(prompt.prompt, add_generation_prompt=True)["input_ids"]
        assert list(prompt.token_ids) == alone


def test_the_fingerprint_is_of_the_prompts_and_their_bounds(demo_tokenizer):
    def of(*texts, weights=None):
        sources = [Source(path=[{"prompt": text}], weight=weights and weights[n]) for n, text in enumerate(texts)]
        return PromptSet(load_data(sources, DataConfig()), demo_tokenizer, DataConfig()).fingerprint

    prints = [of("12", "3"), of("1", "23"), of("12", "3", weights=[1.0, 2.0]), of("12", "3", weights=[1.0, 1.0])]
    assert len(set(prints)) == 4
    assert of("12", "3") == prints[0]


LENGTHS = [{"prompt": "1" * n, "n": n} for n in (3, 5, 2, 7, 4)]


def fitted(tokenizer, tokens, rule, rows=LENGTHS):
    limit = LengthLimit(tokens, "data.max_prompt_length", rule)
    return PromptSet(rows, tokenizer, DataConfig(), limit=limit)


def test_overlong_prompts(demo_tokenizer):
    assert fitted(demo_tokenizer, 7, "error").longest == 7
    with pytest.raises(DataError) as caught:
        fitted(demo_tokenizer, 4, "error")
    assert str(caught.value) == (
        "the training data: 2 of 5 prompts have more than 4 tokens (data.max_prompt_length); the longest, row 3, has 7. "
        "Either raise data.max_prompt_length, or set data.overlong_prompts to 'drop', which leaves such rows out, or to "
        "'truncate_left', which keeps the last tokens of such prompts"
    )
    dropped = fitted(demo_tokenizer, 4, "drop")
    assert [prompt.row_index for prompt in dropped.all()] == [0, 2, 4]
    assert dropped.describe_lengths() == (
        "2 to 4 tokens, median 3, 99% at most 4; 2 longer prompts dropped (data.overlong_prompts)"
    )
    rows = [{"prompt": "123456"}, {"prompt": "12"}]
    cut = fitted(demo_tokenizer, 4, "truncate_left", rows)
    assert [prompt.text for prompt in cut.all()] == ["3456", "12"]
    assert cut.prompt(0, uid=0).prompt == "123456"
    assert cut.describe_lengths().endswith("1 longer prompts cut to their last tokens (data.overlong_prompts)")
    with pytest.raises(DataError, match="every prompt has more than 1 tokens .*: nothing is left"):
        fitted(demo_tokenizer, 1, "drop")


def test_where_the_limit_comes_from():
    assert LengthLimit.of(DataConfig(), None, 10) is None
    assert LengthLimit.of(DataConfig(max_prompt_length=5), None, 10).tokens == 5
    assert LengthLimit.of(DataConfig(max_prompt_length=5, overlong_prompts="drop"), 100, 10).rule == "drop"
    limit = LengthLimit.of(DataConfig(max_prompt_length=500), 1024, 600)
    assert (limit.tokens, limit.why) == (424, "the model's context of 1,024 less rollout.max_completion_length, 600")
    with pytest.raises(
        DataError, match="4 tokens .the model's context of 8 .*Either lower rollout.max_completion_length"
    ):
        LengthLimit.of(DataConfig(), 8, 4).check(1, 2, "row 1", 5, "the training data")
    with pytest.raises(DataError, match=r"max_completion_length .600. leaves no room .* context of 600 tokens"):
        LengthLimit.of(DataConfig(), 600, 600)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=300))
def test_the_spread_of_lengths(lengths):
    low, median, most, high = spread(np.array(lengths))
    assert (low, high) == (min(lengths), max(lengths))
    for share, bound in ((0.5, median), (0.99, most)):  # the least length that so large a share does not exceed
        assert sum(length <= bound for length in lengths) >= share * len(lengths) - 1e-9
        assert sum(length < bound for length in lengths) < share * len(lengths)
