"""The description of a run at its start."""

from __future__ import annotations

from cohort.config import Schedule
from cohort.data import DataCursor, PromptLoader
from cohort.objective import explain
from cohort.policy import Policy
from cohort.rewards import RewardRunner
from cohort.rollout import LocalEngine, Sampling, ServedEngine
from cohort.rollout.checks import describe_end_tokens
from cohort.terminal import output_outlasted
from cohort.types import Prompt


@output_outlasted()
def announce(*paragraphs: str) -> None:
    """Print and flush, so that the text is there if something fails later."""
    for paragraph in paragraphs:
        print(paragraph, flush=True)


def describe_run(
    policy: Policy,
    engine: LocalEngine | ServedEngine,
    budget: str,
    prompts: PromptLoader,
    rewards: RewardRunner,
    schedule: Schedule,
) -> str:
    """The run in words: model, numerics, sampling, end tokens, first prompt, rewards, objective, schedule."""
    parameters = list(policy.model.parameters())
    count, trained = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
    share = "" if trained == count else f"{trained:,} of {count:,} parameters; "
    config, optim = schedule.config, schedule.config.optim
    sampling = Sampling.of(config.rollout)
    replayed = f", {'' if config.rollout.replay_sampling else 'not '}replayed in the update" * sampling.reweights
    warmup = f", {optim.warmup_of(schedule.updates)} updates of warm-up" if optim.warmup_steps else ""
    clipped = f"gradient norm clipped to {optim.max_grad_norm:g}" if optim.max_grad_norm else "gradients not clipped"
    return "\n".join(
        [
            engine.describe_model(),
            f"sampling: {sampling.describe()}{replayed}",
            describe_end_tokens(engine.tokenizer, engine.end_token_ids),
            *prompts.describe(),
            describe_prompt(prompts.fetch(DataCursor(), 1)[0]),
            rewards.describe(),
            explain(schedule.objective),
            f"update: {share}{policy.passes.description}; {budget}",
            f"optimizer: {optim.optimizer}, learning rate {optim.learning_rate:g} ({optim.lr_scheduler_type}{warmup}), "
            f"{clipped}",
            schedule.describe(),
            f"seed: {config.run.seed}",
        ]
    )


def describe_prompt(prompt: Prompt) -> str:
    """A prompt as the model reads it, line by line, and its prefill."""
    row = f"row {prompt.row_index}{f' of {prompt.source}' if prompt.source else ''}"
    lines = [f"first prompt ({row}, {len(prompt.token_ids):,} tokens), as the model reads it:"]
    lines += [f"  | {line}" for line in prompt.text.split("\n")]
    if prompt.prefill:
        lines.append(f"  it ends with the beginning of the answer: {prompt.prefill!r}")
    return "\n".join(lines)
