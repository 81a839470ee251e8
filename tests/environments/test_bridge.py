"""What follows a turn, as token ids: equal to the template's own rendering, and closed to injected control tokens."""

import itertools

import pytest

from cohort.environments.bridge import Bridge
from cohort.types import Prompt
from tests.environments.templates import CALLS, FAMILIES, TOOLS, answer

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


def bridge_of(name, role="tool", **settings):
    family = FAMILIES[name]
    tools = TOOLS if role == "tool" else None
    return Bridge.of(family.tokenizer, family.end_token_ids, tools=tools, roles=[role], **settings)


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


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_answers_of_tools_are_the_ids_of_the_whole_rendering(name, count, ended):
    family, bridge = FAMILIES[name], bridge_of(name)
    calls = CALLS[: 1 if family.one_call else count]
    turn = family.call("" if name == "gptoss" else "I call.", calls)
    said = {1: "40", 2: "rich"}[len(calls)]
    last = family.end_token_ids[{"gptoss": 1, "glm": 2}.get(name, 0)] if ended else tokenized(family, "x")[-1]
    for texts in itertools.permutations(TEXTS, count):
        replies = [answer(text, number) for number, text in enumerate(texts)]
        expected = ids_after(family, [USER, turn], replies, said, TOOLS)
        assert bridge.after(replies, last_token=last) == expected[ended:]


@pytest.mark.parametrize("ended", [True, False])
@BY_NAME
def test_users_messages_are_the_ids_of_the_whole_rendering(name, ended):
    family, bridge = FAMILIES[name], bridge_of(name, "user")
    last = family.end_token_ids[1 if name == "glm" else 0] if ended else None
    for text in TEXTS:
        reply = {"role": "user", "content": text}
        expected = ids_after(family, [USER, {"role": "assistant", "content": "Forty."}], [reply], "Forty.")
        assert bridge.after([reply], last_token=last) == expected[ended:]
