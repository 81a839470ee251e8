"""Whole runs of TRL 1.16.0's trainer and of ``cohort.trl`` with the same completions: the weights and logs of both.

Neither side samples. A ``Script`` gives the completions of a prompt, which depend on its tokens and on how often it has
been sampled, so both sides get the same ones in whatever order they ask. Model, data, rewards and arguments are the
same. From the rendered prompt to the optimizer's step, everything is each side's own.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cohort.rollout import EngineSetup, Sampling
from cohort.rollout.engine import samplings_of
from cohort.types import Completion, FinishReason, Group, Prompt

from .oracle import trl

TEXTS = ["1+2=", "13+4=", "7*2=", "25-8=", "6*3+1=", "9-4=", "8+7=", "3*3=", "2+2=", "40-2="]
LIMIT = 8
COMMON: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": LIMIT,
    "max_steps": 3,
    "learning_rate": 1e-3,
    # Adam divides a gradient by its own size: with 1e-8, an entry whose gradient is rounding (1e-8, where the norm is 4)
    # would move by a good part of the learning rate, in a direction of its own on each side.
    "adam_epsilon": 1e-5,
    "max_grad_norm": 1e3,  # does not clip: a clipped gradient hides a wrong factor
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "shuffle_dataset": False,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
"""Arguments of every run, for either ``GRPOConfig``."""


@dataclass(frozen=True)
class Record:
    """What a run did."""

    weights: dict[str, Tensor]
    """The trained parameters."""
    logs: list[dict[str, Any]]
    """``state.log_history``."""
    sampled: Counter[tuple[int, ...]]
    """How often each prompt was sampled, by its tokens."""


class Script:
    """Completions without a policy: of 1 to ``LIMIT`` tokens, some of them cut."""

    def __init__(self, vocabulary: int, end: int) -> None:
        self._end = end
        self._words = [token for token in range(4, vocabulary) if token != end]
        self.sampled: Counter[tuple[int, ...]] = Counter()

    def group(self, prompt_ids: Sequence[int], size: int) -> list[list[int]]:
        """The next completions of a prompt."""
        key = tuple(prompt_ids)
        draw = random.Random(repr((key, self.sampled[key])))
        self.sampled[key] += 1
        return [self._one(draw) for _ in range(size)]

    def _one(self, draw: random.Random) -> list[int]:
        length = draw.randint(1, LIMIT + 2)
        ids = draw.choices(self._words, k=min(length, LIMIT))
        return ids if length > LIMIT else [*ids[:-1], self._end]


def trained(model: Any) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


def same_adapters(model: Any) -> None:
    """Adapters that do not depend on a side's seed. Models without adapters stay as they are."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(trained(model).items()):
        if "lora_A" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) / 5)


def trl_run(
    model: Any, settings: Mapping[str, Any], folder: Path, *, in_order: bool = False, **arguments: Any
) -> Record:
    """Train with TRL's trainer.

    Args:
        model: its folder.
        settings: of ``GRPOConfig``, over ``COMMON``.
        folder: ``output_dir``.
        in_order: leave out the shuffle by which TRL divides the groups of a rollout between its updates.
        arguments: of ``GRPOTrainer``.
    """
    module = trl.trainer.grpo_trainer
    shuffle = (lambda rows: rows) if in_order else module.shuffle_sequence_dict
    with warnings.catch_warnings(), patch.object(module, "shuffle_sequence_dict", shuffle):
        warnings.simplefilter("ignore")
        args = trl.GRPOConfig(output_dir=str(folder), **COMMON | dict(settings))
        trainer = trl.GRPOTrainer(model, args=args, **arguments)
        same_adapters(trainer.model)
        script = Script(trainer.model.config.vocab_size, trainer._tokenizer.eos_token_id)

        def generate(prompt_ids: list[list[int]], images: Any, fields: Any, size: int, *_: Any) -> Any:
            return [
                ids for start in range(0, len(prompt_ids), size) for ids in script.group(prompt_ids[start], size)
            ], None

        trainer._generate_single_turn = generate
        trainer.train()
    return Record(trained(trainer.model), trainer.state.log_history, script.sampled)


def face_run(model: Any, settings: Mapping[str, Any], folder: Path, **arguments: Any) -> Record:
    """Train with ``cohort.trl``. The arguments are those of ``trl_run``."""
    from cohort.trl import GRPOConfig, GRPOTrainer

    with scripted() as made:
        args = GRPOConfig(output_dir=str(folder), **COMMON | dict(settings))
        trainer = GRPOTrainer(model, args=args, **arguments)
        trainer.train()
    ((policy, script),) = made
    return Record(trained(policy.model), trainer.state.log_history, script.sampled)


@contextmanager
def scripted() -> Iterator[list[tuple[Any, Script]]]:
    """Engines give the script's completions. The list is of the policies and scripts of the engines made."""
    real, made = EngineSetup.engine, []

    def engine(self: EngineSetup, policy: Any, tokenizer: Any) -> Any:
        same_adapters(policy.model)
        script = Script(policy.model.config.vocab_size, tokenizer.eos_token_id)
        made.append((policy, script))
        found = real(self, policy, tokenizer)
        found.generate = generator(script, policy, tokenizer)
        return found

    with patch.object(EngineSetup, "engine", engine):
        yield made


def generator(script: Script, policy: Any, tokenizer: Any) -> Callable[..., list[Group]]:
    """``Engine.generate`` with the script's completions, and the policy's log-probs of them."""

    def generate(
        prompts: Sequence[Prompt],
        size: int,
        sampling: Sampling | Sequence[Sampling],
        key: Any,
        watch: Any = None,
        samples: Sequence[Sequence[int]] | None = None,
    ) -> list[Group]:
        assert samples is None or all(len(some) == size for some in samples), "a part of a group is asked for"
        groups = []
        for index, (prompt, how) in enumerate(zip(prompts, samplings_of(prompts, size, sampling), strict=True)):
            groups.append(Group(prompt, tuple(one(prompt, how, ids) for ids in script.group(prompt.token_ids, size))))
            for sample, completion in enumerate(groups[-1].completions):
                if watch and watch.on_completion:
                    watch.on_completion(index, sample, completion)
        return groups

    @torch.no_grad()
    def one(prompt: Prompt, how: Sampling, ids: list[int]) -> Completion:
        logits = policy.model(torch.tensor([[*prompt.token_ids, *ids]])).logits[0, len(prompt.token_ids) - 1 : -1]
        logps = (logits.double() / (how.temperature or 1.0)).log_softmax(-1)[range(len(ids)), ids]
        reason = FinishReason.EOS if ids[-1] == tokenizer.eos_token_id else FinishReason.LENGTH
        text = tokenizer.decode(ids, skip_special_tokens=True)
        return Completion.of_tokens(ids, logps.tolist(), reason, text, policy.version)

    return generate
