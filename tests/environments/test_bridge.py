"""What follows a turn, as token ids: equal to the template's own rendering, and closed to injected control tokens."""

import functools

import pytest

from cohort.config import DataConfig
from cohort.data import PromptSet
from cohort.environments.bridge import Bridge
from cohort.errors import ConfigError, DataError
from cohort.types import Prompt
from tests.conftest import each
from tests.environments.templates import CALLS, FAMILIES, TOOLS, answer, with_template

USER = {"role": "user", "content": "What is 2 + 40?"}
TEXTS = [
    "42",
    "",
    '{"sum": 42,\n "ok": true}',
    "  two\n\n\nlines  \n",
    "Köln \u2014 数 🙂",
    "\n",
    "/no </div>",
    "\\n\t'\"",
]
BY_NAME = pytest.mark.parametrize("name", FAMILIES)
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.tools]


@functools.cache
def bridge_of(name, role="tool", **settings):
    family = FAMILIES[name]
    tools = TOOLS if role == "tool" else None
    return Bridge(family.tokenizer, family.end_token_ids, tools=tools, roles=[role], **settings)


def rendered(family, messages, tools=None, **options):
    return family.tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, **(options or {"add_generation_prompt": True})
    )


def tokenized(family, text):
    return family.tokenizer(text, add_special_tokens=False)["input_ids"]


def prompt_of(name, messages=(USER,), tools=None, **arguments):
    family = FAMILIES[name]
    arguments = {**arguments, **({"tools": tools} if tools else {})}
    text = family.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    ids = tokenized(family, text)
    decoded = family.tokenizer.decode(ids)
    return Prompt(0, 0, tuple(ids), decoded, list(messages), {}, template_arguments=arguments)


def ids_after(family, conversation, replies, said, tools=None):
    """Token ids of the whole rendering after what the assistant said, from the end of its turn on."""
    full = rendered(family, [*conversation, *replies], tools)
    position = full.rindex(said) + len(said)
    if conversation[-1].get("tool_calls"):
        position = min(full.index(end, position) for end in family.end if end in full[position:])
    ids, before = tokenized(family, full), tokenized(family, full[:position])
    assert ids[: len(before)] == before
    return ids[len(before) :]


@each("ended", [True, False])
@each("count", [1, 2])
@each("name", WITH_TOOLS)
def test_answers_of_tools_are_the_ids_of_the_whole_rendering(name, count, ended):
    family, bridge = FAMILIES[name], bridge_of(name)
    calls = CALLS[: 1 if family.one_call else count]
    turn = family.call("" if name == "gptoss" else "I call.", calls)
    said = {1: "40", 2: "rich"}[len(calls)]
    last = family.end_token_ids[{"gptoss": 1, "glm": 2}.get(name, 0)] if ended else tokenized(family, "x")[-1]
    for texts in zip(*(TEXTS[first:] + TEXTS[:first] for first in range(count)), strict=True):
        replies = [answer(text, number) for number, text in enumerate(texts)]
        expected = ids_after(family, [USER, turn], replies, said, TOOLS)
        assert bridge.after(replies, last_token=last) == expected[ended:]


@pytest.mark.parametrize("ended", [True, False])
@BY_NAME
def test_users_messages_are_the_ids_of_the_whole_rendering(name, ended):
    family, bridge = FAMILIES[name], bridge_of(name, "user")
    last = family.end_token_ids[1 if name == "glm" else 0] if ended else -1
    for text in TEXTS:
        reply = {"role": "user", "content": text}
        expected = ids_after(family, [USER, {"role": "assistant", "content": "Forty."}], [reply], "Forty.")
        assert bridge.after([reply], last_token=last) == expected[ended:]


# -- turns that end otherwise ------------------------------------------------------------------------------------------


def text_after(name, replies, last, role="tool"):
    family = FAMILIES[name]
    last_token = -1 if last is None else family.tokenizer.convert_tokens_to_ids(last)
    return family.tokenizer.decode(bridge_of(name, role).after(replies, last_token=last_token))


@each(
    ("name", "last", "start"),
    [
        ("qwen3", "<|endoftext|>", "\n<|im_start|>user"),  # a turn is closed once, whatever end token was drawn
        ("llama3_1", "<|eom_id|>", "<|start_header_id|>ipython"),
        ("gptoss", "<|return|>", "<|start|>functions.add"),
        ("glm", "<|observation|>", "\n<tool_response>"),  # GLM's end tokens begin the next message
        ("glm", "<|user|>", "<|observation|>\n<tool_response>"),
        ("glm", None, "<|observation|>\n<tool_response>"),
        ("mistral", None, "</s>[TOOL_RESULTS]"),
    ],
)
def test_a_turn_is_closed_once(name, last, start):
    assert text_after(name, [answer("42")], last).startswith(start)


def test_the_users_turn_after_an_answer_of_gpt_oss():
    assert text_after("gptoss", [{"role": "user", "content": "Go on."}], "<|return|>", "user").startswith(
        "<|start|>user"
    )


def test_tools_and_the_user_may_answer_one_turn():
    text = text_after("qwen3", [answer("42"), answer("7", 1), {"role": "user", "content": "Go on."}], "<|im_end|>")
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_variables_of_the_run_and_of_a_row():
    family = FAMILIES["qwen3"]
    bridge = Bridge(family.tokenizer, family.end_token_ids, tools=TOOLS, variables={"enable_thinking": False})
    closed = family.tokenizer.decode(bridge.after([answer("42")], last_token=-1))
    assert closed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    thinking = bridge.after([answer("42")], last_token=-1, prompt=prompt_of("qwen3", tools=TOOLS, enable_thinking=True))
    assert family.tokenizer.decode(thinking).endswith("<|im_start|>assistant\n")


def test_parts_of_text_are_joined_and_other_contents_refused():
    bridge = bridge_of("qwen3")
    parts = {**answer(""), "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}
    assert bridge.after([parts], last_token=-1) == bridge.after([answer("42")], last_token=-1)
    for content in ({"sum": 42}, [{"type": "image"}], 42):
        with pytest.raises(DataError, match="a message's content must be text"):
            bridge.after([{**answer(""), "content": content}], last_token=-1)


def test_half_of_a_surrogate_pair_is_shown_as_a_question_mark():
    assert "\n4?2\n" in FAMILIES["qwen3"].tokenizer.decode(
        bridge_of("qwen3").after([answer("4\ud8002")], last_token=-1)
    )


# -- injection ---------------------------------------------------------------------------------------------------------


def control_ids(family, ids):
    control = {family.tokenizer.convert_tokens_to_ids(text) for text in family.control}
    return [number for number in ids if number in control]


def attacks(family):
    """Texts that spell control tokens: each one, all in a row, with whitespace, in pieces, one within another."""
    yield from family.control
    yield "".join(family.control) * 2
    yield " \n".join(["", *family.control, ""])
    for token in family.control:
        yield token[:1] + token + token[1:]
        yield "x" + token + token[:-1]


@BY_NAME
def test_no_answer_becomes_a_control_token(name):
    family = FAMILIES[name]
    role = "tool" if family.tools else "user"
    bridge = bridge_of(name, role)

    def after(*texts):
        replies = [
            answer(text, number) if family.tools else {"role": "user", "content": text}
            for number, text in enumerate(texts)
        ]
        return bridge.after(replies, last_token=-1)

    harmless = control_ids(family, after("x"))
    for text in attacks(family):
        ids = after(text)
        assert control_ids(family, ids) == harmless
        shown = text.strip() if name in ("qwen3_5", "gemma") else text
        if name not in ("llama3_1", "mistral", "gptoss"):  # JSON
            assert shown in family.tokenizer.decode(ids)
    if family.tools:
        harmless = control_ids(family, after("x", "x"))
        for token in family.control:
            for cut in range(1, len(token)):
                assert control_ids(family, after(token[:cut], token[cut:])) == harmless


@each("name", WITH_TOOLS)
def test_no_name_and_no_id_of_a_call_becomes_a_control_token(name):
    family, bridge = FAMILIES[name], bridge_of(name)
    harmless = control_ids(family, bridge.after([answer("42")], last_token=-1))
    for text in attacks(family):
        reply = {"role": "tool", "name": text, "tool_call_id": text, "content": "42"}
        assert control_ids(family, bridge.after([reply], last_token=-1)) == harmless


@BY_NAME
def test_no_first_observation_becomes_a_control_token(name):
    family, bridge, prompt = FAMILIES[name], bridge_of(name, "user"), prompt_of(name)
    for text in attacks(family):
        assert control_ids(
            family, bridge.opening(prompt, [{"role": "user", "content": text}]).token_ids
        ) == control_ids(family, prompt.token_ids)


@each("name", ["qwen2_5", "mistral", "gptoss", "smollm", "glm"])
def test_nothing_that_is_read_again_becomes_a_control_token(name):
    """Neither texts of tools and users nor what the policy spells of special tokens, also as names, ids and arguments."""
    family, bridge = FAMILIES[name], bridge_of(name)
    prompt = prompt_of(name, tools=TOOLS)

    def rewritten(text, spelt="x"):
        call = family.call("" if name == "gptoss" else f"I call {spelt}.", [(text, {spelt: spelt})])
        reply = {**answer(text, name=text)}
        return bridge.rewritten(
            prompt, [call, reply, {"role": "assistant", "content": f"It is {spelt}."}, {**USER, "content": text}], []
        )

    harmless = control_ids(family, rewritten("x"))
    for text in attacks(family):
        assert control_ids(family, rewritten(text)) == harmless
    special = {token.content for token in family.tokenizer.added_tokens_decoder.values() if token.special}
    for text in special - {"<|channel|>"}:  # which gpt-oss's template refuses
        assert control_ids(family, rewritten("x", text)) == harmless


def chatml(content, tail=""):
    """A template with an own way of writing contents."""
    return (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ " + content + " }}" + tail + "<|im_end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
    )


def test_a_text_and_what_the_template_writes_beside_it_make_no_control_token():
    family = FAMILIES["qwen3"]
    bridge = Bridge(with_template(chatml("'<|im_' + m.content", "|>")), family.end_token_ids)
    harmless = bridge.after([{**USER, "content": "x"}], last_token=-1)
    attack = bridge.after([{**USER, "content": "end"}], last_token=-1)
    assert "<|im_end|><|im_end|>" in family.tokenizer.decode(attack)
    assert control_ids(family, attack) == control_ids(family, harmless)


# -- templates that are refused ----------------------------------------------------------------------------------------


@each(
    ("template", "message"),
    [
        (chatml("m.content | replace(' ', '')"), "changes the text of messages in an unknown way"),
        (chatml("m.content[:5]"), "it leaves them out"),
        (chatml("m.content ~ m.content"), "it leaves them out"),
        (chatml("m.content if m.role != 'user' else ''"), "it leaves them out, or writes them somewhere else"),
        (chatml("loop.index ~ m.content"), "depends on the conversation before them"),
        (chatml("m.content if loop.index < 3 else raise_exception('Too long')"), r"it refuses them \(Too long\)"),
    ],
)
def test_templates_that_cannot_be_appended_to(template, message):
    family = FAMILIES["qwen3"]
    with pytest.raises(ConfigError, match=message) as error:
        Bridge(with_template(template), family.end_token_ids)
    assert "data.chat_template" in str(error.value)


def test_templates_that_do_not_show_tools_or_their_answers():
    family = FAMILIES["gemma"]
    with pytest.raises(
        ConfigError, match="does not show the tools to the policy: it does not read the variable `tools`"
    ):
        Bridge(family.tokenizer, family.end_token_ids, tools=TOOLS)
    with pytest.raises(
        ConfigError, match=r"messages of the role 'tool' after .*: it refuses them \(Conversation roles"
    ):
        Bridge(family.tokenizer, family.end_token_ids, roles=["tool"])
    hidden = "{%- for t in tools or [] %}{{ t | tojson }}{%- endfor %}" + chatml("m.content if m.role != 'tool'")
    with pytest.raises(
        ConfigError, match="messages of the role 'tool' after a turn of the assistant: it leaves them out"
    ):
        Bridge(with_template(hidden), FAMILIES["qwen3"].end_token_ids, tools=TOOLS)


def test_tokenizers_without_a_template_and_slow_ones_are_refused():
    class Slow:
        is_fast = False
        chat_template = "x"

    with pytest.raises(ConfigError, match="need a fast tokenizer"):
        Bridge(Slow(), [0])
    Slow.chat_template = None
    with pytest.raises(ConfigError, match="need a chat template, and the tokenizer has none: set data.chat_template"):
        Bridge(Slow(), [0])


# -- first observations ------------------------------------------------------------------------------------------------


@BY_NAME
def test_an_opening_is_the_prompt_with_the_observation_in_its_last_message(name):
    bridge, prompt = bridge_of(name, "user"), prompt_of(name)
    for text in TEXTS:
        opened = bridge.opening(prompt, [{"role": "user", "content": text}])
        messages = [{**USER, "content": USER["content"] + text}]
        expected = prompt_of(name, messages)
        assert (opened.token_ids, opened.text, opened.prompt) == (expected.token_ids, expected.text, messages)


@each("name", ["qwen3", "gemma"])
def test_an_opening_keeps_control_tokens_of_the_row_escaped(name):
    """With ``data.escape_control_tokens``."""
    family = FAMILIES[name]
    end = family.tokenizer.convert_ids_to_tokens(family.end_token_ids[0])
    rows = [{"prompt": [{"role": "user", "content": f"a{end}b"}]}]
    ends = {}
    for escape in (False, True):
        (prompt,) = PromptSet(rows, family.tokenizer, DataConfig(escape_control_tokens=escape))[:]
        opened = bridge_of(name, "user").opening(prompt, [{"role": "user", "content": f" Go!{end}"}])
        assert opened.prompt[0]["content"] == f"a{end}b Go!{end}"
        ends[escape] = [list(one.token_ids).count(family.end_token_ids[0]) for one in (prompt, opened)]
    assert ends[True] == [count - 1 for count in ends[False]]


def test_an_opening_has_the_tools_and_variables_of_the_prompt():
    prompt = prompt_of("qwen3", tools=TOOLS, enable_thinking=False)
    opened = bridge_of("qwen3").opening(
        prompt, [{"role": "user", "content": " Go!"}, {"role": "assistant", "content": "I"}]
    )
    system, _, talk = opened.text.partition("<|im_start|>user")
    assert '"name": "weather"' in system
    assert talk.endswith("What is 2 + 40? Go!<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nI")
    two = [{"role": "user", "content": " Go!"}, {"role": "user", "content": "Now."}]  # only the first one is appended
    assert bridge_of("qwen3").opening(prompt, two).prompt == [{**USER, "content": USER["content"] + " Go!"}, two[1]]
    without = prompt_of("qwen3", [USER])  # a row whose column `tools` is an empty list
    assert "weather" not in bridge_of("qwen3").opening(without, [{"role": "user", "content": "Go!"}]).text
    system = prompt_of("qwen3", [{"role": "system", "content": "Play."}])
    assert bridge_of("qwen3", "user").opening(system, [{"role": "user", "content": "North?"}]).prompt == [
        *system.prompt,
        {"role": "user", "content": "North?"},
    ]


# -- history = "template" ----------------------------------------------------------------------------------------------


def spoken(family, text):
    return [*tokenized(family, text), family.end_token_ids[0]]


def test_a_conversation_that_the_template_keeps_is_not_rewritten():
    """Not even if its tokens are others than those of its text."""
    family, bridge = FAMILIES["qwen2_5"], bridge_of("qwen2_5")
    prompt = prompt_of("qwen2_5", tools=TOOLS)
    drawn = [
        *(tokenized(family, letter)[0] for letter in "I call."),
        *spoken(family, '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'),
    ]
    tokens = [*drawn, *bridge.after([answer("42<|im_end|>")], last_token=drawn[-1])]
    messages = [family.call("I call."), answer("42<|im_end|>")]
    assert bridge.rewritten(prompt, messages, tokens) == tokens
    again = bridge.rewritten(prompt, messages, [])
    assert again != tokens
    assert family.tokenizer.decode(again) == family.tokenizer.decode(tokens)


def test_thoughts_that_the_template_drops_are_left_out():
    family, bridge, prompt = FAMILIES["qwen3"], bridge_of("qwen3", "user"), prompt_of("qwen3")
    drawn = spoken(family, "<think>\nHm.\n</think>\n\n42")
    reply = {"role": "user", "content": "And 3?<think>"}
    rewritten = bridge.rewritten(
        prompt, [{"role": "assistant", "content": "<think>\nHm.\n</think>\n\n42"}, reply], drawn
    )
    assert family.tokenizer.decode(rewritten) == (
        "42<|im_end|>\n<|im_start|>user\nAnd 3?<think><|im_end|>\n<|im_start|>assistant\n"
    )
    assert family.tokenizer.convert_tokens_to_ids("<think>") not in rewritten


def test_a_conversation_that_the_template_refuses_is_not_rewritten():
    """The policy's call was malformed, so its message has none, and gpt-oss's template refuses the answer."""
    bridge, prompt = bridge_of("gptoss"), prompt_of("gptoss", tools=TOOLS)
    messages = [{"role": "assistant", "content": "add(2"}, answer("invalid tool call")]
    assert bridge.rewritten(prompt, messages, [1, 2, 3]) == [1, 2, 3]


def test_an_answer_that_the_prompt_begins():
    """The first message has the prompt's prefill, as the parser reads it."""
    family = FAMILIES["qwen2_5"]
    begun = [USER, {"role": "assistant", "content": "It is"}]
    text = rendered(family, begun, continue_final_message=True)
    prompt = Prompt(0, 0, tuple(tokenized(family, text)), text, begun, {}, prefill="It is")
    reply = {"role": "user", "content": "Sure?"}
    rewritten = bridge_of("qwen2_5", "user").rewritten(
        prompt, [{"role": "assistant", "content": "It is 42."}, reply], []
    )
    assert family.tokenizer.decode(rewritten).startswith(" 42.<|im_end|>\n<|im_start|>user\nSure?")


def test_a_template_that_writes_the_prompt_differently_later_needs_append():
    message = 'environment.history must be "append" with this template'
    with pytest.raises(ConfigError, match=message):
        bridge_of("qwen3_5", "user", history="template")
    bridge_of("qwen3_5", "tool", history="template")  # it keeps the thoughts while tools answer
    messages, prompt = [{"role": "assistant", "content": "42"}, USER], prompt_of("qwen3_5")
    assert bridge_of("qwen3_5", "user").rewritten(prompt, messages, [1, 2, 3]) == [1, 2, 3]


def test_what_looks_like_a_placeholder_is_text():
    bridge, prompt = bridge_of("qwen2_5", "user"), prompt_of("qwen2_5")
    messages = [{"role": "assistant", "content": "qzh000007 qzh000000"}, {"role": "user", "content": "qzh000000"}]
    rewritten = FAMILIES["qwen2_5"].tokenizer.decode(bridge.rewritten(prompt, messages, []))
    assert rewritten.startswith("qzh000007 qzh000000<|im_end|>\n<|im_start|>user\nqzh000000<|im_end|>")


def test_the_description_shows_the_text_between_turns_and_who_drops_thoughts():
    family = FAMILIES["qwen3"]
    bridge = Bridge(family.tokenizer, family.end_token_ids, tools=TOOLS, roles=["tool", "user"])
    tool, user, thoughts = bridge.describe().splitlines()
    assert tool == (
        r"between turns (role 'tool'): <|im_end|>\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"
        r"<|im_start|>assistant\n"
    )
    assert user.startswith("between turns (role 'user'): ")
    assert "drops the thoughts of earlier turns when a user's message follows" in thoughts
    assert 'functions.{name} to=assistant<|channel|>commentary<|message|>"{text}"' in bridge_of("gptoss").describe()
    drops = {name for name in FAMILIES if "drops" in bridge_of(name, "user").describe()}
    assert drops == {"qwen3", "qwen3_5", "gptoss", "glm"}
