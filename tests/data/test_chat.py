"""Conversations: chat templates, their variables and tools, and what of the answer a prompt holds."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from cohort.config import DataConfig
from cohort.data import PromptSet
from cohort.errors import DataError
from tests.data.templates import (
    CHATML,
    DEEPSEEK_R1,
    HARMONY,
    LLAMA3,
    MISTRAL,
    NO_GENERATION_PROMPT,
    QWEN3,
    byte_tokenizer,
)

USER = {"role": "user", "content": "1+1?"}
TALK = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 2+2?"}]
BEGUN = [USER, {"role": "assistant", "content": "The sum"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def prompt_of(template, messages, row=None, **settings):
    rows = [{"prompt": messages, **(row or {})}]
    return PromptSet(rows, byte_tokenizer(template), DataConfig(**settings)).prompt(0, uid=0)


@pytest.mark.parametrize(
    ("template", "settings", "messages", "end", "prefill"),
    [
        (CHATML, {}, TALK, "<|im_start|>assistant\n", ""),
        (CHATML, {}, BEGUN, "<|im_start|>assistant\nThe sum", "The sum"),
        (QWEN3, {}, TALK, "<|im_start|>assistant\n", ""),
        (QWEN3, {"enable_thinking": True}, TALK, "<|im_start|>assistant\n", ""),
        (QWEN3, {"enable_thinking": False}, TALK, "assistant\n" + EMPTY_THOUGHT, EMPTY_THOUGHT),
        (QWEN3, {}, BEGUN, EMPTY_THOUGHT + "The sum", EMPTY_THOUGHT + "The sum"),
        (DEEPSEEK_R1, {}, TALK, "And 2+2?<Assistant><think>\n", "<think>\n"),
        (DEEPSEEK_R1, {}, BEGUN, "<Assistant>The sum", "The sum"),
        (LLAMA3, {}, TALK, "<|header|>assistant<|end_header|>\n\n", ""),
        (LLAMA3, {}, BEGUN, "<|end_header|>\n\nThe sum", "The sum"),
        (MISTRAL, {}, TALK, "[INST] And 2+2? [/INST]", ""),
        (MISTRAL, {}, BEGUN, "[/INST] The sum", "The sum"),
        (HARMONY, {}, TALK, "<|start|>assistant", ""),
        (HARMONY, {}, BEGUN, "final<|message|>The sum", "The sum"),
    ],
)
def test_what_of_the_answer_stands_in_the_prompt(template, settings, messages, end, prefill):
    prompt = prompt_of(template, messages, chat_template_kwargs=settings)
    assert prompt.text.endswith(end)
    assert prompt.prefill == prefill


def test_a_prefill_is_of_the_rows_own_variables():
    rows = [
        {"prompt": TALK, "chat_template_kwargs": given}
        for given in ({"enable_thinking": False}, None, "", '{"enable_thinking": true}')
    ]
    prompts = PromptSet(rows, byte_tokenizer(QWEN3), DataConfig(chat_template_kwargs={"enable_thinking": False})).all()
    assert [prompt.prefill for prompt in prompts] == [EMPTY_THOUGHT, EMPTY_THOUGHT, EMPTY_THOUGHT, ""]


def test_text_has_no_prefill():
    prompt = PromptSet([{"prompt": "1+1="}], byte_tokenizer(), DataConfig()).prompt(0, uid=0)
    assert (prompt.prefill, prompt.text) == ("", "<bos>1+1=")  # text gets the tokenizer's own special tokens


def test_a_template_that_cannot_be_probed_has_prefills_where_they_are_certain():
    # It wants a system message, which the probe has not.
    wants_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML
    prompt = prompt_of(wants_system, BEGUN, system_prompt="Add.")
    assert prompt.prefill == "The sum"
    assert prompt_of(wants_system, TALK, system_prompt="Add.").prefill == ""


@pytest.mark.parametrize("template", [CHATML, QWEN3, DEEPSEEK_R1, LLAMA3, MISTRAL, HARMONY])
def test_batches_are_tokenized_as_the_tokenizer_does_it_one_by_one(template):
    tokenizer = byte_tokenizer(template)
    talks = [[{"role": "user", "content": text}] for text in ("hi", "é <think> x", "a" * 500)] + [TALK]
    prompts = PromptSet([{"prompt": talk} for talk in talks], tokenizer, DataConfig())
    for index, talk in enumerate(talks):
        alone = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=True)
        assert list(prompts.prompt(index, uid=0).token_ids) == alone["input_ids"]
    begun = PromptSet([{"prompt": BEGUN}], tokenizer, DataConfig()).prompt(0, uid=0)
    alone = tokenizer.apply_chat_template(BEGUN, continue_final_message=True, tokenize=True, return_dict=True)
    assert list(begun.token_ids) == alone["input_ids"]


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row(given):
    rows = [{"prompt": TALK, "tools": given}, {"prompt": TALK, "tools": None}, {"prompt": TALK}]
    one, other, third = PromptSet(rows, byte_tokenizer(QWEN3), DataConfig()).all()
    assert one.text.startswith("<|im_start|>system\nTools:\n" + json.dumps(TOOL) + "\n")
    assert other.text == third.text == one.text[one.text.index("<|im_start|>user") :]
    assert one.prefill == ""


def test_keys_that_arrow_makes_up_are_left_out(tmp_path):
    tools = [[{"name": "add", "x": {"a": 1}}], [{"name": "sub", "y": 2}]]
    rows = [
        {"prompt": [{"role": "user", "content": "q"}, BEGUN[1] | {"tool_calls": None}, USER], "tools": each}
        for each in tools
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    import cohort.data

    data = cohort.data.load_data(str(tmp_path / "a.parquet"), DataConfig())
    texts = [prompt.text for prompt in PromptSet(data, byte_tokenizer(QWEN3), DataConfig()).all()]
    assert '{"name": "add", "x": {"a": 1}}\n' in texts[0]
    assert '{"name": "sub", "y": 2}\n' in texts[1]


def test_a_template_of_ones_own(tmp_path):
    (tmp_path / "mine.jinja").write_text(
        "{{ messages[0].content }} ->{% if false %}{{ add_generation_prompt }}{% endif %}"
    )
    prompt = prompt_of(None, [USER], chat_template=str(tmp_path / "mine.jinja"))
    assert prompt.text == "1+1? ->"
    assert prompt_of(CHATML, [USER], chat_template=MISTRAL).text == "<bos>[INST] 1+1? [/INST]"


@pytest.mark.parametrize(
    ("template", "messages", "row", "message"),
    [
        (NO_GENERATION_PROMPT, TALK, {}, "the chat template writes no generation prompt: .* Set data.chat_template"),
        (None, TALK, {}, "no chat template: set data.format to 'text' for string prompts, data.chat_template"),
        (
            MISTRAL,
            [{"role": "tool", "content": "x"}],
            {},
            "row 0: the chat template refused the messages: only user and",
        ),
        (
            CHATML,
            TALK,
            {"tools": "hammer, saw"},
            "row 0: column 'tools' must be a list of JSON schemas .* 'hammer, saw'",
        ),
        (CHATML, TALK, {"tools": [1]}, "row 0: column 'tools' must be a list of JSON schemas"),
        (CHATML, TALK, {"chat_template_kwargs": [1]}, "row 0: column 'chat_template_kwargs' must be a table"),
        (CHATML, TALK, {"chat_template_kwargs": "{"}, "row 0: column 'chat_template_kwargs' must be a table"),
        (
            CHATML,
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}],
            {},
            "row 0: a message's content must be text, .* of type 'image'",
        ),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], {}, "of type 'image_url'"),
        (CHATML, [{"role": "user", "content": 5}], {}, "row 0: a message's content must be text, .* of type 'int'"),
        (CHATML, [{"role": "user", "content": ""}], {}, "row 0: the prompt is empty: the last message, of role 'user'"),
        (
            CHATML,
            [*TALK, {"role": "assistant", "content": ""}],
            {},
            "the last message, of role 'assistant', has no content",
        ),
    ],
)
def test_conversations_that_cannot_be_prompts(template, messages, row, message):
    with pytest.raises(DataError, match=message):
        prompt_of(template, messages, row)


def test_content_in_parts_of_text():
    parts = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    prompt = prompt_of(
        parts, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    )
    assert prompt.text == "<user>ab<assistant>"
