"""Rows to prompts: text and conversations, lengths, and rows that cannot be prompts."""

import numpy as np
import pytest
from datasets import Dataset

from cohort.config import DataConfig, Source
from cohort.data import LengthLimit, PromptSet, load_data
from cohort.errors import DataError
from cohort.types import RESERVED_COLUMNS
from tests.conftest import each
from tests.data.templates import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer(CHATML, bos=False)
ROWS = [{"question": "1+2", "answer": "3"}, {"question": "4+5", "answer": "9"}]
MESSAGES = [{"role": "user", "content": "1"}]
SYSTEM = [{"role": "system", "content": "x"}, *MESSAGES]


def test_text_prompts():
    prompt = PromptSet(ROWS, TOKENIZER, DataConfig(prompt_column="question")).prompt(1, uid=7)
    assert (prompt.uid, prompt.row_index, prompt.text, prompt.prompt) == (7, 1, "4+5", "4+5")
    assert (prompt.columns, prompt.is_conversation, prompt.source) == (ROWS[1], False, "")


def test_tokens_that_stand_for_images_are_refused():
    prompts = PromptSet(ROWS, TOKENIZER, DataConfig(prompt_column="question"))
    (five,) = set(prompts.prompt(1, uid=0).token_ids[-1:])
    prompts.check_tokens(None, [max(prompts.prompt(1, uid=0).token_ids) + 1])
    with pytest.raises(DataError, match=f"the prompt of .*row 1 holds token {five}, which stands for an image"):
        prompts.check_tokens(None, [five])


def test_tokens_that_the_model_lacks_are_refused():
    prompts = PromptSet(ROWS, TOKENIZER, DataConfig(prompt_column="question"))
    most = max(max(prompts.prompt(index, uid=0).token_ids) for index in range(2))
    prompts.check_tokens(most + 1)
    with pytest.raises(DataError, match=rf"the prompt of .*row 1 holds token {most} \('.'\), and the model has embed"):
        prompts.check_tokens(most)


def test_conversations():
    config = DataConfig(prompt_template="{question}=", format="chat", system_prompt="add")
    prompt = PromptSet(ROWS, TOKENIZER, config).prompt(0, uid=0)
    assert prompt.prompt == [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2="}]
    text = "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == text
    messages = PromptSet([{"prompt": MESSAGES}], TOKENIZER, DataConfig()).prompt(0, uid=0)
    assert messages.is_conversation
    assert messages.text == "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n"


@each(
    ("row", "settings", "message"),
    [
        ({"q": "1"}, {}, r"row 1: no column 'prompt'; the row has: q. Set data.prompt_column, data.prompt_template or"),
        ({"prompt": " \n"}, {}, "row 1: the prompt is empty"),
        ({"prompt": None}, {}, "row 1: the prompt must be a string or a list of messages, got NoneType"),
        ({"prompt": []}, {}, "expected a list of messages, got an empty one"),
        ({"prompt": [{"text": "x"}]}, {}, "expected a list of messages with 'role' and 'content'"),
        ({"prompt": ["x"]}, {}, "expected a list of messages with 'role' and 'content'"),
        ({"prompt": MESSAGES}, {"format": "text"}, "set data.format to 'chat' or 'auto'"),
        ({"prompt": MESSAGES}, {}, "mixed: the prompt of .*, row 0 is a string, that of .*, row 1 a list of messages"),
        ({"prompt": SYSTEM}, {"system_prompt": "be", "format": "chat"}, "row 1: has a system message of its own"),
        ({"prompt": "1"}, {"system_prompt": "be"}, "data.system_prompt needs chat format"),
        ({"prompt": "1"}, {"prompt_template": "{zzz}"}, "row 0: .* names column 'zzz'; the row has: prompt"),
        ({"prompt": "1"}, {"prompt_template": "{prompt"}, "is not valid"),
        ({"prompt": "1"}, {"prompt_template": "{prompt:.2f}"}, "is not valid"),
        ({"prompt": "1"}, {"prompt_template": "{prompt.zzz}"}, "is not valid"),
        ({"prompt": None}, {"prompt_template": "{prompt}"}, "row 1: column 'prompt', which .* names, is empty"),
        ({"prompt": "1", "image": b"x"}, {}, "column 'image': Cohort trains language models, which see no images"),
        ({"prompt": "1", "images": []}, {}, "has a column 'images'"),
    ],
)
def test_rows_that_cannot_be_prompts(row, settings, message):
    with pytest.raises(DataError, match=message):
        load_data([{"prompt": "1+2"}, row], DataConfig(**settings))


def test_reserved_column_names():
    for name in RESERVED_COLUMNS:
        rows = [{"prompt": "1", name: 2}]
        with pytest.raises(DataError, match=rf"has a column '{name}', which is an .*data.columns = {{ my_{name} ="):
            load_data(rows, DataConfig())
        load_data(rows, DataConfig(columns={f"my_{name}": name}))


def test_errors_name_the_source_and_the_row_in_it():
    rows = [{"prompt": "1", "n": 1}, {"prompt": "2", "n": 2}, {"prompt": "", "n": 2}]
    with pytest.raises(DataError, match="the training data, row 2: the prompt is empty"):
        load_data(rows, DataConfig(filter={"n": 2}))
    with pytest.raises(DataError, match="the training data, source 'mine', row 2: the prompt is empty"):
        load_data([Source(path=rows[:2]), Source(path=rows, name="mine")], DataConfig())
    mixed = [Source(path=rows[:1]), Source(path=[{"prompt": MESSAGES}])]
    with pytest.raises(DataError, match="source 'source 0', row 0 is a string, that of .* 'source 1', row 0"):
        load_data(mixed, DataConfig())
    load_data(mixed, DataConfig(format="chat"))


def test_text_and_conversations_side_by_side():
    tokenizer = byte_tokenizer(CHATML)
    rows = [{"prompt": "1"}, {"prompt": MESSAGES}, {"prompt": "2"}]
    prompts = PromptSet(rows, tokenizer, DataConfig(), mixed=True)[:]
    assert [prompt.text[:5] for prompt in prompts] == ["<bos>", "<|im_", "<bos>"]


def test_a_column_that_only_some_rows_have_is_none_elsewhere():
    one, other = {"prompt": "1"}, {"prompt": "2", "n": 3}
    sources = [Source(path=[one]), Source(path=[other])]
    for rows, names in (([one, other], ["", ""]), (sources, ["source 0", "source 1"])):
        prompts = PromptSet(rows, TOKENIZER, DataConfig())[:]
        assert [prompt.columns for prompt in prompts] == [{"prompt": "1", "n": None}, other]
        assert [prompt.source for prompt in prompts] == names


def test_half_a_surrogate_pair_is_refused_with_its_row():
    # JSON can spell it, UTF-8 cannot; the tokenizer raises a bare TypeError.
    with pytest.raises(DataError, match="the training data, row 1: the tokenizer refused the prompt"):
        PromptSet([{"prompt": "1+2"}, {"prompt": "\ud800"}], TOKENIZER, DataConfig())


@pytest.mark.parametrize(("make", "format"), [(list, "chat"), (Dataset.from_list, "text")])
def test_many_rows_are_tokenized_like_each_alone(make, format):
    tokenizer = byte_tokenizer(CHATML)
    texts = [f"{n} é {'x' * (n % 50)}" for n in range(2500)]
    rows = make([{"prompt": text, "n": n} for n, text in enumerate(texts)])
    prompts = PromptSet(rows, tokenizer, DataConfig(format=format, filter={"n": {"min": 3}}))
    assert len(prompts) == 2497
    for index in (0, 996, 997, 1000, 2496):
        prompt = prompts.prompt(index, uid=0)
        assert (prompt.row_index, prompt.columns["n"]) == (index + 3, index + 3)
        alone = tokenizer(texts[index + 3])["input_ids"]
        if format == "chat":
            alone = tokenizer.apply_chat_template(prompt.prompt, add_generation_prompt=True)["input_ids"]
        assert list(prompt.token_ids) == alone


def test_the_fingerprint_is_of_the_prompts_and_their_bounds():
    def of(*texts, weights=None):
        sources = [Source(path=[{"prompt": text}], weight=weights and weights[n]) for n, text in enumerate(texts)]
        return PromptSet(sources, TOKENIZER, DataConfig()).fingerprint

    prints = [of("12", "3"), of("1", "23"), of("12", "3", weights=[1.0, 2.0]), of("12", "3", weights=[1.0, 1.0])]
    assert len(set(prints)) == 4
    assert of("12", "3") == prints[0]


def fitted(tokens, rule, rows=None):
    rows = rows or [{"prompt": "1" * n} for n in (3, 5, 2, 7, 4)]
    return PromptSet(rows, TOKENIZER, DataConfig(), limit=LengthLimit(tokens, "data.max_prompt_length", rule))


def test_overlong_prompts():
    assert fitted(7, "error").longest == 7
    with pytest.raises(DataError) as caught:
        fitted(4, "error")
    assert str(caught.value) == (
        "the training data: 2 of 5 prompts have more than 4 tokens (data.max_prompt_length); the longest, row 3, has 7. "
        "Either raise data.max_prompt_length, or set data.overlong_prompts to 'drop', which leaves such rows out, or to "
        "'truncate_left', which keeps the last tokens of such prompts"
    )
    dropped = fitted(4, "drop")
    assert [prompt.row_index for prompt in dropped[:]] == [0, 2, 4]
    assert dropped.row_indices.tolist() == [0, 2, 4]
    words = "2 to 4 tokens, median 3, 99% at most 4; 2 longer prompts dropped (data.overlong_prompts)"
    assert dropped.describe_lengths() == words
    cut = fitted(4, "truncate_left", [{"prompt": "123456"}, {"prompt": "12"}])
    assert [prompt.text for prompt in cut[:]] == ["3456", "12"]
    assert cut.prompt(0, uid=0).prompt == "123456"
    assert cut.describe_lengths().endswith("1 longer prompts cut to their last tokens (data.overlong_prompts)")
    with pytest.raises(DataError, match="every prompt has more than 1 tokens .*: nothing is left"):
        fitted(1, "drop")


def test_where_the_limit_comes_from():
    assert LengthLimit.of(DataConfig(), None, 10) is None
    assert LengthLimit.of(DataConfig(max_prompt_length=5), None, 10).tokens == 5
    assert LengthLimit.of(DataConfig(max_prompt_length=5, overlong_prompts="drop"), 100, 10).rule == "drop"
    limit = LengthLimit.of(DataConfig(max_prompt_length=500), 1024, 600)
    assert (limit.tokens, limit.why) == (424, "the model's context of 1,024 less rollout.max_completion_length, 600")
    with pytest.raises(
        DataError, match="4 tokens .the model's context of 8 .*Either set rollout.max_completion_length to at most 3"
    ):
        LengthLimit.of(DataConfig(), 8, 4).check(np.array([4, 5]), "the training data", str)
    full = LengthLimit.of(DataConfig(overlong_prompts="drop"), 600, 600, lower="--max-tokens")
    words = r"max_completion_length .600. leaves no room .* context of 600 tokens: set --max-tokens to at most 583; "
    with pytest.raises(DataError, match=words + "the longest prompt has 17"):
        full.check(np.array([4, 17]), "the training data", str)
    with pytest.raises(DataError, match="600 tokens: lower --max-tokens; the longest prompt has 700"):
        full.check(np.array([700]), "the training data", str)
