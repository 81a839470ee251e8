"""Reading rows, rendering prompts, and the order of the stream."""

import json
from collections import Counter

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from cohort.config import DataConfig
from cohort.data import PromptSet, PromptStream, check_rows, load_rows
from cohort.data.order import pass_order
from cohort.errors import DataError

ROWS = [{"question": "1+2", "answer": "3"}, {"question": "4+5", "answer": "9"}]


def test_jsonl_and_parquet(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.jsonl")) == ROWS
    assert load_rows(str(tmp_path / "a.parquet")) == ROWS
    assert load_rows(str(tmp_path / "a.jsonl"), limit=1) == ROWS[:1]


def test_text_that_is_not_plain_utf8(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(
        b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\n'
    )  # a mark first; a line separator inside
    assert load_rows(str(tmp_path / "bom.jsonl")) == [{"a": "\u2028"}]
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}\n')
    with pytest.raises(DataError, match="is not UTF-8 text: .* at byte 7"):
        load_rows(str(tmp_path / "latin.jsonl"))


def test_a_data_set_by_name(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    rows = load_rows(str(tmp_path / "set"), split="train")
    assert [dict(row) for row in rows] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no data file"),
        ("bad.jsonl", '{"a": 1}\n{"a": \n', "line 2: not valid JSON"),
        ("list.jsonl", "[1]\n", "line 1: expected an object with columns, got list"),
        ("empty.jsonl", "\n", "has no rows"),
        ("bad.parquet", "not parquet", "cannot read"),
        ("data.csv", "a,b", "expected a .jsonl or .parquet file"),
        ("no/such/dataset", None, "cannot load the data set"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(name)


def test_rows_in_memory():
    assert check_rows(ROWS, "data") is ROWS
    dataset = Dataset.from_list(ROWS)
    assert check_rows(dataset, "data") is dataset
    with pytest.raises(DataError, match="has no rows"):
        check_rows([], "data")
    with pytest.raises(DataError, match="row 0 is str"):
        check_rows(["a"], "data")
    with pytest.raises(DataError, match="must have a length"):
        check_rows(iter(ROWS), "data")
    with pytest.raises(DataError, match="by index; a DataFrame does not"):
        check_rows(pandas.DataFrame(ROWS), "data")
    with pytest.raises(DataError, match="got dict"):
        check_rows({"train": ROWS}, "data")


def test_text_prompts_are_taken_as_they_are(demo_tokenizer):
    prompts = PromptSet(ROWS, demo_tokenizer, DataConfig(prompt_column="question"))
    prompt = prompts.prompt(1, uid=7)
    assert (prompt.uid, prompt.row_index, prompt.text, prompt.prompt) == (7, 1, "4+5", "4+5")
    assert prompt.columns == ROWS[1]
    assert not prompt.is_conversation


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


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"q": "1"}, {}, r"row 1: no column 'prompt'; the row has: q. Set data.prompt_column or data.prompt_template"),
        ({"prompt": ""}, {}, "row 1: the prompt is empty"),
        ({"prompt": " \n"}, {}, "row 1: the prompt is empty"),
        ({"prompt": 5}, {}, "must be a string or a list of messages, got int"),
        ({"prompt": None}, {}, "got NoneType"),
        ({"prompt": []}, {}, "expected a list of messages"),
        ({"prompt": [{"text": "x"}]}, {}, "expected a list of messages with 'role' and 'content'"),
        ({"prompt": [{"role": "user", "content": "1"}]}, {"format": "text"}, "set data.format to 'chat' or 'auto'"),
        ({"prompt": "1"}, {"system_prompt": "be"}, "data.system_prompt needs chat format"),
        ({"prompt": "1"}, {"prompt_template": "{zzz}"}, "names column 'zzz'"),
        ({"prompt": "1"}, {"prompt_template": "{prompt"}, "is not valid"),
        ({"prompt": "1"}, {"prompt_template": "{prompt:.2f} valid"}, "is not valid"),
        ({"prompt": "1", "x": None}, {"prompt_template": "{x}zzz"}, "column 'x', which data.prompt_template names, is"),
        ({"prompt": "1", "completions": 2}, {}, "column 'completions', which is an argument"),
    ],
)
def test_rows_that_cannot_be_prompts(demo_tokenizer, row, settings, message):
    good = {"prompt": "1+2"}
    rows = [row, row] if "completions" in row else [good, row]
    if "zzz" in str(settings) or "valid" in message or "system" in str(settings):
        rows = [row]
    with pytest.raises(DataError, match=message.replace("row 1", f"row {len(rows) - 1}")):
        PromptSet(rows, demo_tokenizer, DataConfig(**settings))


def test_a_column_that_only_some_rows_have_is_none_elsewhere(demo_tokenizer):
    prompts = PromptSet([{"prompt": "1"}, {"prompt": "2", "n": 3}], demo_tokenizer, DataConfig())
    assert prompts.prompt(0, uid=0).columns == {"prompt": "1", "n": None}


def test_chat_needs_a_template(demo_tokenizer):
    import copy

    tokenizer = copy.deepcopy(demo_tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template: set data.format to 'text'"):
        PromptSet(ROWS, tokenizer, DataConfig(prompt_column="question", format="chat"))


def test_a_prompt_that_leaves_no_room(demo_tokenizer):
    prompts = PromptSet([*ROWS, {"question": "10+20"}], demo_tokenizer, DataConfig(prompt_column="question"))
    prompts.check_context(9, 4)
    with pytest.raises(DataError, match="row 2: the prompt has 5 tokens .* is 4, together more than .* context of 8"):
        prompts.check_context(8, 4)


def stream(tokenizer, count, **settings):
    rows = [{"prompt": str(n)} for n in range(count)]
    return PromptStream(PromptSet(rows, tokenizer, DataConfig()), **settings)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 5))
def test_every_row_occurs_once_in_each_pass(num_rows, per_step, seed):
    from cohort.policy import load_tokenizer
    from tests.conftest import DEMO_MODEL

    prompts = stream(_TOKENIZER.setdefault("t", load_tokenizer(str(DEMO_MODEL))), num_rows, seed=seed)
    steps = -(-3 * num_rows // per_step)
    taken = [prompt for step in range(steps) for prompt in prompts.take(step * per_step, per_step)]
    for epoch in range(3):
        rows = Counter(prompt.row_index for prompt in taken[epoch * num_rows : (epoch + 1) * num_rows])
        assert set(rows.values()) == {1}
    assert [prompt.uid for prompt in taken] == list(range(len(taken)))


_TOKENIZER: dict = {}


def test_order_depends_on_seed_and_epoch_alone():
    assert pass_order(50, 0, 0).tolist() == pass_order(50, 0, 0).tolist()
    orders = {tuple(pass_order(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


def test_without_shuffling_the_files_order_stays(demo_tokenizer):
    prompts = stream(demo_tokenizer, 5, seed=0, shuffle=False)
    assert [p.row_index for step in range(3) for p in prompts.take(2 * step, 2)] == [0, 1, 2, 3, 4, 0]


def test_half_a_surrogate_pair_is_refused_with_its_row(demo_tokenizer):
    # JSON can spell it, UTF-8 cannot; it used to be a bare TypeError of the tokenizer's.
    with pytest.raises(DataError, match="the training data, row 1: the tokenizer refused the prompt"):
        PromptSet([{"prompt": "1+2"}, {"prompt": "\ud800"}], demo_tokenizer, DataConfig())
