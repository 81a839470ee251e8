"""A model that a command was given, checked before its weights are loaded: for ``cohort eval`` and ``generate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cohort.config import DataConfig, GRPOConfig, LoraConfig, ModelConfig
from cohort.data.render import use_template
from cohort.environments import Acting
from cohort.environments.episode import TurnFormat
from cohort.policy import end_token_ids, load_policy, load_tokenizer, read_config
from cohort.rollout import EngineSetup, LocalEngine, Sampler, ServedEngine
from cohort.rollout.setup import with_engine


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model without its weights."""

    path: str
    note: str
    """Which model of a run was chosen; empty if there was no choice."""
    loading: ModelConfig
    tokenizer: Any
    """With the chat template of the settings."""
    config: Any
    """Of the whole model."""
    acting: Acting | None
    turn_format: TurnFormat | None
    """None without tools and environments."""

    @classmethod
    def of(
        cls, path: str, note: str, loading: ModelConfig, data: DataConfig, acting: Acting | None, now: str | None = None
    ) -> ChosenModel:
        """Read a model's tokenizer and config.

        Args:
            path: the model's folder or hub id.
            note: see the class.
            loading: how the weights are loaded. Adapters and quantization are of a training, and left out.
            data: has the chat template.
            acting: the tools and environments.
            now: see ``use_template``.
        """
        remote, turn_format = loading.trust_remote_code, None
        tokenizer = load_tokenizer(path, trust_remote_code=remote)
        use_template(tokenizer, data.chat_template, data.template_time, now)
        if acting:
            ends = end_token_ids(path, tokenizer, trust_remote_code=remote)
            turn_format = acting.turn_format(tokenizer, ends, data.chat_template_kwargs)
        config = read_config(path, trust_remote_code=remote, whole=True)
        plain = {"lora": LoraConfig(), "quantization": "none", "router_aux_loss_coef": 0.0}
        return cls(path, note, loading.model_copy(update=plain), tokenizer, config, acting, turn_format)

    def engine(self, settings: GRPOConfig, longest: int) -> LocalEngine | ServedEngine:
        """The sampling engine, with the weights loaded: the one of ``rollout.engine``.

        Args:
            settings: of sampling.
            longest: tokens of the longest prompt with its completion.
        """
        config, _ = with_engine(settings.model_copy(update={"model": self.loading}), trains=False)
        setup, text = EngineSetup(config, trains=False), self.config.get_text_config()
        setup.connect(text, longest)
        policy = load_policy(self.path, self.loading, text)
        engine = setup.engine(policy, self.tokenizer)
        engine.update_weights(policy.version)
        return engine

    def sampler(self, engine: LocalEngine | ServedEngine) -> Sampler:
        """The engine or, with tools or environments, what drives it through episodes."""
        return self.acting.sampler(engine, self.turn_format) if self.acting and self.turn_format else engine
