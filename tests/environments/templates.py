"""Ten chat templates in the styles of known families, and small tokenizers that have their control tokens.

    family = FAMILIES["qwen3"]
    family.tokenizer         a trained BPE tokenizer with the family's chat template
    family.end_token_ids     tokens that end a turn
    family.call(text, CALLS) an assistant message with calls, in the form that the template takes

The tokenizers are of two kinds: byte-level BPE, which splits text by the expression of Qwen2, and BPE of characters with
bytes for unknown ones, as Gemma's and Mistral's were converted from SentencePiece. The latter have runs of line breaks
or spaces among their added tokens, which are ordinary text.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "templates"

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXT = [
    "What is 17 times 23? The sum of 12 and 30 is 42. The weather in Paris is sunny, 21 degrees.",
    'The result: {"value": [1, 2, 3], "ok": true, "name": "add"}\n\nDone.\n',
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(2, 2))\n",
    "You are in a maze. Go north, south, east or west.\n\n  1. north\n  2. south\n",
] * 4

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second."},
                },
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Looks up the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    },
]
"""JSON schemas of two tools."""

CALLS = [("add", {"a": 2, "b": 40}), ("weather", {"city": "Zürich"})]


@dataclass(frozen=True)
class Family:
    """A style of chat template."""

    name: str
    end: tuple[str, ...]
    """Tokens that end a turn; the first is the tokenizer's ``eos_token``."""
    special: tuple[str, ...]
    """The other special tokens."""
    added: tuple[str, ...] = ()
    """Tokens that are added but not special, so decoding shows them."""
    bos: str | None = None
    sentencepiece: bool = False
    tools: bool = True
    """Whether the template shows tools and their answers."""
    json_arguments: bool = False
    """Whether the template takes the arguments of a call as JSON text."""
    one_call: bool = False
    """Whether the template takes one call a turn only."""

    @cached_property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        backend = _sentencepiece(self) if self.sentencepiece else _byte_level(self)
        special = [*self.end, *self.special, *([self.bos] if self.bos else []), "<|pad|>"]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        backend.add_tokens([AddedToken(text, normalized=False) for text in self.added])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=self.end[0], bos_token=self.bos, pad_token="<|pad|>"
        )
        tokenizer.chat_template = self.template
        return tokenizer

    @property
    def end_token_ids(self) -> list[int]:
        return self.tokenizer.convert_tokens_to_ids(list(self.end))

    @property
    def control(self) -> list[str]:
        """Every control token, as text."""
        return [*self.end, *self.special, *(text for text in self.added if not text.replace("▁", " ").isspace())]

    def call(self, text: str, calls: list[tuple[str, dict]] = CALLS[:1], **others) -> dict:
        """An assistant's message with calls. The ids of the calls are "call00000", "call00001", ..."""
        return {
            "role": "assistant",
            "content": text,
            "tool_calls": [
                {
                    "type": "function",
                    "id": f"call{number:05}",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(arguments) if self.json_arguments else arguments,
                    },
                }
                for number, (name, arguments) in enumerate(calls)
            ],
            **others,
        }


def answer(text: str, number: int = 0, name: str = "add") -> dict:
    """A tool's message."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05}", "content": text}


def _corpus(family: Family) -> list[str]:
    """What the vocabulary is learned from: plain text, and the template's own without its control tokens."""
    text = family.template.replace("\\n", "\n")
    for control in family.control:
        text = text.replace(control, "'")
    return [*TEXT, *(piece for piece in text.split("'") if "{%" not in piece)]


def _byte_level(family: Family) -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=family.name == "llama3_1"))
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_corpus(family), trainer)
    return backend


def _sentencepiece(family: Family) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(_corpus(family), trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for text in ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]:
        vocabulary.setdefault(text, len(vocabulary))
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    if family.name == "mistral":  # a space before the first word, unless a control token begins the text
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _deepseek(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


CHATML = ("<|im_end|>", "<|endoftext|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = ("<think>", "</think>")

FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_5", CHATML, ("<|im_start|>",), TAGS[:2]),
        Family("qwen3", CHATML, ("<|im_start|>",), (*TAGS, *THINK)),
        Family("qwen3_5", CHATML, ("<|im_start|>",), (*TAGS, *THINK)),
        Family(
            "llama3_1",
            ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
            ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
            bos="<|begin_of_text|>",
            one_call=True,
        ),
        Family(
            "gemma",
            ("<end_of_turn>", "<eos>"),
            ("<start_of_turn>", "<unk>"),
            ("\n\n", "\n\n\n", "▁▁", "▁▁▁"),
            bos="<bos>",
            sentencepiece=True,
            tools=False,
        ),
        Family(
            "mistral",
            ("</s>",),
            (
                *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
                *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<unk>"),
            ),
            bos="<s>",
            sentencepiece=True,
        ),
        Family(
            "gptoss",
            ("<|return|>", "<|call|>", "<|endoftext|>"),
            ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>"),
            one_call=True,
        ),
        Family(
            "deepseek",
            (_deepseek("end▁of▁sentence"),),
            (),
            (
                *map(_deepseek, ("User", "Assistant", "tool▁sep", "tool▁calls▁begin", "tool▁calls▁end")),
                *map(_deepseek, ("tool▁call▁begin", "tool▁call▁end", "tool▁outputs▁begin", "tool▁outputs▁end")),
                *map(_deepseek, ("tool▁output▁begin", "tool▁output▁end")),
                *THINK,
            ),
            bos=_deepseek("begin▁of▁sentence"),
            json_arguments=True,
        ),
        Family("smollm", CHATML, ("<|im_start|>",), (*TAGS, *THINK)),
        Family(
            "glm",
            ("<|endoftext|>", "<|user|>", "<|observation|>"),
            ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
            (*TAGS, *THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        ),
    )
}


def with_template(template: str) -> PreTrainedTokenizerFast:
    """Qwen3's tokenizer with another template."""
    tokenizer = copy.copy(FAMILIES["qwen3"].tokenizer)
    tokenizer.chat_template = template
    return tokenizer
