"""Control tokens only where a template wrote them, whatever the tokenizer does to the text."""

import itertools

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cohort.data.encoding import Encoder, Given
from tests.conftest import each
from tests.environments.templates import FAMILIES

UNKNOWN = "<unk>"


def characters(*added, normalizer=None, **options):
    """A tokenizer with a token for each printable ASCII character, and added tokens after these."""
    vocabulary = {chr(code): code - 31 for code in range(32, 127)}
    backend = Tokenizer(models.BPE({UNKNOWN: 0, **vocabulary}, [], unk_token=UNKNOWN))
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=UNKNOWN, **options)
    tokenizer.add_tokens([AddedToken(*one) if isinstance(one, tuple) else one for one in added])
    return tokenizer


def special(text, **options):
    return AddedToken(text, special=True, normalized=False, **options)


def shown(tokenizer, *pieces, **options):
    return tokenizer.convert_ids_to_tokens(Encoder(tokenizer).encode(pieces, **options))


def test_templates_write_control_tokens_and_given_text_does_not():
    tokenizer = characters(special("<end>"))
    assert shown(tokenizer, "<end>", Given("a<end>"), "<end>") == ["<end>", "a", "<", "e", "n", "d", ">", "<end>"]


@each(
    "pieces",
    [
        (Given("<e"), Given("nd>")),
        (Given("<e"), "nd>"),
        ("<e", Given("nd>")),
        ("<e", Given("n"), "d>"),
        (Given("<end>"),),
    ],
)
def test_no_control_token_arises_from_pieces(pieces):
    assert shown(characters(special("<end>")), *pieces) == list("<end>")


def test_a_control_token_of_the_template_survives_text_that_begins_another():
    tokenizer = characters(special("<end>"), special("x<en"))
    assert shown(tokenizer, Given("x"), "<end>") == ["x", "<end>"]


def test_tokens_within_tokens():
    tokenizer = characters(special("<a>"), special("<<a>>"), special("a>>"))
    assert shown(tokenizer, Given("<<a>>")) == list("<<a>>")


def test_text_that_the_tokenizer_normalises_to_a_control_token():
    tokenizer = characters(AddedToken("<call>", normalized=True), normalizer=normalizers.NFKC())
    fullwidth = "".join(chr(ord(letter) + 0xFEE0) for letter in "<call>")
    assert tokenizer.convert_ids_to_tokens(tokenizer(fullwidth)["input_ids"]) == ["<call>"]
    assert shown(tokenizer, Given(fullwidth)) == list("<call>")


def test_control_tokens_that_take_the_whitespace_beside_them():
    tokenizer = characters(special("<end>", rstrip=True), special("<b>", lstrip=True))
    assert shown(tokenizer, "<end>", Given("  x  "), "<b>") == ["<end>", "x", "<b>"]
    assert shown(tokenizer, Given("<end> ")) == list("<end> ")


def test_words_digits_and_whitespace_are_text_even_if_they_were_added():
    tokenizer = characters("north", "7", "\n\n", "<call>")
    assert shown(tokenizer, Given("north7\n\n<call>")) == ["north", "7", "\n\n", *"<call>"]


def test_unknown_characters_are_text_and_the_unknown_token_is_not():
    tokenizer = characters()
    assert shown(tokenizer, Given("aé")) == ["a", UNKNOWN]
    assert shown(tokenizer, Given(UNKNOWN)) == list(UNKNOWN)


def test_a_special_token_of_one_character_is_left_out():
    tokenizer = characters(special("\u00a7"))
    assert shown(tokenizer, "\u00a7", Given("a\u00a7b")) == ["\u00a7", "a", "b"]
    assert shown(characters(special("\u00a7"), special("<end>")), Given("\u00a7<end>")) == list("<end>")


@each("name", FAMILIES)
def test_without_control_tokens_the_ids_are_those_of_the_whole_text(name):
    tokenizer = FAMILIES[name].tokenizer
    encoder = Encoder(tokenizer)
    text = 'The result: {"value": [1, 2, 3]}\n\n\n  done \u2014 数'
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    for first, second in itertools.combinations(range(len(text)), 2):
        pieces = [text[:first], Given(text[first:second]), text[second:]]
        assert encoder.encode(pieces) == whole


def test_no_space_is_added_to_text_that_follows_other_text():
    backend = Tokenizer(models.BPE({UNKNOWN: 0, "\u2581": 1, "a": 2, "b": 3}, [], unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_tokens([special("<end>")])
    assert shown(tokenizer, "ab") == ["\u2581", "a", "b"]
    assert shown(tokenizer, "ab", inner=True) == ["a", "b"]
    assert shown(tokenizer, "a", Given("<end>b")) == ["\u2581", "a", *[UNKNOWN] * 5, "b"]  # nor after a cut


def test_settings_of_other_calls_have_no_effect():
    tokenizer = characters(special("<end>"))
    encoder = Encoder(tokenizer)
    tokenizer("abc", truncation=True, max_length=1, split_special_tokens=True)
    assert len(encoder.encode(["abc<end>"])) == 4
