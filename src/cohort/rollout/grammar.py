"""Constrained sampling: the tokens that may come next so that a text matches a regular expression or a JSON schema.

llguidance has the automaton; this module gives it the tokenizer's tokens, and has errors, boolean masks and a cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from cohort.errors import ConfigError, ModelError
from cohort.rollout.settings import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_HEAD = '%llguidance {"no_forcing": true}\n'
"""Without this option a forced text is allowed in one tokenization only, and the mask would depend on more than the
text."""

_SLICES = [
    r'[^"\\<\x00-\x1F\x7F]{1,10}',
    r'[^"\\<\x00-\x1F\x7F]{1,30}',
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Sets of tokens that the library handles as one. Unlike the library's default they exclude "<", which makes the inside
of a tag, ``[^<]{1,4000}``, about 30 times as fast. They change no mask."""

_MAX_CACHED = 256
"""Maximum number of cached grammars per tokenizer."""

STRICT_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces of ``json.dumps``, and no others: a policy that may draw spaces without end never closes its brackets."""


class Grammar:
    """A regular expression or a JSON schema over the tokens of one tokenizer. Made by ``Grammar.of``.

    The text as a whole matches, as with ``re.fullmatch``. An end token is allowed exactly where the text is complete;
    no other special token ever is, and no token without text. Any way to cut an allowed text into tokens is allowed.
    Tokens are matched by their bytes, so a character may be spread over several tokens.

    Regular expressions have Rust's syntax, which is Python's without look-around, back-references and ``\\b``. ``^``
    and ``$`` are allowed at the ends only; ``?`` or ``+`` after a quantifier has no effect; ``\\d`` and ``\\w`` follow
    Unicode, perhaps in a newer version than Python's. JSON keys have the order of the schema. JSON is spaced as
    ``json.dumps`` does it; ``"x-guidance": {"whitespace_flexible": true}`` in the schema allows any spaces. Schema
    keywords that cannot be enforced are errors.

    A vocabulary without a token for every byte (word lists, small test vocabularies) cannot spell every text. If its
    tokens are whole characters, a regular expression is restricted to texts that can be spelled. A JSON schema is not;
    ``Matcher.fill`` raises at a dead end.
    """

    def __init__(self, name: str, tokens: LLTokenizer, start: LLMatcher) -> None:
        self.name = name
        """``regex '...'`` or ``json_schema '...'``, for error messages."""
        self.end_token_ids = frozenset(tokens.eos_tokens)
        self.vocab_size = tokens.vocab_size
        self._tokens = tokens
        self._start = start

    @classmethod
    def of(cls, tokenizer: Any, sampling: Sampling, end_token_ids: Collection[int], vocab_size: int) -> Grammar:
        """The grammar of ``sampling.regex`` or ``sampling.json_schema``, cached by tokenizer, end tokens and
        constraint.

        Args:
            tokenizer: a fast tokenizer of transformers; only a weak reference is kept.
            sampling: has the regular expression or schema.
            end_token_ids: tokens that end a completion.
            vocab_size: V, the number of logits. Ids that the tokenizer lacks are never allowed.

        Raises:
            ConfigError: llguidance is not installed; the regular expression or schema cannot be compiled, or matches no
                text that the tokenizer can spell; there is no end token, so that no completion could end; or
                ``sampling`` has no constraint.
            ModelError: the tokenizer is not a fast one, or it decodes in a way that gives a token no bytes of its own.
        """
        if not sampling.constrained:
            raise ConfigError("a grammar needs sampling with regex or json_schema set; both are None")
        ends = tuple(sorted({int(token) for token in end_token_ids if 0 <= token < vocab_size}))
        kind, spec = ("json_schema", sampling.json_schema) if sampling.regex is None else ("regex", sampling.regex)
        if not ends:
            raise ConfigError(
                f"{kind} needs an end token, as the text could not end otherwise: got {sorted(end_token_ids)} "
                f"for {vocab_size} logits; set the tokenizer's eos_token"
            )
        vocabulary = _vocabulary(tokenizer, ends, vocab_size)
        key = (kind, spec)
        if key not in vocabulary.grammars:
            if len(vocabulary.grammars) >= _MAX_CACHED:
                del vocabulary.grammars[next(iter(vocabulary.grammars))]
            vocabulary.grammars[key] = _compile(kind, str(spec), vocabulary)
        return vocabulary.grammars[key]

    def matcher(self) -> Matcher:
        """The state of a new text, before its first token."""
        return Matcher(self, self._start.deep_copy())

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, for error messages."""
        return self._tokens.decode_str([token for token in token_ids if 0 <= token < self.vocab_size])


class Matcher:
    """The state of one text in its grammar."""

    def __init__(self, grammar: Grammar, state: LLMatcher) -> None:
        self.grammar = grammar
        self._state = state
        self._consumed: list[int] = []
        self._ended = False
        self._bits: NDArray[np.uint8] | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow; also true after an end token.

        Raises:
            ConfigError: as ``fill``.
        """
        if self._ended or self._state.is_stopped():
            return True
        # With a vocabulary that cannot spell all, the library sees that nothing more fits from the tokens only.
        return self._state.is_accepting() and int(np.bitwise_count(self._next()).sum()) == len(
            self.grammar.end_token_ids
        )

    def fill(self, mask_V: torch.Tensor) -> None:
        """Write which tokens may come next: a row of booleans in main memory. After an end token: the end tokens.

        Raises:
            ConfigError: no token can come next. Only where the vocabulary cannot spell what the grammar asks for, or
                where the grammar is beyond llguidance's limits on its work per step.
        """
        # One row at a time stays in the cache: faster than unpacking all rows at once.
        size = self.grammar.vocab_size
        mask_V.numpy().view(np.uint8)[:] = np.unpackbits(self._next(), count=size, bitorder="little")

    def _next(self) -> NDArray[np.uint8]:
        """The library's mask, one bit per token."""
        if self._bits is None:
            self._bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        # At a dead end the library allows the end, though the text is not complete.
        if self._state.is_error():
            raise ConfigError(
                f"{self.grammar.name} allows no token after {self.grammar.text(self._consumed)[-80:]!r}: the tokenizer "
                f"cannot spell what must follow, or it is too complex ({_one_line(self._state.get_error())}); "
                "use a simpler one"
            )
        return self._bits

    def consume(self, token_id: int) -> None:
        """Append a token. An end token completes the text.

        Raises:
            ConfigError: the token is not allowed. Never raised for a token drawn under the mask.
        """
        in_range = 0 <= token_id < self.grammar.vocab_size
        if self._ended or not in_range or not self._state.consume_token(token_id):
            after = f"after {self.grammar.text(self._consumed)[-80:]!r}" if self._consumed else "as the first token"
            raise ConfigError(
                f"{self.grammar.name} does not allow token {token_id} ({self.grammar.text([token_id])!r}) {after}: "
                "set forced_ids that begin a text it matches"
            )
        self._consumed.append(token_id)
        self._bits = None
        self._ended = token_id in self.grammar.end_token_ids


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A tokenizer's tokens in the library's form, and the grammars compiled over them."""

    tokens: LLTokenizer
    spellable: str | None
    """A regular expression of the texts that the tokens can spell. None: all texts, or no simple expression exists."""
    grammars: dict[tuple[str, str | None], Grammar]


_VOCABULARIES: WeakKeyDictionary[Any, dict[tuple[object, ...], _Vocabulary]] = WeakKeyDictionary()


def _vocabulary(tokenizer: Any, ends: tuple[int, ...], vocab_size: int) -> _Vocabulary:
    """Cached per tokenizer: half a second for 152,000 tokens."""
    backend = _backend(tokenizer)
    of_tokenizer = _VOCABULARIES.setdefault(tokenizer, {})
    key = (ends, vocab_size, backend.get_vocab_size(with_added_tokens=True))  # tokens may have been added since
    if key not in of_tokenizer:
        special = special_ids(tokenizer) | set(ends)
        bytes_V = token_bytes(tokenizer, vocab_size)
        texts = [token for token_id, token in enumerate(bytes_V) if token and token_id not in special]
        of_tokenizer[key] = _Vocabulary(_library_tokens(bytes_V, special, ends), _spellable(texts), {})
    return of_tokenizer[key]


def _library_tokens(bytes_V: list[bytes], special: Collection[int], ends: tuple[int, ...]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise ConfigError(
            "regex and json_schema need llguidance, which is not installed: pip install 'cohort-rl[grammar]'"
        ) from error

    class Tokens:
        eos_token_id = ends[0]
        bos_token_id = None
        tokens = bytes_V
        special_token_ids = sorted(token for token in special if token < len(bytes_V))

        def __call__(self, _: bytes) -> list[int]:
            return []  # called for forced texts only, which are off

    return LLTokenizer(TokenizerWrapper(Tokens()), n_vocab=len(bytes_V), eos_token=list(ends), slices=_SLICES)


def _compile(kind: str, spec: str, vocabulary: _Vocabulary) -> Grammar:
    from llguidance import LLMatcher

    name = f"{kind} {spec if len(spec) <= 80 else spec[:77] + '...'!r}"
    source = _regex_source(spec, vocabulary.spellable) if kind == "regex" else _json_source(spec)
    start = LLMatcher(vocabulary.tokens, LLMatcher.grammar_from_lark(_HEAD + source), log_level=0)
    if start.is_error():
        raise ConfigError(f"{name} cannot be compiled: {_one_line(start.get_error())}")
    first = start.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise ConfigError(f"{name} matches no text that the tokenizer can spell; set another one")
    return Grammar(name, vocabulary.tokens, start)


def _regex_source(regex: str, spellable: str | None) -> str:
    from llguidance import regex_to_lark

    # The library would drop the escape.
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ConfigError(f"regex {regex!r} cannot be compiled: it ends in an escape without a character; write \\\\")
    within = f" & /{spellable}/" if spellable else ""
    return f"start: TEXT\nTEXT: /{regex_to_lark(regex, '')}/{within}\n"


def _json_source(schema: str) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"json_schema must be a schema as JSON text, got {schema[:80]!r}: {error}") from error
    parsed = {} if parsed is True else parsed
    if isinstance(parsed, dict):
        parsed = {"x-guidance": STRICT_SPACES, **parsed}
    return f"start: %json {json.dumps(parsed)}\n"


def _spellable(tokens: Iterable[bytes]) -> str | None:
    tokens = set(tokens)
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that no UTF-8 text contains
    if tokens >= {bytes([byte]) for byte in range(256) if byte not in never}:
        return None
    try:
        texts = {token.decode() for token in tokens}
    except UnicodeDecodeError:
        return None  # incomplete characters: no simple expression describes what they spell
    letters = {text for text in texts if len(text) == 1}
    words = sorted(text for text in texts if not set(text) <= letters)
    spelled = ["".join(rf"\x{{{ord(letter):X}}}" for letter in word) for word in words]
    every = "".join(rf"\x{{{ord(letter):X}}}" for letter in sorted(letters))
    return f"(?:{'|'.join(([f'[{every}]'] if letters else []) + spelled)})*"


def _one_line(error: str) -> str:
    """The library's message without the excerpt of the source and the dump of the state."""
    lines = re.split(r"\n<state>|\n +\d+ \|", error, maxsplit=1)[0].splitlines()
    told = " ".join(line.strip() for line in lines if not line.startswith(" "))
    return re.sub(r"^at \d+\(\d+\): ", "", told)[:300] or "no reason given"


def _backend(tokenizer: Any) -> Any:
    from tokenizers import Tokenizer

    for name in ("backend_tokenizer", "_tokenizer"):
        backend = getattr(tokenizer, name, None)
        if isinstance(backend, Tokenizer):
            return backend
    raise ModelError(
        f"regex and json_schema need a fast tokenizer (PreTrainedTokenizerFast, with a tokenizer.json), "
        f"got {type(tokenizer).__name__}"
    )


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that ``decode(..., skip_special_tokens=True)`` skips.

    Raises:
        ModelError: the tokenizer is not a fast one.
    """
    added = _backend(tokenizer).get_added_tokens_decoder()
    return {token_id for token_id, token in added.items() if token.special} | set(tokenizer.all_special_ids)


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes of each token inside a text; a special token's name; empty for an id without a token.

    Supports decoders that join the bytes of tokens: byte-level (GPT-2, Qwen, Llama 3), byte fallback (Llama 2, Gemma),
    metaspace, and plain text (fuse). The stripping of a space at the start of a text is not included.

    Raises:
        ModelError: the tokenizer is not a fast one, or has another decoder.
    """
    backend = _backend(tokenizer)
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    spaces = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    spaces += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    known = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
    if not kinds <= known or any(pattern is None for pattern, _ in spaces):
        raise ModelError(
            f"regex and json_schema need a tokenizer whose tokens have bytes of their own, with a decoder of "
            f"{', '.join(sorted(known))}; {type(tokenizer).__name__} has {', '.join(sorted(kinds))}"
        )
    letters = _byte_letters() if "ByteLevel" in kinds else {}
    bytes_V = [b""] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            bytes_V[token_id] = _bytes_of(token, letters, spaces, "ByteFallback" in kinds)
    return bytes_V


def _bytes_of(token: str, letters: dict[str, int], spaces: list[tuple[str, str]], fallback: bool) -> bytes:
    if fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
        return bytes([int(byte[1], 16)])
    if letters and all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    for pattern, content in spaces:
        token = token.replace(pattern, content)
    return token.encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: a printable Latin-1 character for itself, the other bytes from U+0100 on, in order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}
