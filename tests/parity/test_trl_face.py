"""The same arguments in TRL 1.16.0 and in ``cohort.trl``, on the same completions: the same weights after three updates,
and the same numbers in ``log_history``. What differs is named here, and in "Differences" of docs/trl.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cohort.policy import load_tokenizer

from ..conftest import DEMO_MODEL, ROOT, telling, tiny_llama
from .runs import TEXTS, Record, face_run, trl_run

WEIGHTS = 1e-5
"""Rounding alone leaves 3e-6, where the weights have moved by 2e-3 to 8e-3."""
LOGS = 1e-4
"""Of the value, or absolute below 1: both sides log float32, and TRL's policy loss is a sum that cancels."""
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "eval_runtime"} | {
    "eval_samples_per_second",
    "eval_steps_per_second",
    "total_flos",
}
"""Not compared, but neither side lacks one that the other has."""


def even(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The share of even tokens, without ties: no completion has the mean of its group."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) + 0.01 * sum(ids) for ids in completion_ids]


def length(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [len(ids) / 3 for ids in completion_ids]


def sometimes(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    return [None if len(ids) == 1 else float(ids[0] % 3) for ids in completion_ids]


def by_column(goal: Sequence[int], completion_ids: Any, **_: Any) -> list[float]:
    """Uses a column of the data; groups of some prompts are dead."""
    return [1.0 if one == 4 else float(ids[0] % 2) for ids, one in zip(completion_ids, goal, strict=True)]


@dataclass(frozen=True)
class Case:
    """A run, and the keys of its log that differ."""

    settings: dict[str, Any] = field(default_factory=dict)
    differs: frozenset[str] | set[str] = frozenset()
    rewards: Any = even
    texts: Sequence[str] = field(default_factory=lambda: TEXTS[:8])
    chat: bool = False
    lora: bool = False
    evaluation: bool = False
    in_order: bool = False


GRPO = {"loss_type": "grpo"}
TWICE = {"num_iterations": 2, "max_steps": 4, "learning_rate": 3e-3}
"""Two updates of each rollout, with ratios that leave the clip range in the second."""
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
"""The eight completions of an update in two passes."""
PARTED = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 4, "learning_rate": 3e-3}
"""Two updates of four completions from one generation."""
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 2.75, "entropy_coef_delta": 0.05}
OPTIMIZER = {"max_grad_norm": 0.1, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "adam_beta2": 0.9}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
EVALUATION_LACKS = {"eval_entropy"} | {
    f"eval_clip_ratio/{part}" for part in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
}

CASES = {
    "defaults": Case(),
    "grpo": Case(GRPO),
    "bnpo": Case({"loss_type": "bnpo"}),
    "dr_grpo": Case({"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "luspo": Case({"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.4, **TWICE}),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0, **TWICE}),
    "sapo": Case({"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.2, **TWICE}),
    "vespo": Case({"loss_type": "vespo", **TWICE}, {"vespo/phi_seq_mean"}),
    "ratio of a sequence": Case({**GRPO, "importance_sampling_level": "sequence", **TWICE}),
    "two iterations": Case({"epsilon": 0.1, "epsilon_high": 0.28, **TWICE}),
    "two-sided clip": Case({**GRPO, "delta": 1.5, **TWICE}),
    "accumulation": Case({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, {"entropy"}),
    "two updates": Case({**GRPO, **PARTED}, in_order=True),
    "larger rollout": Case(
        {"generation_batch_size": 16, "gradient_accumulation_steps": 2, "max_steps": 2}, {"entropy"}
    ),
    "scale of the batch": Case({"scale_rewards": "batch"}),
    "kl": Case({**GRPO, "beta": 0.1, **TWICE}),
    "uncorrected kl": Case({**GRPO, "beta": 0.1, "use_bias_correction_kl": False, **TWICE}),
    "moving reference": Case({"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 6}),
    "lora": Case({"beta": 0.1, "learning_rate": 3e-3}, lora=True),
    "chat": Case(chat=True),
    "two rewards": Case({"reward_weights": [1.0, 0.3]}, rewards=[even, length]),
    "normalised rewards": Case({"multi_objective_aggregation": "normalize_then_sum"}, rewards=[even, length]),
    "unscored": Case(GRPO, {"entropy"}, rewards=[sometimes]),
    "dead groups": Case({}, {"entropy"}, rewards=by_column),
    "masked": Case({"mask_truncated_completions": True}),
    "top entropy": Case({**GRPO, "top_entropy_quantile": 0.5}),
    "entropy bonus": Case({**GRPO, "entropy_coef": 0.1}),
    "adaptive entropy": Case({**GRPO, **ADAPTIVE, "max_steps": 6}),
    "off-policy mask": Case({**GRPO, "off_policy_mask_threshold": 1e-3, **TWICE}),
    "optimizer": Case({**OPTIMIZER, "temperature": 0.7, "logging_steps": 2, "max_steps": 4}),
    "epochs": Case({"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16}),
    "evaluation": Case(EVALUATION, EVALUATION_LACKS, evaluation=True),
    "rest of the log": Case({"logging_steps": 2, "logging_first_step": True}),
    "no lower bound": Case({**GRPO, "epsilon": 10.0, **TWICE}),
    "two passes in an update": Case(
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_iterations": 4, **GRPO}
        | {"max_steps": 4, "learning_rate": 3e-3}
    ),
    "everything": Case(
        {"beta": 0.05, "mask_truncated_completions": True, "reward_weights": [1.0, 0.3], "logging_steps": 2}
        | {"max_steps": 4, **ACCUMULATED},
        {"entropy", "kl"},
        rewards=[even, length],
        chat=True,
    ),
}
EVERY_TIME = ("kl", "everything")
"""Cases of the default suite; the others are slow."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("parity") / "model", tiny_llama)


def saved(path: Path, make: Any) -> str:
    """The folder of a model with the tokenizer of the demo."""
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    make(len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": None,
}


def qwen2(vocab_size: int, **ends: int) -> Any:
    """With biases, and an embedding that is also the head."""
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, tie_word_embeddings=True, **SMALL, **ends))


def gemma2(vocab_size: int, **ends: int) -> Any:
    """With a soft cap, and windows shorter than a prompt with its completion."""
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=vocab_size, head_dim=8, sliding_window=4, **SMALL, **ends))


def mixtral(vocab_size: int, **ends: int) -> Any:
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=vocab_size, num_local_experts=4, sliding_window=None, **SMALL, **ends)
    )


def gpt2(vocab_size: int, **ends: int) -> Any:
    """With a table of positions."""
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes, **off, **ends))


def run(side: Any, case: Case, model: str, folder: Path) -> Record:
    arguments: dict[str, Any] = {"in_order": case.in_order} if side is trl_run else {}
    if case.lora:
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    if case.evaluation:
        arguments["eval_dataset"] = rows_of(TEXTS[8:], chat=case.chat)
    data = rows_of(case.texts, chat=case.chat)
    return side(model, case.settings, folder, reward_funcs=case.rewards, train_dataset=data, **arguments)


def rows_of(texts: Sequence[str], *, chat: bool) -> Dataset:
    prompts = [[{"role": "user", "content": text}] if chat else text for text in texts]
    return Dataset.from_list([{"prompt": one, "goal": len(text)} for one, text in zip(prompts, texts, strict=True)])


def largest_gap(one: Record, other: Record) -> float:
    assert one.weights.keys() == other.weights.keys()
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


def differing(one: Record, other: Record) -> dict[str, list[Any]]:
    """Keys of the first's logs that differ in the other's, or that it lacks, with both values."""
    assert len(one.logs) == len(other.logs)
    found: dict[str, list[Any]] = {}
    for entry, theirs in zip(one.logs, other.logs, strict=True):
        if missing := (entry.keys() & TIMES) - theirs.keys():
            found |= {key: [] for key in missing}
        for key in entry.keys() - TIMES:
            a, b = entry[key], theirs.get(key, "missing")
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            if not (math.isclose(a, b, rel_tol=LOGS, abs_tol=LOGS) if numbers else a == b):
                found.setdefault(key, []).append((a, b))
    return found


@pytest.mark.parametrize("name", telling(CASES, *EVERY_TIME))
def test_weights_and_logs(name, model, tmp_path):
    case = CASES[name]
    theirs, ours = run(trl_run, case, model, tmp_path / "trl"), run(face_run, case, model, tmp_path / "face")
    assert ours.sampled == theirs.sampled
    assert largest_gap(ours, theirs) < WEIGHTS
    found = differing(theirs, ours)
    assert set(found) == case.differs, found


EQUAL_LENGTHS = [text for text in TEXTS if len(text) == 4]
FAMILIES = {
    "qwen2": (qwen2, Case({"weight_decay": 0.1, **CASES["kl"].settings})),
    "gemma2": (gemma2, CASES["kl"]),
    "mixtral": (mixtral, Case({"router_aux_loss_coef": 0.0, **CASES["kl"].settings})),
    "gpt2": (gpt2, Case(CASES["kl"].settings, texts=EQUAL_LENGTHS)),
}
FAMILIES_DIFFER = {"mixtral": CASES["kl"], "gpt2": CASES["kl"]}
"""What the load-balancing loss counts, and positions beside padding."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    make, case = FAMILIES[name]
    torch.manual_seed(0)
    model = saved(tmp_path / "model", make)
    theirs, ours = run(trl_run, case, model, tmp_path / "trl"), run(face_run, case, model, tmp_path / "face")
    assert largest_gap(ours, theirs) < WEIGHTS
    found = differing(theirs, ours)
    assert set(found) == case.differs, found
    if name in FAMILIES_DIFFER:
        case = FAMILIES_DIFFER[name]
        theirs, ours = run(trl_run, case, model, tmp_path / "trl 2"), run(face_run, case, model, tmp_path / "face 2")
        assert largest_gap(ours, theirs) > 10 * WEIGHTS


def test_documentation():
    page = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")
    page = page[page.index("## Differences") : page.index("## All arguments")]
    assert f"For {len(CASES)} configurations" in page
    for key in {key for case in CASES.values() for key in case.differs}:
        assert f"`{key}`" in page or f"`{key.rpartition('/')[0]}/...`" in page, key


GENERATIONS = {"generation_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 2}
"""An update of two generations."""
TOGETHER = {"per_device_train_batch_size": 16, "max_steps": 2}
"""The same completions as one generation."""
DIFFERENT = {
    "groups stay whole": (Case({**GRPO, **PARTED}), Case({**GRPO, **PARTED}, in_order=True)),
    "token mean of each update": (Case(PARTED, in_order=True), Case({"loss_type": "bnpo", **PARTED}, in_order=True)),
    "token mean of all generations": (Case(GENERATIONS), Case(TOGETHER)),
    "std of all generations": (
        Case({"scale_rewards": "batch", **GRPO, **GENERATIONS}),
        Case({"scale_rewards": "batch", **GRPO, **TOGETHER}),
    ),
    "bnpo": (Case({"loss_type": "bnpo", **ACCUMULATED}), Case({"loss_type": "bnpo"})),
    "entropy threshold": (
        Case({**GRPO, "top_entropy_quantile": 0.5, **ACCUMULATED}),
        Case({**GRPO, "top_entropy_quantile": 0.5}),
    ),
    "entropy bonus": (Case({**GRPO, "entropy_coef": 0.5, **ACCUMULATED}), Case({**GRPO, "entropy_coef": 0.5})),
}
"""Arguments whose weights differ, and those with which TRL has Cohort's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_differs(name, model, tmp_path):
    """What Cohort makes of the first case is what TRL makes of the second."""
    case, equal = DIFFERENT[name]
    ours = run(face_run, case, model, tmp_path / "face")
    assert largest_gap(ours, run(trl_run, case, model, tmp_path / "trl")) > 10 * WEIGHTS
    assert largest_gap(ours, run(trl_run, equal, model, tmp_path / "equal")) < WEIGHTS


def quiet_once(completion_ids: Sequence[Sequence[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Equal rewards in the second update."""
    return [0.0] * len(completion_ids) if trainer_state.global_step == 1 else even(completion_ids)


@pytest.mark.slow
def test_differs_without_a_gradient(model, tmp_path):
    """TRL's optimizer steps by its momentum; here there is no step, and the schedule stands still."""
    case = Case({"logging_steps": 1}, rewards=quiet_once)
    theirs, ours = run(trl_run, case, model, tmp_path / "trl"), run(face_run, case, model, tmp_path / "face")
    assert largest_gap(ours, theirs) > 10 * WEIGHTS
    assert [entry["grad_norm"] for entry in theirs.logs[1:2]] == [entry["grad_norm"] for entry in ours.logs[1:2]] == [0]
    rates = [[entry["learning_rate"] for entry in one.logs[:3]] for one in (theirs, ours)]
    assert rates[0] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert rates[1] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 * 2 / 3])


@pytest.mark.slow
def test_differs_in_the_warm_up(model, tmp_path):
    case = Case({"warmup_steps": 2, "lr_scheduler_type": "constant_with_warmup"})
    theirs, ours = run(trl_run, case, model, tmp_path / "trl"), run(face_run, case, model, tmp_path / "face")
    assert [entry["learning_rate"] for entry in theirs.logs[:3]] == [0.0, 5e-4, 1e-3]
    assert [entry["learning_rate"] for entry in ours.logs[:3]] == [5e-4, 1e-3, 1e-3]


@pytest.mark.slow
def test_differs_at_the_end_of_an_epoch(model, tmp_path):
    """Six prompts, four in each rollout: TRL leaves two out of each epoch. As many updates are made."""
    case = Case({"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 16}, texts=TEXTS[:6])
    theirs, ours = run(trl_run, case, model, tmp_path / "trl"), run(face_run, case, model, tmp_path / "face")
    assert sorted(theirs.sampled.values()) == [3, 3, 3, 3]
    assert sorted(ours.sampled.values()) == [2, 2, 2, 2, 2, 2]
    assert theirs.logs[-1]["step"] == ours.logs[-1]["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dapo", "cispo", "sapo", "vespo", "dr_grpo", "luspo"])
def test_the_loss_of_an_evaluation(loss, model, tmp_path):
    """In batches of one prompt."""
    clip = {"epsilon_high": 5.0} if loss == "cispo" else {}
    case = Case({**EVALUATION, "loss_type": loss, "per_device_eval_batch_size": 2, **clip}, evaluation=True)
    theirs, ours = (
        [entry["eval_loss"] for entry in run(side, case, model, tmp_path / side.__name__).logs if "eval_loss" in entry]
        for side in (trl_run, face_run)
    )
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, rel=LOGS, abs=LOGS)
