"""Rewards for the text of a completion: compared with the row's answer or with itself, its format, its language."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import regex as _regex
from pydantic import AfterValidator, Field

from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards.contract import reward
from cohort.rewards.functions import Function
from cohort.rewards.messages import completion_text, turn_text, whole_text
from cohort.rewards.names import import_extra, resolve_reward

# ----------------------------------------
# Rewards for the length of a completion, in tokens.


def soft_overlong(
    completion: Any,  # noqa: ARG001 - makes this a function per sample
    completion_ids: Sequence[int],
    *,
    max_length: Annotated[int, Field(gt=0)],
    buffer: Annotated[int, Field(ge=0)],
) -> float:
    """A penalty for the last tokens before the length limit, from 0 down to -1.

    0 up to max_length - buffer tokens, then linear down to -1 at max_length, and -1 above: equation 13 of DAPO, arXiv
    2503.14476. With buffer=0 it is 0 up to max_length. The end token counts.

    Args:
        max_length: number of tokens at which the penalty is -1.
        buffer: number of tokens over which the penalty falls; at most max_length.

    >>> [soft_overlong("", range(tokens), max_length=100, buffer=20) for tokens in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if buffer > max_length:
        raise RewardError(f"soft_overlong: buffer must be at most max_length = {max_length}, got {buffer}")
    over = len(completion_ids) - (max_length - buffer)
    if over <= 0:
        return 0.0
    return -min(over / buffer, 1.0) if buffer else -1.0


@lru_cache(maxsize=64)
def _judge(spec: str) -> Function:
    """A reward function by name.

    Raises:
        RewardError: the function is not per sample, or is async.
    """
    function = Function(resolve_reward(spec), spec, 1.0, RewardConfig())
    if function.per != "sample" or function.is_async:
        raise RewardError(f"must name a reward that sees one sample and is not async, got {spec!r}")
    return function


@reward(per="sample", isolated=True, timeout=20.0)
def cosine_length(
    completion: Any,
    completion_ids: Sequence[int],
    *,
    max_length: Annotated[int, Field(gt=0)],
    r0c: float = 1.0,
    rLc: float = 0.5,
    r0w: float = -1.0,
    rLw: float = -0.5,
    exceeded: float | None = -1.0,
    correct: Annotated[str, AfterValidator(lambda spec: _judge(spec) and spec)] = "math",
    **columns: Any,
) -> float | None:
    """A reward for correct and a penalty for wrong completions, both shrinking with length along a cosine.

    r_L + (r_0 - r_L) (1 + cos(pi t / max_length)) / 2 for a completion of t tokens: r_0 at 0 tokens, r_L at max_length.
    From max_length tokens on it is ``exceeded``, correct or not. The cosine reward of arXiv 2502.03373; the default
    numbers are our own. It needs the columns that ``correct`` needs.

    Args:
        max_length: number of tokens, the end token included.
        r0c, rLc: rewards of correct completions at 0 tokens and at max_length.
        r0w, rLw: rewards of wrong completions.
        exceeded: reward of completions with max_length tokens or more. None: rLc and rLw.
        correct: the reward that decides what is correct, named as in reward.functions: correct if it returns 1 or
            more. It must see one sample and must not be async. If it returns None, the completion is unscored.

    >>> [cosine_length("So 4.", [0] * tokens, max_length=100, answer=4) for tokens in (0, 50, 100)]
    [1.0, 0.75, -1.0]
    """
    judge = _judge(correct)
    judged = judge.call(**judge.accepted({"completion": completion, "completion_ids": completion_ids, **columns}))
    if judged is None:
        return None
    tokens = min(len(completion_ids), max_length)
    if tokens == max_length and exceeded is not None:
        return exceeded
    start, end = (r0c, rLc) if judged >= 1 else (r0w, rLw)
    return end + (start - end) * (1 + math.cos(math.pi * tokens / max_length)) / 2


# -- the answer of the row, and repetition -----------------------------------------------------------------------------


def exact_match(completion: Any, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float | None:
    r"""1 if the completion equals the row's ``answer``, 0 otherwise.

    An answer that is not text is converted by ``str``. Without an answer the completion is unscored: None.

    Args:
        strip: remove surrounding whitespace from both texts.
        ignore_case: compare without case.

    >>> exact_match(" blue\n", "blue"), exact_match("Blue", "blue")
    (1.0, 0.0)
    >>> exact_match("Blue", "blue", ignore_case=True)
    1.0
    """
    first, second = _compared(completion, answer, strip, ignore_case)
    return None if answer is None else float(first == second)


def fuzzy_match(completion: Any, answer: Any, *, strip: bool = True, ignore_case: bool = False) -> float | None:
    r"""The similarity of the completion and the row's ``answer``, from 0 to 1.

    2 M / T, where M is the length of the longest common subsequence and T the sum of both lengths, in characters. 1 if
    both are empty. Symmetric. Without an answer the completion is unscored: None.

    Args:
        strip: remove surrounding whitespace from both texts.
        ignore_case: compare without case.

    >>> fuzzy_match("kitten", "sitting")  # i, t, t and n: 2 * 4 / 13
    0.6153846153846154
    """
    ratio = import_extra("rapidfuzz.fuzz", "fuzzy_match").ratio
    return None if answer is None else float(ratio(*_compared(completion, answer, strip, ignore_case))) / 100


def _compared(completion: Any, answer: Any, strip: bool, ignore_case: bool) -> list[str]:
    texts = [completion_text(completion), str(answer)]
    texts = [text.strip() for text in texts] if strip else texts
    return [text.casefold() for text in texts] if ignore_case else texts


def repetition_penalty(
    completion: Any,
    completion_ids: Sequence[int] = (),
    *,
    ngram: Annotated[int, Field(gt=0)] = 3,
    max_penalty: Annotated[float, Field(le=0)] = -1.0,
    of: Literal["words", "tokens"] = "words",
) -> float:
    """A penalty for repetition: the share of repeated n-grams, times ``max_penalty``.

    max_penalty * (1 - distinct / all), over the n-grams of all assistant messages. 0 if the text is shorter than one
    n-gram.

    Args:
        ngram: number of consecutive words or tokens that are compared.
        max_penalty: at most 0.
        of: "words", separated by whitespace and compared without case; or "tokens", for languages that do not separate
            words.

    >>> repetition_penalty("no no no no no no")  # 4 trigrams, 1 of them distinct
    -0.75
    """
    items: Sequence[Any] = whole_text(completion).casefold().split() if of == "words" else completion_ids
    grams = [tuple(items[start : start + ngram]) for start in range(len(items) - ngram + 1)]
    repeated = len(grams) - len(set(grams))
    return max_penalty * (repeated / len(grams)) if repeated else 0.0


# -- format ------------------------------------------------------------------------------------------------------------

_FENCED = re.compile(r"^```json[^\S\n]*\n((?:(?!^```json).)*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)

MATCH_SECONDS = 5.0
"""Time limit for matching one completion. Most take microseconds; a pattern like ``(a+)+b`` may never end."""


def _compiled(pattern: str) -> str:
    try:
        _regex.compile(pattern)
    except _regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def regex(
    completion: Any, prefill: str = "", *, pattern: Annotated[str, AfterValidator(_compiled)], full: bool = False
) -> float:
    r"""1 if a pattern is found in the assistant turn, 0 otherwise.

    The prefill from the prompt is part of the turn. Patterns use Python's syntax, with inline flags: ``(?i)`` ignores
    case, ``(?s)`` lets dots match line breaks, ``(?m)`` matches line by line. A completion that takes more than 5
    seconds to match fails with TimeoutError and is unscored.

    Args:
        pattern: the regular expression.
        full: the whole turn must match.

    >>> regex("It is 42.", pattern=r"\d+"), regex("It is 42.", pattern=r"\d+", full=True)
    (1.0, 0.0)
    """
    match = _regex.fullmatch if full else _regex.search
    return float(match(pattern, turn_text(completion, prefill), timeout=MATCH_SECONDS) is not None)


def think_format(completion: Any, prefill: str = "", *, start: str = "<think>", end: str = "</think>") -> float:
    """1 if the assistant turn is ``<think>``, reasoning, ``</think>`` and an answer; 0 otherwise.

    The turn must begin with the first tag, contain each tag once, and have text after the second. The prefill from the
    prompt is part of the turn: if the chat template ends in ``<think>``, completions need not begin with it. The
    reasoning may be empty.

    Args:
        start, end: the two tags.

    >>> think_format("<think>6*7</think>42"), think_format("6*7</think>42")
    (1.0, 0.0)
    >>> think_format("6*7</think>42", prefill="<think>")
    1.0
    """
    turn = turn_text(completion, prefill).strip()
    before, _, answer = turn.partition(end)
    once = turn.count(start) == 1 and turn.count(end) == 1
    return float(once and before.startswith(start) and bool(answer.strip()))


Schema = dict[str, Any] | bool | str


def _checked_schema(schema: Schema) -> Schema:
    _validator(schema if isinstance(schema, str) else json.dumps(schema))
    return schema


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    """The validator of a schema, given as JSON text or as the path of a .json file."""
    jsonschema, referencing = (import_extra(name, "json_schema") for name in ("jsonschema", "referencing"))
    try:
        content = json.loads(Path(schema).read_text(encoding="utf-8") if schema.endswith(".json") else schema)
        kind = jsonschema.validators.validator_for(content)
        kind.check_schema(content)
    except (OSError, ValueError, RecursionError, jsonschema.SchemaError) as error:
        reason = getattr(error, "message", None) or error
        raise ValueError(f"expected a JSON schema, its text or the path of a .json file: {reason}") from None
    return kind(content, registry=referencing.Registry())  # fetches no $ref


def json_schema(
    completion: Any,
    prefill: str = "",
    *,
    schema: Annotated[Schema, AfterValidator(_checked_schema)],
    fenced: bool = False,
) -> float:
    """1 if the assistant turn is JSON that a schema accepts, 0 otherwise.

    The prefill from the prompt is part of the turn. JSON follows RFC 8259: no NaN, no Infinity, no text after it. A
    ``$ref`` to another document is not fetched and raises an error.

    Args:
        schema: a JSON schema as a table, as JSON text, or the path of a .json file.
        fenced: read the last fenced json block instead of the whole turn.

    >>> schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
    >>> [json_schema(text, schema=schema) for text in ('{"age": 7}', '{"age": "seven"}', "seven")]
    [1.0, 0.0, 0.0]
    """
    text = turn_text(completion, prefill)
    validator = _validator(schema if isinstance(schema, str) else json.dumps(schema))
    if fenced:
        blocks = _FENCED.findall(text)
        if not blocks:
            return 0.0
        text = blocks[-1]
    try:
        value = json.loads(text, parse_constant=_refused)
        return float(validator.is_valid(value))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply for Python
        return 0.0
    except import_extra("referencing", "json_schema").exceptions.Unresolvable as error:
        raise RewardError(f"json_schema: the schema contains a reference that cannot be resolved: {error}") from None


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


# -- language ----------------------------------------------------------------------------------------------------------

_NOT_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)|\$[^$\n]+\$|\\[A-Za-z]+|https?://\S+|<[^<>\s]+>",
    re.DOTALL,
)
_SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|(?<=[。!?;])|\n+")


@lru_cache(maxsize=1)
def _identifier() -> Any:
    module = import_extra("py3langid.langid", "language")
    return module.LanguageIdentifier.from_model_file(module.MODEL_FILE)


def _known_language(code: str) -> str:
    labels = _identifier().labels
    if code not in labels:
        raise ValueError(f"unknown language code; supported: {', '.join(sorted(labels))}")
    return code


def language(
    completion: Any,
    *,
    code: Annotated[str, AfterValidator(_known_language)] = "en",
    min_letters: Annotated[int, Field(gt=0)] = 20,
) -> float | None:
    """The share of a completion that is written in a language, from 0 to 1.

    The text of all assistant messages is split into sentences, and the most likely language of each is determined. The
    share is that of letters in sentences of the requested language. Formulas, code, tags and URLs are ignored. A text
    with fewer letters than ``min_letters`` is unscored: None.

    Args:
        code: ISO 639 code of the language, such as "en", "de" or "zh".
        min_letters: number of letters needed to determine a language. Shorter sentences are joined until they have
            that many.

    >>> language("The train leaves at noon and arrives before the shops close."), language("Ja.")
    (1.0, None)
    """
    pieces = _pieces(_NOT_LANGUAGE.sub(" ", whole_text(completion)), min_letters)
    letters = [_letters(piece) for piece in pieces]
    if sum(letters) < min_letters:
        return None
    found = [_identifier().classify(piece)[0] for piece in pieces]
    return sum(n for n, label in zip(letters, found, strict=True) if label == code) / sum(letters)


def _pieces(text: str, min_letters: int) -> list[str]:
    """The sentences of a text, joined until each piece has enough letters. The rest is added to the last piece."""
    pieces: list[str] = []
    piece, letters = [""], 0
    for sentence in _SENTENCE_END.split(text):
        piece.append(sentence)
        letters += _letters(sentence)
        if letters >= min_letters:
            pieces.append(" ".join(piece))
            piece, letters = [""], 0
    rest = " ".join(piece)
    return [*pieces[:-1], pieces[-1] + rest] if pieces else [rest]


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text)


# ----------------------------------------
# The scorers of the package reasoning-gym, for rows of ``data.train = "reasoning_gym:NAME"``.


READ_AS_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose scorers call ``eval`` on the answer."""
READ_AS_SUMS = frozenset({"countdown", "puzzle24"})
"""Data sets whose scorers call sympy's ``parse_expr`` on the answer, which evaluates it as Python, and expect sums."""
EVALUATED = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Those whose answers are any expressions. They cannot be told from harmful ones."""


def reasoning_gym(
    completion: Any,
    reasoning_gym: str | None,
    reasoning_gym_index: int,
    prompt: Any = "",
    prefill: str = "",
    *,
    tag: str = "answer",
) -> float | None:
    """The score of reasoning-gym, from 0 to 1, for rows of ``data.train = "reasoning_gym:NAME"``.

    The item is made again from its settings and index. An answer that the scorer fails on has 0, and so has one that
    it would run as a program. A row of other data is unscored: None.

    Args:
        tag: the answer is the text between the last <answer> and </answer>; another name of the tag, or "" for the
            whole text. Without the tag there is no answer.
    """
    if reasoning_gym is None:
        return None
    name, dataset, item = _item(reasoning_gym, int(reasoning_gym_index))
    asked = [prompt] if isinstance(prompt, str) else [str(message["content"]) for message in prompt]
    if not any(item["question"] in text for text in asked):
        raise RewardError(
            f"reasoning_gym: item {reasoning_gym_index} of {reasoning_gym} has another question than the row: the data "
            "was made by another version of reasoning-gym, or its items differ between processes"
        )
    answer = _answer(turn_text(completion, prefill), tag)
    if answer is not None and not _is_data(answer, name):
        return 0.0
    try:
        return float(dataset.score_answer(answer, deepcopy(item)))
    except Exception:  # scorers assume a form of the answer
        return 0.0


@lru_cache(maxsize=4096)
def _item(settings: str, index: int) -> tuple[str, Any, dict[str, Any]]:
    """The name of the data set, the data set, and one of its items."""
    name, dataset = _dataset(settings)
    return name, dataset, dataset[index]


@lru_cache(maxsize=64)
def _dataset(settings: str) -> tuple[str, Any]:
    arguments = ast.literal_eval(settings)
    if arguments["name"] == "composite":  # its scorer would be that of another data set, unseen by _is_data
        raise RewardError("reasoning_gym: the data set 'composite' cannot be scored: list its parts as sources")
    if arguments["name"] in EVALUATED:
        raise RewardError(
            f"reasoning_gym: the scorer of {arguments['name']} evaluates the answer as Python, so the policy could run "
            "programs: use another reward with the column answer, such as math"
        )
    package = import_extra("reasoning_gym", "reasoning_gym", "reasoning-gym")
    return arguments["name"], package.create_dataset(**arguments)


def _answer(text: str, tag: str) -> str | None:
    """The text between the last tags, or the whole text without a tag; None if there are no tags."""
    if not tag:
        return text.strip()
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if closed and opened else None


def _is_data(answer: str, name: str) -> bool:
    """Whether a scorer that evaluates the answer would run no program."""
    if name in READ_AS_SUMS:
        return re.fullmatch(r"[-+*/() .0-9]{0,1000}", answer) is not None and "**" not in answer
    if name not in READ_AS_LITERALS:
        return True
    try:
        ast.literal_eval(answer)
    except SyntaxError:
        return True  # eval fails as well
    except Exception:
        return False
    return True
