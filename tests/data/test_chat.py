"""Conversations: chat templates, their variables and tools, and the prefill."""

import json

import pyarrow
import pytest

from cohort.config import DataConfig, GRPOConfig
from cohort.data import PromptSet
from cohort.errors import ConfigError, DataError
from tests.conftest import each
from tests.data.templates import CHATML, DEEPSEEK_R1, HARMONY, LLAMA3, MISTRAL, QWEN3, byte_tokenizer

USER = {"role": "user", "content": "1+1?"}
TALK = [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 2+2?"}]
BEGUN = [USER, {"role": "assistant", "content": "The sum"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NO_PROMPT = CHATML.split("\n{%- if add")[0]
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def prompts_of(template, rows, **settings):
    return PromptSet(rows, byte_tokenizer(template), DataConfig(**settings))[:]


def prompt_of(template, messages, row=None, **settings):
    return prompts_of(template, [{"prompt": messages, **(row or {})}], **settings)[0]


@each(
    ("template", "variables", "messages", "end", "prefill"),
    [
        (CHATML, {}, TALK, "<|im_start|>assistant\n", ""),
        (CHATML, {}, BEGUN, "<|im_start|>assistant\nThe sum", "The sum"),
        (QWEN3, {"enable_thinking": True}, TALK, "<|im_start|>assistant\n", ""),
        (QWEN3, {"enable_thinking": False}, TALK, "assistant\n" + EMPTY_THOUGHT, EMPTY_THOUGHT),
        (QWEN3, {}, BEGUN, EMPTY_THOUGHT + "The sum", EMPTY_THOUGHT + "The sum"),
        (DEEPSEEK_R1, {}, TALK, "And 2+2?<Assistant><think>\n", "<think>\n"),
        (DEEPSEEK_R1, {}, BEGUN, "<Assistant>The sum", "The sum"),
        (LLAMA3, {}, TALK, "<|header|>assistant<|end_header|>\n\n", ""),
        (MISTRAL, {}, TALK, "[INST] And 2+2? [/INST]", ""),
        (MISTRAL, {}, BEGUN, "[/INST] The sum", "The sum"),
        (HARMONY, {}, TALK, "<|start|>assistant", ""),
        (HARMONY, {}, BEGUN, "final<|message|>The sum", "The sum"),
    ],
)
def test_the_prefill_is_what_the_template_adds_to_the_assistant_turn(template, variables, messages, end, prefill):
    prompt = prompt_of(template, messages, chat_template_kwargs=variables)
    assert prompt.text.endswith(end)
    assert prompt.prefill == prefill


def test_a_row_overrides_the_template_variables():
    variables = ({"enable_thinking": False}, None, "", '{"enable_thinking": true}')
    rows = [{"prompt": TALK, "chat_template_kwargs": given} for given in variables]
    prompts = prompts_of(QWEN3, rows, chat_template_kwargs={"enable_thinking": False})
    assert [prompt.prefill for prompt in prompts] == [EMPTY_THOUGHT, EMPTY_THOUGHT, EMPTY_THOUGHT, ""]


@each("name", ["messages", "tokenize", "tools", "add_generation_prompt"])
def test_template_variables_never_meet_what_rendering_sets(name):
    with pytest.raises(DataError, match=rf"row 0: chat_template_kwargs sets '{name}', which rendering sets itself"):
        prompt_of(QWEN3, TALK, chat_template_kwargs={name: False})


def test_template_variables_may_have_any_other_name():
    template = "{{ tokenizer }}{{ self_ }}{{ variables }}" + CHATML
    prompt = prompt_of(template, TALK, chat_template_kwargs={"tokenizer": "t", "self_": "s", "variables": "v"})
    assert prompt.text.startswith("tsv<|im_start|>")


def test_text_has_no_prefill_and_the_special_tokens_of_the_tokenizer():
    prompt = prompt_of(None, "1+1=")
    assert (prompt.prefill, prompt.text) == ("", "<bos>1+1=")


def test_a_template_that_refuses_the_probes():
    wants_system = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + CHATML
    assert prompt_of(wants_system, BEGUN, system_prompt="Add.").prefill == "The sum"
    assert prompt_of(wants_system, TALK, system_prompt="Add.").prefill == ""


@pytest.mark.parametrize("template", [CHATML, DEEPSEEK_R1, MISTRAL])
def test_batches_are_tokenized_like_each_conversation_alone(template):
    tokenizer = byte_tokenizer(template)
    talks = [[{"role": "user", "content": text}] for text in ("hi", "é <think> x", "a" * 500)] + [TALK, BEGUN]
    prompts = PromptSet([{"prompt": talk} for talk in talks], tokenizer, DataConfig())[:]
    for prompt, talk in zip(prompts, talks, strict=True):
        end = {"continue_final_message": True} if talk is BEGUN else {"add_generation_prompt": True}
        assert list(prompt.token_ids) == tokenizer.apply_chat_template(talk, tokenize=True, **end)["input_ids"]


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL])])
def test_tools_of_a_row(given):
    rows = [{"prompt": TALK, "tools": tools} for tools in (given, None, [])]
    one, *others = prompts_of(QWEN3, [*rows, {"prompt": TALK}], chat_template_kwargs={"enable_thinking": False})
    assert one.text.startswith("<|im_start|>system\nTools:\n" + json.dumps(TOOL) + "\n")
    assert {other.text for other in others} == {one.text[one.text.index("<|im_start|>user") :]}
    assert one.prefill == EMPTY_THOUGHT


OTHER_TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def test_no_tools_are_none_for_the_template():
    """Templates may tell None from an empty list."""
    template = "{{ 'none' if tools is none else 'some' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"prompt": [USER], "tools": tools} for tools in ([], "[]", None, "")]
    assert all(prompt.text.startswith("none") for prompt in prompts_of(template, rows))


def prompts_with_tools(rows, tools, template=QWEN3, **settings):
    named = {tool["function"]["name"]: tool for tool in tools or []}

    def tools_of(row):
        if unknown := [name for name in row["tools"] or [] if name not in named]:
            raise DataError(f"there is no tool {unknown[0]}")
        return list(named.values()) if row["tools"] is None else [named[name] for name in row["tools"]]

    tools_of = None if tools is None else tools_of
    return PromptSet(rows, byte_tokenizer(template), DataConfig(**settings), tools=tools_of)[:]


def test_every_conversation_has_the_tools_of_the_run():
    rows = [{"prompt": [USER], "tools": names} for names in (None, ["find"], '["find", "add"]', [])]
    all_tools, find, same, none = prompts_with_tools(
        rows, [TOOL, OTHER_TOOL], chat_template_kwargs={"enable_thinking": True}
    )
    head, first, second = "<|im_start|>system\nTools:\n", json.dumps(TOOL), json.dumps(OTHER_TOOL)
    assert all_tools.text.startswith(f"{head}{first}\n{second}\n<|im_end|>")
    assert find.text.startswith(f"{head}{second}\n<|im_end|>")
    assert same.text.startswith(f"{head}{second}\n{first}\n<|im_end|>")
    assert find.template_arguments == {"enable_thinking": True, "tools": [OTHER_TOOL]}
    assert (none.text.startswith("<|im_start|>user"), none.template_arguments) == (True, {"enable_thinking": True})


@each(
    ("row", "tools", "message"),
    [
        ({"prompt": "1+1", "tools": []}, [TOOL], "row 0: the prompt is text; .* set data.format to 'chat'"),
        ({"prompt": "1+1"}, [], "row 0: the prompt is text; tools and environments need conversations"),
        ({"prompt": [USER], "tools": ["saw"]}, [TOOL], "row 0: there is no tool saw"),
        ({"prompt": [USER], "tools": ["saw"]}, None, "names 'saw', and the run has no tools: set environment.tools"),
        ({"prompt": [USER], "tools": [TOOL, "add"]}, [TOOL], "must be a list of JSON schemas of functions, or of name"),
    ],
)
def test_rows_that_do_not_go_with_the_tools_of_the_run(row, tools, message):
    with pytest.raises(DataError, match=message):
        prompts_with_tools([row], tools)


CALLS = """{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}{%- for m in messages %}<{{ m.role }}>
{%- if 'tool_calls' in m %}{%- for call in m.tool_calls %}{{ call.function | tojson }}{%- endfor %}
{%- else %}{{ m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<assistant>{%- endif %}"""


def test_keys_that_arrow_adds_are_removed():
    def asked(name, **arguments):
        call = {"type": "function", "function": {"arguments": arguments, "name": name}}
        talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
        return {"prompt": talk, "tools": [dict(sorted({"name": name, **arguments}.items()))]}  # as old versions sort

    rows = [{"prompt": [USER], "tools": []}, asked("f", city="B"), asked("g", zip=9)]
    plain, arrow = prompts_of(CALLS, rows), prompts_of(CALLS, pyarrow.Table.from_pylist(rows))
    assert [prompt.text for prompt in plain] == [prompt.text for prompt in arrow]
    assert arrow[0].text == "<user>1+1?<assistant>"
    assert arrow[1].text.startswith('{"city": "B", "name": "f"}<user>')
    assert '{"arguments": {"city": "B"}, "name": "f"}' in arrow[1].text
    assert [prompt.prompt for prompt in arrow] == [row["prompt"] for row in rows]


def test_a_user_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="data.chat_template: cannot read my_template.j2: No such file"):
        GRPOConfig(chat_template="my_template.j2")
    (tmp_path / "my_template.j2").write_text(MISTRAL)
    for template in ("my_template.j2", MISTRAL):
        assert prompt_of(CHATML, [USER], chat_template=template).text == "<bos>[INST] 1+1? [/INST]"
    no_brace_needed = "{{ messages[0].content }} ->{% if false %}{{ add_generation_prompt }}{% endif %}"
    (tmp_path / "mine.jinja").write_text(no_brace_needed)
    assert prompt_of(None, [USER], chat_template=str(tmp_path / "mine.jinja")).text == "1+1? ->"


def test_a_template_of_its_own_for_tools():
    templates = {"default": CHATML, "tool_use": QWEN3}
    one, other = prompts_of(templates, [{"prompt": TALK, "tools": [TOOL]}, {"prompt": TALK}])
    assert (one.text.count("Tools:"), other.text.count("Tools:")) == (1, 0)


def test_a_header_that_depends_on_a_variable():
    template = "{% for m in messages %}<{{ name if m.role == 'assistant' else m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<{{ name }}>Well: {% endif %}"
    rows = [{"prompt": TALK, "chat_template_kwargs": {"name": name}} for name in ("a", "bb")]
    assert [prompt.prefill for prompt in prompts_of(template, rows)] == ["Well: ", "Well: "]


def test_content_in_parts_of_text():
    parts = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(parts, [{"role": "user", "content": content}]).text == "<user>ab<assistant>"


ONLY_STRINGS = CHATML.replace("m.content", "(m.content if m.content is string else '')")
WRITES_ANYTHING = CHATML.replace("m.content", "(m.content ~ '')")
AS_JSON = CHATML.replace("m.content", "(m.content | tojson)")
ONLY_PARTS = CHATML.replace("m.content", "m.content[0].text + (m.content[1].text if m.content[1] else '')")
EITHER = CHATML.replace(
    "m.content", "(m.content if m.content is string else (m.content | map(attribute='text') | join))"
)
SILENT = CHATML.replace("m.content", "('' if m.role == 'system' else m.content)")
IMAGES = CHATML.replace("m.content", "('<image>' if 'image' in m.content[0] else m.content[0].text)")


def of_parts(*texts):
    return [{"type": "text", "text": text, "image": None} for text in texts]


@each("template", [CHATML, ONLY_STRINGS, WRITES_ANYTHING, ONLY_PARTS, EITHER, SILENT])
@each("content", ["add 1", of_parts("add", " 1"), of_parts("add 1")])
def test_contents_are_shown_in_the_form_that_the_template_takes(template, content):
    """Arrow gives all parts the same keys, such as an image that is None."""
    prompt = prompt_of(template, [{"role": "user", "content": content}])
    assert prompt.text == "<|im_start|>user\nadd 1<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(one if isinstance(one, str) else one["text"] for one in prompt.prompt[0]["content"]) == "add 1"


def test_strings_and_parts_may_be_mixed():
    talk = [{"role": "system", "content": of_parts("be")}, *TALK]
    texts = {prompt_of(template, talk).text for template in (CHATML, ONLY_STRINGS, ONLY_PARTS, EITHER)}
    assert texts == {prompt_of(CHATML, [{"role": "system", "content": "be"}, *TALK]).text}


def test_a_continued_answer_in_parts():
    begun = [USER, {"role": "assistant", "content": of_parts("The ", "sum")}]
    prompts = [prompt_of(template, begun) for template in (CHATML, ONLY_STRINGS, ONLY_PARTS, EITHER, MISTRAL)]
    assert {prompt.prefill for prompt in prompts} == {"The sum"}


def test_parts_without_an_image_have_none():
    assert "<image>" not in prompt_of(IMAGES, user(of_parts("add 1"))).text


def test_thoughts_of_earlier_turns_in_parts_may_go():
    talk = [USER, {"role": "assistant", "content": of_parts("<think>a</think>2")}, *user(of_parts("And 2+2?"))]
    assert "<Assistant>2<eos>" in prompt_of(DEEPSEEK_R1, talk).text


def user(content):
    return [{"role": "user", "content": content}]


@each(
    ("template", "messages", "row", "settings", "message"),
    [
        (NO_PROMPT, TALK, {}, {}, "the chat template writes no generation prompt: .* Set data.chat_template"),
        ("{% if true %}Answer!{% endif %}", [USER], {}, {}, "the chat template does not show the messages"),
        (None, TALK, {}, {}, "no chat template: set data.format to 'text' for string prompts"),
        (MISTRAL, [{"role": "tool", "content": "x"}], {}, {}, "row 0: the chat template refused the messages: only us"),
        (CHATML, TALK, {"tools": "hammer, saw"}, {}, "row 0: column 'tools' must be a list of JSON .* 'hammer, saw'"),
        (CHATML, TALK, {"tools": [1]}, {}, "row 0: column 'tools' must be a list of JSON schemas"),
        (CHATML, TALK, {"tools": [TOOL]}, {}, "row 0: the chat template reads no variable 'tools'"),
        (CHATML, TALK, {"chat_template_kwargs": [1]}, {}, "row 0: column 'chat_template_kwargs' must be a table"),
        (CHATML, TALK, {"chat_template_kwargs": "{"}, {}, "row 0: column 'chat_template_kwargs' must be a table"),
        (QWEN3, TALK, {"chat_template_kwargs": {"thinkin": 1}}, {}, "row 0: the chat template reads no .* 'thinkin'"),
        (QWEN3, TALK, {}, {"chat_template_kwargs": {"thinkin": 1}}, "'thinkin'; it reads: .*enable_thinking, messages"),
        (CHATML, user([{"type": "image"}, {"type": "text"}]), {}, {}, "row 0: the content .* text, .* of type 'image'"),
        (CHATML, [*user(0), *TALK], {}, {}, "row 0: the content of a message must be text, .* of type 'int'"),
        (
            CHATML,
            user(of_parts("a", None)),
            {},
            {},
            "row 0: a part of type 'text' needs a string as 'text', got .*None",
        ),
        (CHATML, user(["a"]), {}, {}, "row 0: the content .* text, .* of type 'str'"),
        (CHATML, user(of_parts("", "")), {}, {}, "row 0: the prompt is empty: the last message, of role 'user'"),
        (
            SILENT,
            [{"role": "system", "content": of_parts("be")}, USER],
            {},
            {},
            "row 0: .* does not show the text 'be', n",
        ),
        (CHATML, user(""), {}, {}, "row 0: the prompt is empty: the last message, of role 'user'"),
        (CHATML, [*BEGUN[:1], {"role": "assistant", "content": ""}], {}, {}, "of role 'assistant', has no content"),
        (CHATML, "1+1", {}, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs is for conv.* row 0 is text"),
        (CHATML, "1+1", {"tools": [TOOL]}, {}, "row 0 is text, and its column 'tools' is for conversations"),
        (CHATML, "1+1", {"chat_template_kwargs": {"x": 1}}, {}, "its column 'chat_template_kwargs' is for conv"),
    ],
)
def test_what_a_prompt_cannot_use(template, messages, row, settings, message):
    with pytest.raises(DataError, match=message):
        prompt_of(template, messages, row, **settings)


def test_text_next_to_empty_columns_of_conversations():
    assert prompt_of(CHATML, "1+1", {"tools": [], "chat_template_kwargs": None}).text == "<bos>1+1"
