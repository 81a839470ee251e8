"""GRPO in under 200 lines, from Cohort's pure functions and its engine, with no trainer.

    python examples/minimal_grpo.py

Trains the demo's model on column addition for 30 steps of 32 problems x 8 completions and draws the mean reward of each
step, the share of right answers. From the first five steps to the last five it rises from 0.47 to 0.95, from 0.45 to
0.95 and from 0.45 to 0.94 with the seeds 0, 1 and 2; single steps scatter about these means by 0.05. A run takes 52
seconds of one core. An installed package has this file in ``cohort/examples``.

``tests/test_minimal_example.py`` holds the parameters equal
to those of ``cohort.train.loop`` after three steps, to rounding. What the trainer adds is around this: checks, data
files, microbatches, equal completions computed once, several updates per rollout, a run folder, evaluation, resuming.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cohort.demo
from cohort.demo.task import accuracy, problems
from cohort.objective import PRESETS, Objective, coefficients, k3, outcome_advantages, token_weights
from cohort.policy import Policy, end_token_ids, load_model, load_tokenizer, resolve_device, resolve_precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.types import Completion, Message, Prompt

MODEL = str(Path(cohort.demo.__file__).parent / "model")

# The algorithm's settings.
SEED = 0
STEPS = 30
WARM_UP = 5
PROMPTS_PER_STEP = 32  # P
NUM_GENERATIONS = 8  # G
TEMPERATURE = 1.0
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
OBJECTIVE: Objective = PRESETS["default"].replace(beta=0.01)


def make_prompts(tokenizer: Any, rows: Sequence[dict[str, str]]) -> list[Prompt]:
    """Rows to prompts, through the chat template. Each prompt's uid names its group."""
    prompts = []
    for uid, row in enumerate(rows):
        messages: list[Message] = [{"role": "user", "content": row["question"]}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        ids = tuple(encoded["input_ids"])
        prompts.append(Prompt(uid, uid, ids, tokenizer.decode(ids), messages, row))
    return prompts


def completion_logps(policy: Policy, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor:
    """Log pi(token) of every completion token, flat, shape [N]."""
    prompt_ids = [prompt.token_ids for prompt in prompts]
    completion_ids = [completion.token_ids.tolist() for completion in completions]
    return policy.logps(prompt_ids, completion_ids, TEMPERATURE).logps_N


def train_step(
    step: int,
    prompts_P: Sequence[Prompt],
    policy: Policy,
    reference: Policy,
    engine: LocalEngine,
    optimizer: torch.optim.Optimizer,
) -> dict[str, float]:
    """One step of GRPO with one update per rollout."""
    # 1. Sample a group of G completions per prompt, with the current weights.
    sampling = Sampling(max_completion_length=96, temperature=TEMPERATURE)
    groups = engine.generate(prompts_P, NUM_GENERATIONS, sampling, RNGKey(SEED, step))

    # 2. Score every completion.
    completions_S = [completion for group in groups for completion in group.completions]
    prompts_S = [group.prompt for group in groups for _ in group.completions]
    answers = [prompt.columns["answer"] for prompt in prompts_S]
    rewards_S = torch.tensor(accuracy([c.text for c in completions_S], answers), dtype=torch.float64)

    # 3. Compare each completion with the others of its group. Equal rewards: advantage 0.
    group_S = torch.arange(len(groups)).repeat_interleave(NUM_GENERATIONS)
    advantages_S = outcome_advantages(rewards_S, group_S, baseline=OBJECTIVE.baseline, scale=OBJECTIVE.scale)

    # 4. Tokens: which completion each belongs to, and its weight 1/Z: mean over tokens, then over completions.
    lengths_S = torch.tensor([len(completion.token_ids) for completion in completions_S])
    sequence_N = torch.arange(len(completions_S)).repeat_interleave(lengths_S)
    weights_N = token_weights(sequence_N, len(completions_S), aggregation=OBJECTIVE.aggregation)

    # 5. Log-probs. One update uses the rollout, so the old policy is the current one and needs no pass of its own.
    with torch.no_grad():
        ref_logps_N = completion_logps(reference, prompts_S, completions_S)
    optimizer.zero_grad()
    with policy.training(), policy.gradients_in_place():
        logps_N = completion_logps(policy, prompts_S, completions_S)

        # 6. The gradient: each token's score times its coefficient. The scalar below has that gradient and no meaning.
        c_N = coefficients(
            OBJECTIVE,
            logps_N.detach(),
            advantages_S[sequence_N],
            weights_N,
            ref_logps_N=ref_logps_N,
        ).total_N
        torch.sum(-c_N * logps_N).backward()

    # 7. Step.
    grad_norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    policy.version += 1
    return {
        "reward": float(rewards_S.mean()),
        "kl": float(k3(logps_N.detach(), ref_logps_N).mean()),
        "grad_norm": float(grad_norm),
    }


def build(model_path: str = MODEL) -> tuple[Policy, Policy, LocalEngine, torch.optim.Optimizer, Any]:
    """Policy, reference, engine, optimizer, tokenizer."""
    device = resolve_device("cpu")
    precision = resolve_precision("float32", device)
    tokenizer = load_tokenizer(model_path)
    policy = Policy(load_model(model_path, precision, device), precision)
    reference = policy.copy_frozen()
    engine = LocalEngine(policy, tokenizer, end_token_ids(policy.model, tokenizer))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    return policy, reference, engine, optimizer, tokenizer


def main() -> None:
    """Train, and draw the mean reward of each step."""
    policy, reference, engine, optimizer, tokenizer = build()
    prompts = make_prompts(tokenizer, problems(STEPS * PROMPTS_PER_STEP, held_out=False, seed=SEED))
    rewards = []
    for step in range(STEPS):
        prompts_P = prompts[step * PROMPTS_PER_STEP : (step + 1) * PROMPTS_PER_STEP]
        for group in optimizer.param_groups:  # warm-up, then a line down to 0
            group["lr"] = LEARNING_RATE * min((step + 1) / WARM_UP, 1 - step / STEPS)
        result = train_step(step, prompts_P, policy, reference, engine, optimizer)
        rewards.append(result["reward"])
        bar = "#" * round(40 * result["reward"])
        print(f"step {step + 1:2}  {bar:<40}  " + "  ".join(f"{name} {value:.4f}" for name, value in result.items()))
    first, last = (torch.tensor(part) for part in (rewards[:5], rewards[-5:]))
    print(f"mean reward of the first 5 steps {first.mean():.2f}, of the last 5 {last.mean():.2f}", end="; ")
    print(f"standard deviation of single steps {torch.cat([first - first.mean(), last - last.mean()]).std():.2f}")


if __name__ == "__main__":
    main()
