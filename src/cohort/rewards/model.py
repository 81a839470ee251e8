"""A trained reward model as a reward function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.kinds import reward

Texts = str | list[dict[str, Any]]


@reward(per="batch", isolated=False)
class RewardModel:
    """Rewards a completion with the one number that a sequence-classification model gives for prompt and completion.

    Text is read as it stands, prompt and completion joined; a conversation goes through the chat template of the reward
    model's own tokenizer, with the completion as the assistant's last message. What of that message stood in the prompt
    already (``prefill``) is part of it. Nothing is truncated: a completion that does not fit the model's context is
    unscored.

    Args:
        model: a folder, a hub id, or a loaded model with one label.
        tokenizer: its own tokenizer. None: the one that lies beside the model.
        batch_tokens: tokens of one pass, padding included. Memory only.
        device: "auto" is CUDA where there is one. A loaded model stays where it is.

    Raises:
        RewardError: it cannot be loaded, has not exactly one label, or has no tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, batch_tokens: int = 8192, device: str = "auto") -> None:
        if batch_tokens < 1:
            raise RewardError(f"batch_tokens must be at least 1, got {batch_tokens}")
        self.batch_tokens = batch_tokens
        name = str(model) if isinstance(model, str | Path) else str(getattr(model.config, "_name_or_path", ""))
        name = str(Path(name).expanduser()) if name.startswith("~") else name
        self.__name__ = Path(name).name or type(model).__name__
        self.tokenizer = _tokenizer(name) if tokenizer is None else tokenizer
        self.model = _load(name, device) if isinstance(model, str | Path) else model
        if (labels := getattr(self.model.config, "num_labels", None)) != 1:
            raise RewardError(f"reward model {self.__name__}: expected one label, its config has {labels}")
        self.model.eval()

    def __call__(
        self, prompts: Sequence[Texts], completions: Sequence[Texts], prefills: Sequence[str] = (), **_: Any
    ) -> list[float | Exception]:
        """One number per completion; an error for one that does not fit."""
        from cohort.policy import context_length

        texts = [
            self._text(prompt, completion, prefill)
            for prompt, completion, prefill in zip(prompts, completions, prefills or [""] * len(prompts), strict=True)
        ]
        is_chat = [not isinstance(prompt, str) for prompt in prompts]
        ids = [
            self.tokenizer(text, add_special_tokens=not chat)["input_ids"]  # a template writes them itself
            for text, chat in zip(texts, is_chat, strict=True)
        ]
        context = context_length(self.model.config)
        rewards: list[float | Exception] = [
            ValueError(f"prompt and completion have {len(row)} tokens, the reward model's context {context}")
            for row in ids
        ]
        for batch in self._batches([i for i, row in enumerate(ids) if context is None or len(row) <= context], ids):
            for index, number in zip(batch, self._pass([ids[i] for i in batch]), strict=True):
                rewards[index] = number
        return rewards

    def _text(self, prompt: Texts, completion: Texts, prefill: str) -> str:
        if isinstance(prompt, str):
            return f"{prompt}{completion}"
        if not getattr(self.tokenizer, "chat_template", None):
            raise RewardError(f"reward model {self.__name__}: its tokenizer has no chat template for conversations")
        written = completion if isinstance(completion, str) else completion[-1]["content"]
        asked = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
        answer = {"role": "assistant", "content": prefill + written}
        text: str = self.tokenizer.apply_chat_template([*asked, answer], tokenize=False)
        return text

    def _batches(self, wanted: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Completions of like length together; one at a time where the model has no token to pad with."""
        batch: list[int] = []
        for index in sorted(wanted, key=lambda i: len(ids[i])):
            full = (len(batch) + 1) * len(ids[index]) > self.batch_tokens or self.model.config.pad_token_id is None
            if batch and full:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _pass(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        width, device = max(map(len, rows)), self.model.device
        pad = self.model.config.pad_token_id or 0
        input_ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        with torch.inference_mode():
            logits = self.model(input_ids=input_ids, attention_mask=mask).logits
        numbers: list[float] = logits[:, 0].double().tolist()
        return numbers


def is_reward_model(value: Any) -> bool:
    """Whether something is a loaded model, or the folder of one."""
    if isinstance(value, str | Path):
        return (Path(value).expanduser() / "config.json").is_file()
    return hasattr(value, "config") and hasattr(value, "parameters")


def _load(name: str, device: str) -> Any:
    """A sequence-classification model with a head that was trained."""
    from transformers import AutoModelForSequenceClassification

    from cohort.policy import resolve_device, without_progress_bars

    try:
        with without_progress_bars():
            model, report = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True)
    except Exception as error:  # missing, offline, no such class: many kinds
        raise RewardError(
            f"cannot load the reward model {name}: {(str(error) or repr(error)).splitlines()[0]}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise RewardError(
            f"reward model {name}: the weights {', '.join(missing)} are not in it; a causal language model is no "
            "reward model until its head is trained"
        )
    return model.to(resolve_device(device))


def _tokenizer(name: str) -> Any:
    from cohort.policy import load_tokenizer

    if not name:
        raise RewardError(
            "a reward model built in memory has no tokenizer of its own: pass RewardModel(model, tokenizer)"
        )
    return load_tokenizer(name)
