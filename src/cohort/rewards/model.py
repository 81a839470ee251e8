"""Reward models as reward functions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.contract import reward
from cohort.rewards.messages import content_text

Texts = str | list[dict[str, Any]]


@reward(per="batch", isolated=False)
class RewardModel:
    """The output of a sequence-classification model with one label, for prompt and completion.

    A text prompt and its completion are concatenated. A conversation is rendered by the chat template of the reward
    model's tokenizer, with the prefill and the completion as the last assistant message. Nothing is truncated: a
    completion that does not fit the context of the model is unscored.

    Args:
        model: a folder, a hub id, or a loaded model.
        tokenizer: the tokenizer of the model. None: the one saved with the model.
        batch_tokens: maximum number of tokens per forward pass, padding included. Affects memory only.
        device: "auto" uses CUDA if available. A loaded model is not moved.
        allow_pickled_weights: read pickled weights (pytorch_model.bin) where there are no safetensors.

    Raises:
        RewardError: the model cannot be loaded, does not have exactly one label, or has no tokenizer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        batch_tokens: int = 8192,
        device: str = "auto",
        allow_pickled_weights: bool = False,
    ) -> None:
        from cohort.policy import load_tokenizer

        if batch_tokens < 1:
            raise RewardError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.batch_tokens = batch_tokens
        name = str(model) if isinstance(model, str | Path) else str(getattr(model.config, "_name_or_path", ""))
        name = os.path.expanduser(name)  # noqa: PTH111 - Path raises for an unknown user
        self.__name__ = Path(name).name or type(model).__name__
        if tokenizer is None and not name:
            raise RewardError(
                "a reward model created in memory has no saved tokenizer: pass RewardModel(model, tokenizer)"
            )
        self.tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
        self.model = _load(name, device, allow_pickled_weights) if isinstance(model, str | Path) else model
        if (labels := getattr(self.model.config, "num_labels", None)) != 1:
            raise RewardError(f"reward model {self.__name__}: expected one label, its config has {labels}")
        self.model.eval()

    def __call__(
        self, prompts: Sequence[Texts], completions: Sequence[Texts], prefills: Sequence[str] = (), **_: Any
    ) -> list[float | Exception]:
        """One number per completion; an exception for one that does not fit the context."""
        from cohort.policy import context_length

        ids = [
            self._token_ids(*texts) for texts in zip(prompts, completions, prefills or [""] * len(prompts), strict=True)
        ]
        context = context_length(self.model.config)
        rewards: list[float | Exception] = [
            ValueError(f"prompt and completion have {len(row)} tokens, the reward model's context {context}")
            for row in ids
        ]
        for batch in self._batches([i for i, row in enumerate(ids) if context is None or len(row) <= context], ids):
            for index, number in zip(batch, self._forward([ids[i] for i in batch]), strict=True):
                rewards[index] = number
        return rewards

    def _token_ids(self, prompt: Texts, completion: Texts, prefill: str) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(f"{prompt}{completion}")["input_ids"])
        if not getattr(self.tokenizer, "chat_template", None):
            raise RewardError(f"reward model {self.__name__}: its tokenizer has no chat template for conversations")
        written = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        asked = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
        # The form of contents is that of the policy's template, and nearly all templates take strings.
        asked = [{**one, "content": content_text(one["content"])} if one.get("content") else one for one in asked]
        first = {**written[0], "content": prefill + (written[0]["content"] or "")}
        text = self.tokenizer.apply_chat_template([*asked, first, *written[1:]], tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes them

    def _batches(self, wanted: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Batches of completions of similar length; of one completion if the model has no padding token."""
        batch: list[int] = []
        for index in sorted(wanted, key=lambda i: len(ids[i])):
            full = (len(batch) + 1) * len(ids[index]) > self.batch_tokens or self.model.config.pad_token_id is None
            if batch and full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        tokens = [torch.tensor(row, dtype=torch.long, device=self.model.device) for row in rows]
        ids = pad_sequence(tokens, batch_first=True, padding_value=self.model.config.pad_token_id or 0)
        mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
        with torch.inference_mode():
            numbers: list[float] = self.model(input_ids=ids, attention_mask=mask).logits[:, 0].double().tolist()
        return numbers


def is_reward_model(value: Any) -> bool:
    """Whether a value is a loaded model, or the folder of one."""
    if isinstance(value, str | Path):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long, an unknown user, a NUL
            return (Path(value).expanduser() / "config.json").is_file()
        return False
    return hasattr(value, "config") and hasattr(value, "parameters")


def _load(name: str, device: str, allow_pickled_weights: bool) -> Any:
    """Load a sequence-classification model. Refuse one without a trained head, and one that needs code of its own."""
    from transformers import AutoModelForSequenceClassification

    from cohort.policy import check_loading, resolve_device, without_progress_bars

    safe = {} if allow_pickled_weights else {"use_safetensors": True}
    try:
        with without_progress_bars():
            remedy = "load the model yourself and pass it to RewardModel"
            check_loading(name, allow_pickled_weights=allow_pickled_weights, remedy=remedy)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, output_loading_info=True, trust_remote_code=False, **safe
            )
    except Exception as error:  # transformers raises many types
        text = str(error) or repr(error)
        pickled = "safetensors" in text and "allow_pickled_weights" not in text
        hint = "; for pickled weights, write NAME(allow_pickled_weights=True)" if pickled else ""
        raise RewardError(f"cannot load the reward model {name}: {text.splitlines()[0]}{hint}") from error
    if missing := sorted(report["missing_keys"]):
        raise RewardError(
            f"reward model {name}: the weights {', '.join(missing)} are missing; a causal language model becomes a "
            "reward model when its classification head is trained"
        )
    return model.to(resolve_device(device))
