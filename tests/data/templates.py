"""A tokenizer of bytes, and chat templates in the style of known families."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

# Only answers to the last question show thoughts; enable_thinking = false adds an empty block of thoughts.
QWEN3 = """{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and loop.last and loop.index0 > ns.last %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

# The answer begins with a thought; the thoughts of earlier answers are removed.
DEEPSEEK_R1 = """{{ bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{%- elif m.role == 'user' %}{{ '<User>' + m.content }}
{%- else %}{{ '<Assistant>' + m.content.split('</think>')[-1] + '<eos>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{%- endif %}"""

LLAMA3 = """{{ bos_token }}{%- for m in messages %}{{ '<|header|>' + m.role + '<|end_header|>\\n\\n' + m.content | trim + '<|eot|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}"""

# An answer follows the closing mark of its question: there is no generation prompt at all.
MISTRAL = """{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '<eos>' }}{%- else %}{{ raise_exception('only user and assistant') }}{%- endif %}{%- endfor %}"""

# Answers have a channel, which the generation prompt leaves for the model to choose.
HARMONY = """{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<User>", "<Assistant>", "<think>", "</think>", "<|header|>"]


def byte_tokenizer(chat_template=None, *, bos=True):
    """A token per byte; with ``bos``, text begins with a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = chat_template
    return fast
