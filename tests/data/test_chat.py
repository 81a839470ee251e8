"""Conversations: chat templates, their variables and tools, and what of the answer a prompt holds."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from cohort.config import DataConfig, GRPOConfig
from cohort.data import PromptSet
from cohort.errors import ConfigError, DataError
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


def test_a_template_must_show_the_messages(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="the chat template does not show the messages"):
        prompt_of(CHATML, [USER], chat_template="{% if true %}Answer!{% endif %}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="data.chat_template: cannot read my_template.j2: No such file"):
        GRPOConfig(chat_template="my_template.j2")
    (tmp_path / "my_template.j2").write_text(MISTRAL)
    assert prompt_of(CHATML, [USER], chat_template="my_template.j2").text.startswith("<bos>[INST] 1+1? [/INST]")


CALLS = """{%- for m in messages %}<{{ m.role }}>
{%- if 'tool_calls' in m %}{%- for call in m.tool_calls %}{{ call.function | tojson }}{%- endfor %}
{%- else %}{{ m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{%- endif %}"""


def test_keys_that_arrow_makes_up_in_messages_are_left_out():
    def asked(name, **arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]

    rows = [{"prompt": [USER]}, {"prompt": asked("f", city="B")}, {"prompt": asked("g", zip=9)}]
    given = [
        PromptSet(kind, byte_tokenizer(CALLS), DataConfig()).all() for kind in (rows, pyarrow.Table.from_pylist(rows))
    ]
    assert [prompt.text for prompt in given[0]] == [prompt.text for prompt in given[1]]
    assert given[1][0].text == "<user>1+1?<assistant>"
    assert '{"name": "f", "arguments": {"city": "B"}}' in given[1][1].text
    assert [prompt.prompt for prompt in given[1]] == [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({}, {"chat_template_kwargs": {"x": 1}}, "data.chat_template_kwargs is for conversations, and .*row 0 is text"),
        (
            {"tools": [TOOL]},
            {},
            "row 0 is text, and its column 'tools' is for conversations: set data.format to 'chat'",
        ),
        ({"chat_template_kwargs": {"x": 1}}, {}, "row 0 is text, and its column 'chat_template_kwargs' is for convers"),
    ],
)
def test_what_text_prompts_have_no_use_for(row, settings, message):
    with pytest.raises(DataError, match=message):
        prompt_of(CHATML, "1+1", row, **settings)
    empty = dict.fromkeys(row)
    assert prompt_of(CHATML, "1+1", empty).text == "<bos>1+1"


def test_what_the_template_does_not_read():
    with pytest.raises(
        DataError, match="the chat template reads no variable 'enable_thinkin'; it reads: .*enable_thinking, messages"
    ):
        prompt_of(QWEN3, [USER], chat_template_kwargs={"enable_thinkin": False})
    with pytest.raises(DataError, match="row 0: the chat template reads no variable 'enable_thinkin'"):
        prompt_of(QWEN3, [USER], {"chat_template_kwargs": {"enable_thinkin": False}})
    with pytest.raises(DataError, match="row 0: the chat template reads no variable 'tools'"):
        prompt_of(CHATML, [USER], {"tools": [TOOL]})


def test_variables_of_each_row_cost_no_probes_before_they_are_needed(monkeypatch):
    tokenizer, rendered = byte_tokenizer("{{ date }}" + CHATML), []
    real = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *a, **k: rendered.append(1) or real(*a, **k), raising=True
    )
    rows = [{"prompt": [USER], "chat_template_kwargs": {"date": str(n)}} for n in range(50)]
    prompts = PromptSet(rows, tokenizer, DataConfig())
    assert len(rendered) < 60
    assert [prompts.prompt(n, uid=0).text[:2] for n in (3, 49)] == ["3<", "49"]
