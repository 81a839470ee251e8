"""Grammars: the masks are exactly the live prefixes, walks over them end in texts that match, wrong inputs are told."""

import gc
import itertools
import json
import random
import re
import sys
import weakref

import pytest
import regex as with_partial_matches
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cohort.errors import ConfigError, ModelError
from cohort.rollout import Sampling
from cohort.rollout import grammar as grammar_module
from cohort.rollout.grammar import Grammar, special_ids, token_bytes
from tests.conftest import each

ENDS = (1, 2)
SPECIAL = ["<pad>", "<end>", "<stop>"]


def fast(backend, **settings):
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", **settings)


def words(*tokens):
    """Token 0 is padding, 1 and 2 are ends, then these words, as the demo's tokenizer has them."""
    vocab = {token: place for place, token in enumerate([*SPECIAL, *tokens])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return fast(backend)


def pieces(*tokens):
    """As Llama 2 and Gemma: "▁" is a space, a byte is "<0xC3>"."""
    vocab = {token: place for place, token in enumerate([*SPECIAL, *tokens])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return fast(backend)


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE of some 600 tokens: all bytes, some words, and a token that is no special one, <think>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = [
        '{"name": "Zoë", "age": 12}',
        "Natalia sold 48 clips, then 24.5 more.",
        "</answer> <answer> 3 €; naïve größe",
        "日本語",
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL, vocab_size=600, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*text * 3, "name age answer clips more"], trainer)
    backend.add_tokens([AddedToken("<think>", special=False)])
    return fast(backend)


def grammar(tokenizer, regex=None, schema=None, ends=ENDS, vocab_size=None):
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
    return Grammar.of(tokenizer, Sampling(8, regex=regex, json_schema=text), ends, vocab_size or len(tokenizer))


def allowed(matcher):
    mask_V = torch.zeros(matcher.grammar.vocab_size, dtype=torch.bool)
    matcher.fill(mask_V)
    return set(mask_V.nonzero()[:, 0].tolist())


def after(grammar, token_ids):
    matcher = grammar.matcher()
    for token in token_ids:
        matcher.consume(token)
    return matcher


def walk(grammar, rng, longest, towards=()):
    """Random allowed tokens until an end token, or None where the walk is cut. Ends soon: an end is taken at a chance."""
    matcher, taken = grammar.matcher(), []
    for _ in range(longest):
        may = allowed(matcher)
        assert may
        ends = sorted(may & set(grammar.end_token_ids))
        if matcher.finished:
            assert may == set(ends)
        if ends and rng.random() < 0.3:
            matcher.consume(rng.choice(ends))
            assert matcher.finished
            return taken
        text = sorted(may - set(grammar.end_token_ids)) or ends
        liked = [token for token in text if token in towards]
        token = rng.choice(liked if liked and rng.random() < 0.6 else text)
        matcher.consume(token)
        if token in grammar.end_token_ids:
            return taken
        taken.append(token)
    return None


# Exactness, by brute force: a prefix lives if some few tokens more make a text that Python's re accepts.


def is_match(pattern, text):
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


ABC = ("a", "b", "c", "ab", "bca", "1")
UNSPELLED = ("a", " write", "wr", "12", "1")  # no letter of "write" is a token, but for what stands in "wr"
BYTES = ("a", "é", "<0xC3>", "<0xA9>", "<0xAA>", "▁a")


@pytest.mark.parametrize(
    ("tokenizer", "pattern"),
    [
        (words(*ABC), "abc"),
        (words(*ABC), "a|bc|abca1"),
        (words(*ABC), "(ab|ba)*c?"),
        (words(*ABC), "^a+?b*?1$"),
        (words(*ABC), r"[^a]{2,3}|a\d"),
        (words(*ABC), r"(?:ab?)?"),
        (words(*ABC), ".*1.?"),
        (words(*ABC), "a[^ab1]x|b"),  # "a" is a dead end: no token has an x
        (words(*ABC), "(bc|ab)(x|a)"),
        (words(*UNSPELLED), "a( write| carry)|12?"),
        (words(*UNSPELLED), r"\w{1,4}"),
        (words(*UNSPELLED), "(wri|wr| wr)(te|ite)?"),
        (pieces(*BYTES), "[éê]a?"),
        (pieces(*BYTES), "(é a|ê)+"),
        (pieces(*BYTES), "a?[^a ]{1,2}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_mask_is_what_leads_to_a_match_and_nothing_else(tokenizer, pattern):
    bytes_V = token_bytes(tokenizer, len(tokenizer))
    spelled = range(len(SPECIAL), len(tokenizer))
    tails = {b"".join(bytes_V[t] for t in ids) for n in range(5) for ids in itertools.product(spelled, repeat=n)}
    whole = grammar(tokenizer, pattern)
    queue, seen = [()], 0
    while queue:
        prefix = queue.pop()
        text = b"".join(bytes_V[token] for token in prefix)
        living = {t for t in spelled if any(is_match(pattern, text + bytes_V[t] + tail) for tail in tails)}
        complete = set(ENDS) if is_match(pattern, text) else set()
        matcher = after(whole, prefix)
        assert allowed(matcher) == living | complete, text
        assert matcher.finished == (not living), text
        for token in set(range(len(tokenizer))) - living - complete:
            with pytest.raises(ConfigError):
                after(whole, prefix).consume(token)
        seen += 1
        if len(prefix) < 3:
            queue += [(*prefix, token) for token in living]
    assert seen > 1


TAGS = r"<think>[^<]{1,400}</think>\n?<answer>[^<]+</answer>"


@pytest.mark.parametrize(
    "pattern",
    [TAGS, r"-?\d+(\.\d{1,4})?", r"[\s\S]{0,30}#### -?\d{1,9}", r'("[^"\\]*",? ?)+', r"([A-Z][a-z]+ ){1,3}[a-z]+\."],
)
def test_masks_over_a_byte_level_vocabulary_are_the_partial_matches(byte_level, pattern):
    """Another library tells the live prefixes here; for tokens that are whole characters."""
    bytes_V = token_bytes(byte_level, len(byte_level))
    texts = {}
    for token, spelled in enumerate(bytes_V):
        if token >= len(SPECIAL) and all(byte < 128 for byte in spelled):
            texts[token] = spelled.decode()
    whole, rng = grammar(byte_level, pattern), random.Random(1)
    lives = with_partial_matches.compile(pattern)
    for _ in range(12):
        matcher, text = whole.matcher(), ""
        for _ in range(14):
            may = allowed(matcher)
            assert may & set(texts) == {t for t, own in texts.items() if lives.fullmatch(text + own, partial=True)}
            assert (may & set(ENDS) == set(ENDS)) == bool(lives.fullmatch(text))
            if matcher.finished:
                break
            token = rng.choice(sorted(may & set(texts)))
            matcher.consume(token)
            text += texts[token]


PATTERNS = [
    r"-?[0-9]{1,3}(\.[0-9]{1,4})?",
    "yes|no|maybe",
    r"<think>[^<]{1,40}</think>\n<answer>[a-zé]{1,5}</answer>",
    r"[日本語é€]{2,5}",
    r"(?s:.{0,8})#### -?[0-9]{1,4}",
    "a/b\"c'\\\\\n\\.d#e",
    "(?i)größe",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_walks_over_allowed_tokens_end_in_a_match(byte_level, pattern):
    whole, rng, texts = grammar(byte_level, pattern), random.Random(0), []
    for _ in range(30):
        taken = walk(whole, rng, 200)
        if taken is not None:
            assert is_match(pattern, b"".join(token_bytes(byte_level, len(byte_level))[token] for token in taken))
            texts.append(byte_level.decode(taken, skip_special_tokens=True))
            assert re.fullmatch(pattern, texts[-1])
    assert len(texts) >= 10


def is_person(value):
    return (
        isinstance(value, dict)
        and set(value) <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and all(isinstance(tag, str) for tag in value.get("tags", []))
        and len(value.get("tags", [])) <= 2
    )


def is_tree(value):
    return set(value) <= {"v", "c"} and type(value["v"]) is bool and all(is_tree(child) for child in value.get("c", []))


def strings(longest):
    return {"type": "string", "maxLength": longest}


SCHEMAS = {
    "person": (
        {
            "type": "object",
            "properties": {
                "name": strings(4),
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": strings(3), "maxItems": 2},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        is_person,
    ),
    "choice": ({"enum": ["é", 3, None, [1, "a"]]}, lambda value: value in ["é", 3, None, [1, "a"]]),
    "number": ({"type": "number", "minimum": -2, "exclusiveMaximum": 10}, lambda value: -2 <= value < 10),
    "pattern": ({"type": "string", "pattern": "^[a-c]{2,3}$"}, lambda value: re.fullmatch("[a-c]{2,3}", value)),
    "tree": (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "v": {"type": "boolean"},
                        "c": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        is_tree,
    ),
    "either": ({"anyOf": [{"type": "null"}, strings(2)]}, lambda value: value is None or len(value) <= 2),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_walks_over_allowed_tokens_end_in_json_that_the_schema_accepts(byte_level, name):
    schema, accepts = SCHEMAS[name]
    whole, rng, ended = grammar(byte_level, schema=schema), random.Random(3), 0
    closing = {
        token for token, own in enumerate(token_bytes(byte_level, len(byte_level))) if own and own[-1:] in b'"]},e'
    }
    for _ in range(30):
        taken = walk(whole, rng, 300, closing)
        if taken is not None:
            value = json.loads(byte_level.decode(taken, skip_special_tokens=True))
            assert accepts(value), value
            ended += 1
    assert ended >= 10


def test_json_in_any_tokens_and_spacing_is_allowed(byte_level):
    flexible = {"x-guidance": {"whitespace_flexible": True}}
    whole = grammar(byte_level, schema={**SCHEMAS["person"][0], **flexible})
    single = {own: token for token, own in enumerate(token_bytes(byte_level, len(byte_level))) if len(own) == 1}
    for text in ('{"name":"Zoë","age":12}', '{\n  "name": "Zoë",\n  "age": 12,\n  "tags": ["a"]\n}'):
        for ids in (byte_level.encode(text), [single[bytes([byte])] for byte in text.encode()]):
            matcher = after(whole, ids)
            assert matcher.finished
            assert allowed(matcher) == set(ENDS)


@each("schema", [{}, "true", {"type": "object"}, SCHEMAS["person"][0]], ids=str)
def test_json_is_spaced_as_python_writes_it(byte_level, schema):
    """With spaces without end, 41% of the completions of an untrained policy were cut before their last bracket."""
    whole, value = grammar(byte_level, schema=schema), {"name": "Zoë", "age": 12, "tags": ["a", "b"]}
    assert after(whole, byte_level.encode(json.dumps(value, ensure_ascii=False))).finished
    for text in ('{ "name', '{"name":"Z', '{"name" :', "{\n", '{"name": "Zoë"  '):
        with pytest.raises(ConfigError, match="does not allow token"):
            after(whole, byte_level.encode(text))


def test_digits_and_letters_are_those_of_unicode_as_in_python(byte_level):
    for pattern, text in ((r"\d", "٣"), (r"\w", "é"), (r"\s", "\u2003"), ("(?i)é", "É")):
        assert re.fullmatch(pattern, text)
        assert after(grammar(byte_level, pattern), byte_level.encode(text)).finished


def test_special_tokens_are_never_text_and_added_words_are(byte_level):
    everything = allowed(grammar(byte_level, r"[\s\S]*").matcher())
    assert 0 not in everything
    assert everything >= set(ENDS)
    think = byte_level.convert_tokens_to_ids("<think>")
    assert think in everything
    assert think in allowed(grammar(byte_level, "<think>.").matcher())
    pad_spelled = grammar(byte_level, "<pad>")  # the text of a special token, spelled by others, is text
    assert 0 not in allowed(pad_spelled.matcher())
    assert walk(pad_spelled, random.Random(0), 20) is not None


def test_end_tokens_are_those_given_and_end_it(byte_level):
    one = grammar(byte_level, "ab?", ends=(2,))
    a, b = byte_level.encode("a")[0], byte_level.encode("b")[0]
    assert allowed(after(one, [a])) == {2, b}
    ended = after(one, [a, 2])
    assert ended.finished
    assert allowed(ended) == {2}
    with pytest.raises(ConfigError, match=r"regex 'ab\?' does not allow token \d+ \('b'\) after 'a"):
        ended.consume(b)
    # A word can be an end token too; then it is no text.
    word = grammar(byte_level, "[ab]*", ends=(1, b))
    assert allowed(word.matcher()) >= {1, b}
    assert after(word, [b]).finished


def test_ids_beyond_the_tokenizer_are_never_allowed_and_fewer_logits_leave_tokens_out():
    tokenizer = words(*ABC)
    padded = grammar(tokenizer, ".*", vocab_size=40)
    assert allowed(padded.matcher()) == set(ENDS) | set(range(3, 9))
    for token in (9, 39, 40, -1, 10**9):
        with pytest.raises(ConfigError, match=f"does not allow token {token} "):
            padded.matcher().consume(token)
    assert allowed(grammar(tokenizer, ".*", vocab_size=6).matcher()) == set(ENDS) | {3, 4, 5}


def test_rows_are_filled_in_place_each_from_its_own_matcher():
    tokenizer = words(*ABC)
    whole = grammar(tokenizer, "abc|b1")
    matchers = [whole.matcher(), after(whole, [3]), after(whole, [4]), after(whole, [4, 8])]
    rows_SV = torch.ones(6, 9, dtype=torch.bool)
    for matcher, row_V in zip(matchers, rows_SV[1:5], strict=True):
        matcher.fill(row_V)
    assert rows_SV[0].all()
    assert rows_SV[5].all()
    assert [set(row.nonzero()[:, 0].tolist()) for row in rows_SV[1:5]] == [{3, 4, 6}, {4}, {8}, {1, 2}]
    assert [matcher.finished for matcher in matchers] == [False, False, False, True]


def test_a_constraint_is_compiled_once_per_tokenizer(monkeypatch):
    made = []
    compiled = grammar_module._compile
    monkeypatch.setattr(grammar_module, "_compile", lambda *given: made.append(given[1]) or compiled(*given))
    tokenizer = words(*ABC)
    first = grammar(tokenizer, "a+")
    assert all(grammar(tokenizer, "a+") is first for _ in range(5))
    assert made == ["a+"]
    grammar(tokenizer, "b+")
    grammar(tokenizer, "a+", ends=(1,))
    grammar(tokenizer, "a+", vocab_size=12)
    grammar(words(*ABC), "a+")
    assert len(made) == 5
    monkeypatch.setattr(grammar_module, "_MAX_CACHED", 3)
    for pattern in ("a", "ab", "abc", "1"):
        grammar(tokenizer, pattern)
    assert grammar(tokenizer, "1") is grammar(tokenizer, "1")
    assert grammar(tokenizer, "a+") is not first


def test_tokens_added_later_are_seen_and_a_tokenizer_is_not_kept():
    tokenizer = words(*ABC)
    assert len(allowed(grammar(tokenizer, ".*").matcher())) == 8
    tokenizer.add_tokens(["new"])
    assert len(allowed(grammar(tokenizer, ".*").matcher())) == 9
    kept = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert kept() is None


def test_token_bytes_spell_what_the_tokenizer_decodes(byte_level, demo_tokenizer):
    rng = random.Random(2)
    for tokenizer in (byte_level, demo_tokenizer, pieces(*BYTES)):
        bytes_V, text = (
            token_bytes(tokenizer, len(tokenizer) + 3),
            sorted(set(range(len(tokenizer))) - special_ids(tokenizer)),
        )
        assert bytes_V[len(tokenizer) :] == [b""] * 3
        for _ in range(50):
            ids = rng.choices(text, k=12)
            spelled = b"".join(bytes_V[token] for token in ids)
            try:
                expected = spelled.decode()
            except UnicodeDecodeError:
                continue  # decoders differ in how many replacement characters they show
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == expected
        for token in text:
            assert "�" in tokenizer.decode([token]) or tokenizer.decode([token]).encode() == bytes_V[token]


@each(
    ("pattern", "reason"),
    [
        ("a(", "unclosed group"),
        ("(?=a)a", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        ("a$b", "lookarounds not supported"),
        ("ab\\", "ends in an escape"),
        (r"[^\s\S]", "matches no text"),
        ("x+", "matches no text that the tokenizer can spell"),
    ],
)
def test_a_regex_that_cannot_be_used(pattern, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        grammar(words(*ABC), pattern)
    assert str(raised.value).startswith(f"regex {pattern!r} ")
    assert "\n" not in str(raised.value)


@each(
    ("schema", "reason"),
    [
        ('{"type":', "must be a schema as JSON text"),
        ("{} start", "must be a schema as JSON text"),
        ("[1]", "schema must be an object or boolean"),
        ({"type": "text"}, "Invalid type: text"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "http://example.org/schema"}, "does not fetch"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        (False, "Unsatisfiable"),
    ],
)
def test_a_schema_that_cannot_be_used(byte_level, schema, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        grammar(byte_level, schema=schema)
    assert str(raised.value).startswith("json_schema ")
    assert "\n" not in str(raised.value)


def test_a_schema_that_the_tokenizer_cannot_spell_to_its_end():
    tokenizer = words('"', "a", "b")
    whole = grammar(tokenizer, schema={"enum": ["ab", "acb"]})
    assert allowed(after(whole, [3, 4])) == {5}
    dead = after(grammar(tokenizer, schema={"enum": ["ac"]}), [3, 4])
    with pytest.raises(ConfigError, match=r"""allows no token after '"a'"""):
        allowed(dead)
    with pytest.raises(ConfigError, match="matches no text that the tokenizer can spell"):
        grammar(words(*ABC), schema={"type": "object"})


def test_forced_tokens_that_the_grammar_forbids_are_told():
    tokenizer = words(*ABC)
    with pytest.raises(ConfigError, match=r"regex 'b\+' does not allow token 3 \('a'\) as the first token"):
        grammar(tokenizer, "b+").matcher().consume(3)
    with pytest.raises(ConfigError, match=r"does not allow token 1 .*after 'a'"):
        after(grammar(tokenizer, "ab"), [3]).consume(1)


def test_no_constraint_and_no_end_token():
    with pytest.raises(ConfigError, match="regex or json_schema"):
        grammar(words(*ABC))
    for ends in ((), (50,)):
        with pytest.raises(ConfigError, match="regex needs an end token"):
            grammar(words(*ABC), "a", ends=ends)


def test_tokenizers_that_do_not_do():
    with pytest.raises(ModelError, match="need a fast tokenizer .* got object"):
        Grammar.of(object(), Sampling(8, regex="a"), ENDS, 9)
    for decoder in (decoders.WordPiece(), None, decoders.Sequence([decoders.CTC()])):
        backend = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2}, unk_token="<pad>"))
        if decoder is not None:
            backend.decoder = decoder
        with pytest.raises(ModelError, match="tokens have bytes of their own"):
            Grammar.of(fast(backend), Sampling(8, regex="a"), (1,), 3)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'cohort-rl\[grammar\]'"):
        grammar(words(*ABC), "a")
