"""Models in GGUF files: what becomes of their weights and tokenizers, and which are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import ModelError
from cohort.policy import Precision, end_token_ids, load_model, load_tokenizer, read_config
from tests.conftest import tiny_llama

gguf = pytest.importorskip("gguf", reason="the extra gguf")
pytest.importorskip("transformers.integrations.gguf", reason="an older transformers")
SINGLE, CPU = Precision(torch.float32, torch.float32), torch.device("cpu")
TEMPLATE = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
KINDS = gguf.GGMLQuantizationType
TOKENS = [*sorted(ByteLevel.alphabet()), "ĠĠ", "<|end|>", "<|turn|>"]


def names_of(model: Any) -> dict[str, str]:
    """The names of a Llama's weights in such files."""
    within = {
        **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    found = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(model.config.num_hidden_layers):
        found |= {f"model.layers.{layer}.{own}.weight": f"blk.{layer}.{name}.weight" for own, name in within.items()}
    return found


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: the two halves of each rotated pair beside each other."""
    split = weight.reshape(heads, 2, -1, weight.shape[1])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    model: Any = None,
    kind: Any = KINDS.F32,
    *,
    architecture: str = "llama",
    rule: str | None = "smollm",
    tokens: list[str] | None = TOKENS,
    values: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a Llama as a GGUF file; ``values`` are further keys, ``more`` further tensors."""
    model = model or small()
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(50000.0)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if one.startswith("<|") else 1 for one in tokens])
        writer.add_token_merges(["Ġ Ġ"])
        writer.add_eos_token_id(tokens.index("<|end|>"))
        writer.add_chat_template(TEMPLATE)
    if rule:
        writer.add_tokenizer_pre(rule)
    for key, value in (values or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    state = {name: one.detach().float().numpy() for name, one in model.named_parameters()}
    for own, name in names_of(model).items():
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(
            name[-8:-7] if "attn_" in name else ""
        )
        weight = interleaved(state[own], heads) if heads else state[own]
        if weight.ndim == 2 and kind != KINDS.F32:
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    for name, weight in (more or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small() -> Any:
    return tiny_llama(
        len(TOKENS), hidden_size=64, intermediate_size=96, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.Q8_0, KINDS.Q4_1], ids=lambda kind: kind.name)
def test_the_weights_are_those_of_the_file(kind, tmp_path):
    """Widened, and in transformers' order: the log-probs are those of the model whose weights are rounded as in the
    file."""
    model, ids = small(), torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(3))
    path = write(tmp_path / "small.gguf", model, kind)
    rounded = small()
    for name, one in rounded.named_parameters():
        weight = model.get_parameter(name).detach().numpy()
        quantized = one.ndim == 2 and kind != KINDS.F32
        one.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind) if quantized else weight)
    found = load_model(str(path), SINGLE, CPU)
    assert {one.dtype for one in found.parameters()} == {torch.float32}
    torch.testing.assert_close(found(ids).logits, rounded(ids).logits, rtol=0, atol=0)


def test_a_file_is_read_once_and_anew_when_it_changes(tmp_path):
    path = write(tmp_path / "small.gguf")
    load_tokenizer(str(path))
    folder = next((tmp_path / "cache" / "models").iterdir())
    first = (folder / "model.safetensors").stat()
    assert read_config(str(path)).name_or_path == str(folder)
    load_model(str(path), SINGLE, CPU)
    assert (folder / "model.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    write(path, values={"tokenizer.ggml.eot_token_id": len(TOKENS) - 1})
    load_tokenizer(str(path))
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 2


def test_the_tokenizer_splits_text_by_the_files_rule(tmp_path):
    """Where digits are split off first, a space before them can be part of a longer run of spaces; GPT-2's own rule
    keeps the last space with the number."""
    digits, plain = (load_tokenizer(str(write(tmp_path / f"{rule}.gguf", rule=rule))) for rule in ("smollm", "gpt-2"))
    assert digits.tokenize("a  34") == ["a", "ĠĠ", "3", "4"]
    assert plain.tokenize("a  34") == ["a", "Ġ", "Ġ", "3", "4"]
    assert digits.chat_template == TEMPLATE
    assert digits.decode(digits("Grüße, 34!")["input_ids"]) == "Grüße, 34!"
    assert digits("<|end|>")["input_ids"] == [TOKENS.index("<|end|>")]


@pytest.mark.parametrize("turn", [False, True])
def test_all_end_tokens_of_the_file_end_a_completion(turn, tmp_path):
    ends = [TOKENS.index("<|end|>"), TOKENS.index("<|turn|>")]
    values = {"tokenizer.ggml.eot_token_id": ends[1]} if turn else {}
    path = str(write(tmp_path / "small.gguf", values=values))
    assert end_token_ids(path, load_tokenizer(path)) == tuple(ends if turn else ends[:1])


def test_a_run_writes_ordinary_folders(tmp_path):
    path = write(tmp_path / "small.gguf")
    rows = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    config = GRPOConfig(
        model={"path": str(path), "native_kernels": False},
        rollout={"num_generations": 2, "prompts_per_step": 2, "max_completion_length": 4},
        optim={"learning_rate": 0.01},
        run={"max_steps": 1, "output_dir": str(tmp_path / "run")},
        report={"progress": False},
    )

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(one) % 7) for one in completion_ids]

    trainer = GRPOTrainer(None, reward, config, rows)
    trainer.train()
    saved = tmp_path / "run" / "checkpoints" / "step-1"
    found, ids = load_model(str(saved), SINGLE, CPU), torch.tensor([[1, 2, 3]])
    trained: Any = trainer.policy.model
    torch.testing.assert_close(found(ids).logits, trained(ids).logits, rtol=0, atol=1e-6)
    assert load_tokenizer(str(saved)).tokenize("a  34") == ["a", "ĠĠ", "3", "4"]
    assert not list(saved.glob("*.gguf"))
    assert json.loads((saved / "config.json").read_text())["rope_parameters"]["rope_theta"] == 50000.0


def cut(path: Path, by: int) -> Path:
    path.write_bytes(path.read_bytes()[:-by])
    return path


def retyped(path: Path, kind: int) -> Path:
    """The type of the first tensor changed in the header."""
    content, name = path.read_bytes(), b"token_embd.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(content[:place] + struct.pack("<I", kind) + content[place + 4 :])
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path, "no file .*model.path takes a GGUF file that is here"),
        (lambda path: path.write_text("{}"), "is no GGUF file: expected a model folder, a hub id or a GGUF file"),
        (lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "is of GGUF version 1: expected 2 or 3"),
        (lambda path: path.write_bytes(b"GGUF\x03\0"), "is cut off or damaged"),
        (lambda path: path.write_bytes(write(path).read_bytes()[:900]), "is cut off or damaged"),
        (lambda path: cut(write(path), 99), "is cut off: it has .* bytes, and .* ends at"),
        (lambda path: retyped(write(path), 38), "holds token_embd.weight as .*, which cannot be widened"),
        (lambda path: retyped(write(path), 199), "holds token_embd.weight as 199, which cannot be widened"),
        (lambda path: write(path, tokens=None), "holds no tokenizer"),
        (lambda path: write(path, rule="poro-chat"), "splits text by the rule 'poro-chat'"),
        (lambda path: write(path, rule=None), "splits text by the rule None"),
        (lambda path: write(path, values={"split.count": 3, "split.no": 1}), "is part 2 of 3: join them"),
        (lambda path: write(path, values={"general.type": "adapter"}), "holds no model but 'adapter'"),
        (lambda path: write(path, architecture="clip"), "architecture clip is not supported"),
        (lambda path: write(path, values={"llama.rope.scaling.type": "yarn"}), "scales positions .*yarn"),
        (lambda path: write(path, values={"llama.rope.scaling.factor": 4.0}), "scales positions"),
        (lambda path: write(path, values={"llama.attention.sliding_window": 64}), "sets llama.attention.sliding_window to 64"),
        (lambda path: write(path, values={"llama.final_logit_softcapping": 30.0}), "final_logit_softcapping to 30.0"),
        (lambda path: write(path, more={"rope_freqs.weight": np.ones(8, np.float32)}), "rope_freqs.weight would be left out"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(make, message, tmp_path, monkeypatch):
    """Before a weight is widened."""
    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", None)
    path = tmp_path / "other.gguf"
    make(path)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(path))
    assert not list(tmp_path.glob("cache/models/*"))


def test_a_tensor_that_is_missing_is_named(tmp_path):
    model = small()
    del model.model.layers[1].mlp.up_proj
    names = names_of(small())
    names.pop("model.layers.1.mlp.up_proj.weight")
    path = tmp_path / "less.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.policy.test_gguf.names_of", lambda _: names)
        write(path, model)
    with pytest.raises(ModelError, match=r"lacks model.layers.1.mlp.up_proj.weight"):
        load_tokenizer(str(path))


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_the_error_names_the_extra(missing, tmp_path, monkeypatch):
    path = write(tmp_path / "small.gguf")
    monkeypatch.setattr("cohort.policy.gguf.find_spec", lambda name: None if name == missing else name)
    with pytest.raises(ModelError, match=rf"needs {missing} to be read: pip install 'cohort-rl\[gguf\]'"):
        load_tokenizer(str(path))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COHORT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be kept as a folder in .*set COHORT_CACHE"):
        load_tokenizer(str(write(tmp_path / "small.gguf")))


def test_a_folder_of_files_names_one(tmp_path):
    (tmp_path / "b.gguf").touch()
    for read, lacks in ((read_config, "config.json"), (load_tokenizer, "tokenizer")):
        with pytest.raises(ModelError, match=f"holds no {lacks}.*; to use b.gguf in it, give the path of that file"):
            read(str(tmp_path))


def test_a_trl_script_names_the_file(tmp_path):
    """In a folder; the tokenizer is the one inside."""
    from cohort import trl

    model = small()
    write(tmp_path / "small.gguf", model)
    args = trl.GRPOConfig(
        str(tmp_path / "out"),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        model_init_kwargs={"gguf_file": "small.gguf"},
    )
    made = trl.GRPOTrainer(str(tmp_path), lambda completions, **_: [0.0] * len(completions), args, [{"prompt": "a  3"}])
    assert made.processing_class.tokenize("a  34") == ["a", "ĠĠ", "3", "4"]
    torch.testing.assert_close(made.model.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)
