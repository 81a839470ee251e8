"""An environment's own reward beside reward functions: the names and the weights that TRL 1.16.0 gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cohort.policy import load_tokenizer
from cohort.trl import GRPOConfig, GRPOTrainer

from ..conftest import DEMO_MODEL, tiny_llama
from .oracle import trl


class Scored:
    """Gives a reward at the end."""

    def reset(self, **_: Any) -> None:
        return None

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: the guess.

        Returns:
            What is said of it.
        """
        return word

    def get_reward(self) -> float:
        return 1.0


class Plain:
    """Gives none."""

    def reset(self, **_: Any) -> None:
        return None

    def play(self, word: str) -> str:
        """Play.

        Args:
            word: the move.

        Returns:
            What is said of it.
        """
        return word


def wordy(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(one)) for one in completions]


@pytest.mark.parametrize(
    ("factory", "functions", "weights"),
    [
        (Scored, None, None),
        (Scored, [wordy], [0.5]),
        ({"one": Scored, "same": Scored, "plain": Plain}, [wordy], None),
        ({"plain": Plain}, [wordy], None),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_names_and_weights(factory, functions, weights, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = load_tokenizer(str(DEMO_MODEL))
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    found = []
    for trainer, config in ((trl.GRPOTrainer, trl.GRPOConfig), (GRPOTrainer, GRPOConfig)):
        args = config(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            reward_weights=weights,
        )
        rows = [{"prompt": [{"role": "user", "content": "Go."}], "environment": "plain"}] * 2
        rows = trl.trainer.grpo_trainer.Dataset.from_list(rows)
        made = trainer(
            tiny_llama(vocab_size=len(tokenizer), max_position_embeddings=1024),
            list(functions or ()),
            args,
            rows,
            processing_class=tokenizer,
            environment_factory=factory,
        )
        found.append((made.reward_func_names, made.reward_weights.tolist()))
    assert found[0] == found[1]
