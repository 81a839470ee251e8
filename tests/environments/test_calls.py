"""Parsers of calls, on the templates of ten families: what a policy may write, by hand."""

import random
from typing import ClassVar

import pytest

from cohort.environments.calls import CallParser, ParsedTurn
from cohort.environments.contract import ToolCall
from cohort.errors import ConfigError
from tests.conftest import each
from tests.environments.templates import FAMILIES, TOOLS, with_template

ADD = ToolCall("add", {"a": 2, "b": 40})
WEATHER = ToolCall("weather", {"city": "Zürich"})
JSON = '{"name": "add", "arguments": {"a": 2, "b": 40}}'
DS = "<\uff5c{}\uff5c>".format

CALL = {
    "qwen2_5": f"<tool_call>\n{JSON}\n</tool_call>",
    "qwen3": f"<tool_call>\n{JSON}\n</tool_call>",
    "smollm": f"<tool_call>\n{JSON}\n</tool_call>",
    "qwen3_5": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n40\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>40</arg_value>\n"
    "</tool_call>",
    "llama3_1": '{"name": "add", "parameters": {"a": 2, "b": 40}}',
    "mistral": f"[TOOL_CALLS][{JSON}]",
    "gptoss": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 40}',
    "deepseek": DS("tool▁calls▁begin")
    + DS("tool▁call▁begin")
    + "function"
    + DS("tool▁sep")
    + 'add\n```json\n{"a": 2, "b": 40}\n```'
    + DS("tool▁call▁end")
    + DS("tool▁calls▁end"),
}
"""A call as a policy writes it, without the end token."""

_PARSERS = {}


def parser(family):
    if family not in _PARSERS:
        _PARSERS[family] = CallParser.of(FAMILIES[family].tokenizer, TOOLS)
    return _PARSERS[family]


def parse(family, text, prefix=""):
    return parser(family).parse(text, prefix)


@pytest.mark.parametrize("family", CALL)
class TestEveryFamily:
    def test_finds_a_call(self, family):
        turn = parse(family, CALL[family])
        assert turn.calls == (ADD,)
        assert turn.content == ""
        function = turn.message["tool_calls"][0]["function"]
        arguments = '{"a": 2, "b": 40}' if FAMILIES[family].json_arguments else {"a": 2, "b": 40}
        assert (turn.message["role"], function) == ("assistant", {"name": "add", "arguments": arguments})

    def test_text_without_a_call_is_content(self, family):
        text = "<|channel|>final<|message|>It is 42." if family == "gptoss" else "It is 42.\n"
        turn = parse(family, text)
        assert turn.calls == ()
        assert turn.message == {"role": "assistant", "content": "It is 42." if family == "gptoss" else "It is 42.\n"}

    def test_what_is_cut_off_is_an_error_or_text_and_never_another_call(self, family):
        """A prefix of the call is a malformed call once it begins like one; complete calls may lack closing tags."""
        text = CALL[family]
        for length in range(len(text)):
            for call in parse(family, text[:length]).calls:
                assert call.error or call == ADD

    def test_garbled_arguments_are_an_error(self, family):
        garbled = CALL[family].replace("40", "4}{", 1) if "{" in CALL[family] else CALL[family].replace("b", "<", 1)
        (call,) = (turn := parse(family, garbled)).calls
        assert call.error.startswith("invalid tool call: ")
        assert "tool_calls" not in turn.message

    def test_the_message_renders(self, family):
        """Templates accept the message and the answers."""
        turn = parse(family, CALL[family])
        messages = [{"role": "user", "content": "x"}, turn.message, *turn.answers(["42"])]
        text = FAMILIES[family].tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        assert text.rindex("42") > text.rindex("add") or family in ("smollm", "gptoss")

    def test_random_mutations_never_raise(self, family):
        rng = random.Random(0)
        found = {"text": 0, "errors": 0, "calls": 0}
        for _ in range(300):
            turn = parse(family, mutated(rng, f"So: {CALL[family]}" if rng.random() < 0.3 else CALL[family]))
            assert turn.message["content"] == turn.content
            found["text" if not turn.calls else "errors" if turn.calls[0].error else "calls"] += 1
        assert min(found.values()) > 10, "the mutations reach all outcomes"


def mutated(rng, text):
    characters = list(text)
    for _ in range(rng.randint(1, 3)):
        place, kind = rng.randrange(len(characters) + 1), rng.randrange(4)
        if kind == 0:
            del characters[place : place + rng.randint(1, 8)]
        elif kind == 1:
            characters.insert(place, rng.choice("{}[]<>\"'\\\n |/=,:a\udc80\x00"))
        elif kind == 2:
            other = rng.randrange(len(characters) + 1)
            characters[place:place] = characters[other : other + rng.randint(1, 30)]
        else:
            characters = characters[:place]
    return "".join(characters)


SEVERAL = {
    "qwen2_5": f'{CALL["qwen2_5"]}\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Zürich"}}}}\n</tool_call>',
    "qwen3_5": f"{CALL['qwen3_5']}\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": f"{CALL['glm']}\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
    "mistral": f'[TOOL_CALLS][{JSON}, {{"name": "weather", "arguments": {{"city": "Z\\u00fcrich"}}}}]',
    "deepseek": CALL["deepseek"].removesuffix(DS("tool▁calls▁end"))
    + "\n"
    + DS("tool▁call▁begin")
    + "function"
    + DS("tool▁sep")
    + 'weather\n```json\n{"city": "Zürich"}\n```'
    + DS("tool▁call▁end")
    + DS("tool▁calls▁end"),
}


@each("family", SEVERAL)
def test_several_calls_after_text(family):
    turn = parse(family, f"I look.\n\n{SEVERAL[family]}")
    assert turn.calls == (ADD, WEATHER)
    assert turn.content == "I look."
    assert parse(family, f"I look.\n\n{SEVERAL[family]}\nThen I go on.").content == "I look.\nThen I go on."
    assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["add", "weather"]


@each(
    ("family", "text"),
    [
        ("qwen3", "I could write <tool_call> and close it with </tool_call>."),
        ("qwen3", "The tag is <tool_call>"),
        ("qwen3_5", "Write <tool_call> and <function=...> first."),
        ("glm", "Write <tool_call>name of the tool."),
        ("deepseek", "The list {1, 2} and ```json\n{}\n```"),
        ("mistral", "See [TOOL_CALLS] in the manual."),
        ("llama3_1", '{"answer": 42}'),
        ("llama3_1", '[{"answer": 42}]'),
        ("llama3_1", f"A call looks like this: {CALL['llama3_1']}"),
        ("gptoss", "<|channel|>final<|message|>Send it to=functions.add, please."),
    ],
)
def test_a_mention_is_text(family, text):
    assert parse(family, text).calls == ()


@each(
    ("text", "error"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2,}}\n</tool_call>', "invalid JSON"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>', "NaN is not a JSON value"),
        ('<tool_call>\n{"arguments": {"a": 2}}\n</tool_call>', "the name of the tool is missing"),
        ('<tool_call>\n{"name": "add", "arguments": [2, 40]}\n</tool_call>', "the arguments must be a JSON object"),
        (f"<tool_call>\n{JSON}}}\n</tool_call>", "expected </tool_call> after it, got '}"),
        ("<tool_call>\nadd(2, 40)\n</tool_call>", "invalid JSON"),
        ("<tool_call>\n[]\n</tool_call>", "the list of calls is empty"),
        ('<tool_call>\n{"name": "add"', "invalid JSON"),
    ],
)
def test_what_the_policy_reads_of_a_malformed_call(text, error):
    (call,) = parse("qwen3", text).calls
    assert call.error.startswith("invalid tool call: ")
    assert error in call.error
    assert len(call.error) < 120


def test_a_malformed_call_does_not_hide_the_next():
    turn = parse("qwen3", f'<tool_call>\n{{"name": oops}}\n</tool_call>\n{CALL["qwen3"]}')
    assert [bool(call.error) for call in turn.calls] == [True, False]
    assert turn.content == '<tool_call>\n{"name": oops}\n</tool_call>'


def test_a_missing_closing_tag_at_the_end_is_accepted():
    assert parse("qwen3", f"<tool_call>\n{JSON}").calls == (ADD,)


def test_llama_s_other_ways_to_write_a_call():
    for text in (
        '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": 40}}',
        '\n{"type": "function", "name": "add", "parameters": {"a": 2, "b": 40}}',
        '[{"name": "add", "arguments": {"a": 2, "b": 40}}]',
    ):
        assert parse("llama3_1", text).calls == (ADD,)


def test_line_breaks_within_json_text_are_accepted():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Z\nB"}}</tool_call>'
    assert parse("qwen3", text).calls == (ToolCall("weather", {"city": "Z\nB"}),)


def test_arguments_are_json_values_that_a_tokenizer_takes():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Z\\ud800", "\\udfff": 1}}</tool_call>'
    assert parse("qwen3", text).calls == (ToolCall("weather", {"city": "Z\ufffd", "\ufffd": 1}),)
    wrong = CallParser.of(FAMILIES["gemma"].tokenizer, TOOLS, lambda text: [ToolCall("f", {"x": {1}})])
    assert "not JSON values" in wrong.parse("x", "").calls[0].error


class TestThoughts:
    def test_calls_in_thoughts_are_text(self):
        thought = f"<think>\nMaybe {CALL['qwen3']}?\n</think>\n\n"
        turn = parse("qwen3", thought + CALL["qwen3"])
        assert turn.calls == (ADD,)
        assert turn.content == thought.rstrip()

    def test_thoughts_that_the_prompt_began(self):
        text = f"Maybe {CALL['qwen3_5']}?\n</think>\n\n{CALL['qwen3_5']}"
        assert parse("qwen3_5", text, "<|im_start|>assistant\n<think>\n").calls == (ADD,)
        assert parse("qwen3_5", text, "<think>\n\n</think>\n\n").calls == (ADD, ADD)

    def test_thoughts_without_an_end_have_no_calls(self):
        assert parse("qwen3", f"<think>\n{CALL['qwen3']}").calls == ()

    def test_gptoss(self):
        text = f"<|channel|>analysis<|message|>I add.<|end|><|start|>assistant{CALL['gptoss']}"
        turn = parse("gptoss", text)
        assert turn.calls == (ADD,)
        assert (turn.message["thinking"], turn.content) == ("I add.", "")


class TestValuesOfTextFormats:
    """Qwen 3.5 and GLM write every value as text; the tool's schema says what it means."""

    @each(
        ("name", "key", "written", "value"),
        [
            ("add", "a", "3", 3),
            ("add", "a", "three", "three"),
            ("add", "a", "3.5", "3.5"),
            ("weather", "city", "3", "3"),
            ("weather", "city", '{"a": 1}', '{"a": 1}'),
            ("unknown", "x", "3", 3),
            ("unknown", "x", "[1, 'a', None]", [1, "a", None]),
            ("unknown", "x", "plain text", "plain text"),
        ],
    )
    def test_a_value(self, name, key, written, value):
        for family, text in [
            (
                "qwen3_5",
                f"<tool_call>\n<function={name}>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>",
            ),
            ("glm", f"<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"),
        ]:
            (call,) = parse(family, text, "x").calls
            assert call == ToolCall(name, {key: value})
            assert type(call.arguments[key]) is type(value)

    def test_only_the_template_s_line_breaks_are_cut(self):
        text = "<tool_call>\n<function=weather>\n<parameter=city>\n\n  Z\n\n</parameter>\n</function>\n</tool_call>"
        assert parse("qwen3_5", text, "x").calls == (ToolCall("weather", {"city": "\n  Z\n"}),)


def test_special_tokens_are_not_content():
    assert parse("qwen3", "Done<|im_start|>.").content == "Done."


def test_calls_of_mistral_have_ids_and_the_answers_too():
    turn = parse("mistral", SEVERAL["mistral"])
    assert [call["id"] for call in turn.message["tool_calls"]] == ["call00000", "call00001"]
    assert turn.answers(["42", "sunny"]) == (
        {"role": "tool", "name": "add", "content": "42", "tool_call_id": "call00000"},
        {"role": "tool", "name": "weather", "content": "sunny", "tool_call_id": "call00001"},
    )


def test_the_answer_to_a_malformed_call_has_no_id():
    turn = ParsedTurn("", (ToolCall("", error="bad"), ADD), {"tool_calls": [{"id": "call00000"}]})
    assert turn.answers(["no", "42"]) == (
        {"role": "tool", "name": "", "content": "no"},
        {"role": "tool", "name": "add", "content": "42", "tool_call_id": "call00000"},
    )


class TestResponseTemplate:
    TEMPLATE: ClassVar = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
        },
    }

    def tokenizer(self, monkeypatch, template):
        tokenizer = FAMILIES["qwen3"].tokenizer
        monkeypatch.setattr(tokenizer, "response_template", template, raising=False)
        return tokenizer

    def test_it_comes_first(self, monkeypatch):
        found = CallParser.of(self.tokenizer(monkeypatch, self.TEMPLATE), TOOLS)
        assert found.name == "response_template"
        turn = found.parse(f"<think>\nI add.\n</think>\n\nSo:\n{CALL['qwen3']}", "")
        assert turn.calls == (ADD,)
        assert turn.message["reasoning_content"].strip() == "I add."
        assert turn.content.strip() == "So:"

    def test_what_it_refuses_is_a_malformed_call(self, monkeypatch):
        found = CallParser.of(self.tokenizer(monkeypatch, self.TEMPLATE), TOOLS)
        (call,) = found.parse('<tool_call>\n{"name": oops}\n</tool_call>', "").calls
        assert call.error.startswith("invalid tool call: ")

    def test_one_that_misses_calls_is_not_used(self, monkeypatch):
        fields = {key: value for key, value in self.TEMPLATE["fields"].items() if key != "tool_calls"}
        found = CallParser.of(self.tokenizer(monkeypatch, {**self.TEMPLATE, "fields": fields}), TOOLS)
        assert found.name != "response_template"
        assert found.parse(CALL["qwen3"], "").calls == (ADD,)


class TestUserFunction:
    TEMPLATE = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
        "{% for c in m.tool_calls or [] %}!{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %};{{ k }}~{{ v | tojson }}{% endfor %}!{% endfor %}"
        "<end>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )

    def test_an_unknown_format_is_shown(self):
        with pytest.raises(ConfigError, match=r"(?s)!sentinel_add;alpha_key~.*environment.parser"):
            CallParser.of(with_template(self.TEMPLATE), TOOLS)

    def test_it_reads_that_format(self):
        import json

        def read(text):
            parts = [part.split(";") for part in text.split("!")[1::2]]
            return [
                {"name": name, "arguments": {k: json.loads(v) for k, v in (pair.split("~", 1) for pair in pairs)}}
                for name, *pairs in parts
            ]

        found = CallParser.of(with_template(self.TEMPLATE), TOOLS, read)
        assert found.parse("!add;a~2;b~40!", "").calls == (ADD,)
        assert found.parse("nothing", "").calls == ()
        assert found.parse("!add;a!", "").calls[0].error.startswith("invalid tool call: ")

    def test_one_that_does_not_find_the_template_s_calls_is_refused(self):
        with pytest.raises(ConfigError, match=r"environment.parser finds nothing instead of sentinel_add"):
            CallParser.of(FAMILIES["qwen3"].tokenizer, TOOLS, lambda text: [])

    def test_a_template_without_calls_needs_one(self):
        gemma = FAMILIES["gemma"].tokenizer
        with pytest.raises(ConfigError, match=r"does not show calls of tools.*environment.parser"):
            CallParser.of(gemma, TOOLS)
        found = CallParser.of(gemma, TOOLS, lambda text: [ADD] if "ADD" in text else [])
        assert found.parse("ADD", "").calls == (ADD,)

    def test_wrong_results_are_malformed_calls(self):
        gemma = FAMILIES["gemma"].tokenizer
        for wrong in (None, "text", [3], [{"arguments": {}}], [{"name": "f", "arguments": 3}]):
            turn = CallParser.of(gemma, TOOLS, lambda text, wrong=wrong: wrong).parse("x", "")
            assert turn.calls[0].error
            assert turn.message == {"role": "assistant", "content": "x"}


PYTHON = (
    "<|python_tag|>[{{ n }}({% for k, v in a.items() %}{{ k }}={{ v if v is not string else v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})]<|end|>"
)


def learned(call):
    """The parser for a template that writes calls of the function ``n`` with the arguments ``a`` so."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set n = c.function.name %}{% set a = c.function.arguments %}" + call + "{% endfor %}</{{ m.role }}>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return CallParser.of(with_template(template), TOOLS)


@each(
    ("call", "text"),
    [
        ("[TOOL_CALLS]{{ n }}[ARGS]{{ a | tojson }}", '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 40}'),
        (PYTHON, "<|python_tag|>[add(a=2, b=40)]<|end|>"),
        ('<invoke name="{{ n }}">\n{% for k, v in a.items() %}<parameter name="{{ k }}">'
         "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>",
         '<invoke name="add">\n<parameter name="a">2</parameter>\n<parameter name="b">40</parameter>\n</invoke>'),
        ('<call>{"type": "function", "function": {"name": "{{ n }}", "parameters": {{ a | tojson }}}}</call>',
         '<call>{"type": "function", "function": {"name": "add", "parameters": {"a": 2, "b": 40}}}</call>'),
        ('<call>{"name": "{{ n }}", "arguments": {{ a }}}</call>', f"<call>{JSON}</call>"),
        ('Action: {"tool_name": "{{ n }}", "parameters": {{ a | tojson }}}\n',
         'Action: {"tool_name": "add", "parameters": {"a": 2, "b": 40}}\n'),
    ],
)  # fmt: skip
def test_other_formats_are_learned(call, text):
    """Formats of no fixture: Mistral's newer one, Python's syntax, MiniMax's, and three made up, the second of which
    takes arguments as JSON text only."""
    found = learned(call)
    assert found.parse(text, "").calls == (ADD,)
    assert found.parse(f"One. {text}", "").content == "One."
    assert found.parse("No call: [1], <x>, {}.", "").calls == ()


def test_arguments_in_pythons_syntax_have_names():
    (call,) = learned(PYTHON).parse("<|python_tag|>[add(2, b=40)]<|end|>", "").calls
    assert call.error == "invalid tool call: expected NAME(ARGUMENT=VALUE, ...)"


@each("family", [name for name in CALL if not FAMILIES[name].one_call])
def test_long_garbage_is_read_in_linear_time(family):
    for garbage in ("<tool_call>", "{", "[", "<", " ", "\n", "<think>", "<tool_call>\n{", "]", '<tool_call>\n{"a":'):
        import time

        start = time.perf_counter()
        parse(family, garbage * (20_000 // len(garbage)))
        assert time.perf_counter() - start < 1.0  # quadratic time is 5 s and more
