"""TRL's log: from Cohort's metrics of rollouts and updates to the keys of ``state.log_history``.

TRL logs every ``logging_steps`` updates. A number of a rollout (``reward``, ``completions/...``) belongs to the
rollout's first update, and an entry has the mean over the rollouts that began in its window; without any, it lacks the
key. A number of an update (``kl``, ``entropy``, ``clip_ratio/...``) is averaged over the updates of the window.
``grad_norm`` and ``learning_rate`` are those of the last update. docs/trl.md lists what is not as in TRL 1.16.0.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import TrainerCallback

from cohort.callbacks import ScoredRollout
from cohort.config import GRPOConfig
from cohort.evaluation import Evaluation
from cohort.objective import Objective, next_entropy_coefficient
from cohort.objective.aggregation import token_weights
from cohort.objective.credit import Outcomes, completion_advantages
from cohort.presets.parts import BatchStd
from cohort.presets.trust_regions import SAPO, Cap, PPOClip
from cohort.report.words import clean
from cohort.types import FinishReason

Numbers = Mapping[str, float | None]

OF_TRANSFORMERS = ("loss", "grad_norm", "learning_rate")
"""Keys that an entry begins with. What is left of a window at the end of a run is logged without them."""
NOT_LOGGED = ("step", "time")
"""Metrics of a rollout that do not stand beside TRL's keys: their means mean nothing."""


class Window:
    """The numbers since the last entry of the log.

    Args:
        config: Cohort's settings.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self._generations, self._objective = config.rollout.num_generations, config.resolved_objective
        self._served = config.rollout.engine != "local" and bool(self._objective.mismatch)
        self._router, bonus = config.model.router_aux_loss_coef, self._objective.entropy
        self.entropy_coef = bonus.coefficient if bonus else 0.0
        self._entropy: float | None = None
        self.num_tokens = 0
        """Tokens of all rollouts, each completion with its prompt."""
        self.total_loss, self.updates = 0.0, 0
        """Sum of the losses of all updates and their number: ``TrainOutput.training_loss`` is the mean."""
        self.own: set[str] = set()
        """Cohort's keys among those that were logged."""
        self._step_time: float | None = None
        self._of_rollouts: list[dict[str, float | None]] = []
        self._own: list[Numbers] = []
        self._of_updates: list[dict[str, float | None]] = []

    def add(self, update: Numbers, rollout: Numbers | None = None) -> None:
        """Add an update.

        Args:
            update: its metrics, an item of ``GRPOTrainer.last_updates``; empty if it was skipped because a value was
                not finite.
            rollout: the metrics of the rollout whose first update it is, ``GRPOTrainer.last_metrics``.
        """
        if rollout is not None:
            self.num_tokens += int(rollout["rollout/tokens"] or 0)
            updates = (rollout["updates"] or 0) + (rollout["updates_nonfinite"] or 0)
            self._step_time = (rollout["seconds/step"] or 0.0) / max(1, updates)
            self._of_rollouts.append(rollout_keys(rollout, self._objective, self._generations, served=self._served))
            beside = (key for key in rollout if key not in NOT_LOGGED and not key.startswith("eval/"))
            self._own.append({key: rollout[key] for key in beside})
        found = update_keys(update, self._objective, self._router)
        if found and self._objective.entropy:
            found["entropy_coef"] = self._next_entropy_coef(update)
        self.total_loss += found.get("loss") or 0.0
        self.updates += 1
        self._of_updates.append(found | {"step_time": self._step_time})

    def _next_entropy_coef(self, update: Numbers) -> float:
        """The coefficient after an update, which TRL logs; the update may have applied none (``entropy_coefficient``).
        See ``cohort.train.parts.Adaptive``."""
        bonus = self._objective.entropy
        self._entropy = update.get("entropy", self._entropy)
        if bonus is not None and self._entropy is not None:
            self.entropy_coef = next_entropy_coefficient(bonus, self.entropy_coef, self._entropy)
        return self.entropy_coef

    def without_own(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of the log, of training or evaluation, without Cohort's own keys: with TRL's and the script's."""
        return {key: value for key, value in entry.items() if key not in self.own}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in types of JSON."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for name in _STATE:
            setattr(self, name, copy.deepcopy(state[name]))

    def entry(self) -> dict[str, float | None]:
        """TRL's keys since the last entry, with Cohort's own of the rollouts that began since, and start a new window.
        A key without a number is left out. The caller adds ``epoch`` and ``step``."""
        means = _means(self._of_rollouts) | _means(self._of_updates)
        if self._own:
            means["num_tokens"] = self.num_tokens
        own = {key: value for key, value in _means(self._own).items() if key not in means}
        self.own |= own.keys()
        last = self._of_updates[-1] if self._of_updates else {}
        means |= own | {key: last[key] for key in ("grad_norm", "learning_rate") if key in last}
        means = numbers(means)
        first = [key for key in OF_TRANSFORMERS if key in means]
        self._own, self._of_rollouts, self._of_updates = [], [], []
        return {key: means[key] for key in [*first, *(key for key in means if key not in first)]}


def rollout_keys(
    metrics: Numbers, objective: Objective, num_generations: int, *, served: bool = False
) -> dict[str, float | None]:
    """TRL's keys of a rollout. Standard deviations are divided by n - 1, as there.

    Args:
        metrics: the metrics of the rollout's step.
        objective: the objective.
        num_generations: completions per prompt.
        served: whether servers sampled and a mismatch rule corrects for it.
    """
    completions = int(metrics["groups/sampled"] or 0) * num_generations
    scored = completions - int(metrics["reward/unscored"] or 0)
    found = _length_keys(metrics)
    for name in _reward_names(metrics):
        own = round(completions * (1 - (metrics[f"rewards/{name}/unscored_share"] or 0.0)))
        found[f"rewards/{name}/mean"] = metrics[f"rewards/{name}"]
        found[f"rewards/{name}/std"] = unbiased(metrics[f"rewards/{name}/std"], own)
    found["reward"] = metrics["reward/mean"]
    found["reward_std"] = unbiased(metrics["reward/std"], scored)
    found["frac_reward_zero_std"] = zero_std_share(metrics, objective)
    if "episodes/calls" in metrics:
        found["tools/call_frequency"] = metrics["episodes/calls"]
        found["tools/failure_frequency"] = metrics["episodes/failed_call_share"]
    if served:
        found["sampling/sampling_logp_difference/mean"] = metrics.get("sampler/gap")
        found["sampling/sampling_logp_difference/max"] = metrics.get("sampler/max_gap")
    return found | {key.removeprefix("custom/"): value for key, value in metrics.items() if key.startswith("custom/")}


def update_keys(metrics: Numbers, objective: Objective, router_coef: float = 0.0) -> dict[str, float | None]:
    """TRL's keys of an update. ``loss`` is what TRL minimises: the negative value of the policy term, plus beta times
    the KL, minus the entropy bonus, plus ``router_coef`` times the load-balancing loss; 0 if no completion has an
    advantage."""
    if not metrics:
        return {}
    policy = -(metrics.get("policy_value") or 0.0) + objective.beta * (metrics.get("kl_value_weighted") or 0.0)
    router_loss = metrics.get("router_loss")
    found: dict[str, float | None] = {"loss": policy + router_coef * (router_loss or 0.0)}
    if objective.entropy:
        bonus = (metrics["entropy_coefficient"] or 0.0) * (metrics.get("entropy") or 0.0)
        found |= {"loss": (found["loss"] or 0.0) - bonus, "policy_loss": policy}
    if router_loss is not None:
        found["aux_loss"] = router_loss
    if objective.beta:
        found["kl"] = metrics.get("kl/k3_weighted")
    found["entropy"] = metrics.get("entropy")
    low, high = metrics.get("clip/low_share", 0.0) or 0.0, metrics.get("clip/high_share", 0.0) or 0.0
    if isinstance(objective.trust_region, PPOClip):
        found |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        found["clip_ratio/low_min"] = metrics.get("clip/low_min", 0.0)
        found["clip_ratio/high_max"] = metrics.get("clip/high_max", 0.0)
    elif isinstance(objective.trust_region, Cap):
        found["cispo_clip_ratio"] = high
    return found | {key: metrics[key] for key in ("grad_norm", "learning_rate")}


def evaluation_keys(metrics: Numbers, name: str = "", num_tokens: int = 0) -> dict[str, float | None]:
    """TRL's keys of an evaluation: those that need no pass of the loss.

    Args:
        metrics: the metrics of the evaluation: ``eval/...``, or ``eval/NAME/...`` of a named set.
        name: the set's name; its keys are ``eval_NAME_...``. "": there is one set.
        num_tokens: ``state.num_input_tokens_seen``: tokens of training so far.
    """
    before, after = (f"eval/{name}/", f"eval_{name}_") if name else ("eval/", "eval_")
    found = {key.removeprefix(before): value for key, value in metrics.items() if key.startswith(before)}
    keys = _length_keys(found)
    for key, value in found.items():
        if key.startswith("rewards/") and key.endswith("/mean"):
            keys |= {key: value, **_std(found, key.removesuffix("/mean"))}
    keys |= {"reward": found["reward/mean"], "reward_std": _std(found, "reward")["reward/std"]}
    keys |= {"frac_reward_zero_std": found["reward/dead_share"], "num_tokens": num_tokens}
    keys |= {key.removeprefix("custom/"): value for key, value in found.items() if key.startswith("custom/")}
    return {f"{after}{key}": value for key, value in keys.items()}


def _length_keys(metrics: Numbers) -> dict[str, float | None]:
    """TRL's keys of lengths, of training or of an evaluation."""
    ended = metrics["length/ended_share"]
    return {
        **{f"completions/{part}_length": metrics[f"length/{part}"] for part in _LENGTHS},
        "completions/clipped_ratio": None if ended is None else 1 - ended,
        **{f"completions/{part}_terminated_length": metrics[f"length/ended_{part}"] or 0.0 for part in _LENGTHS},
    }


def _std(metrics: Numbers, of: str) -> dict[str, float | None]:
    """The standard deviation of an evaluation's rewards, divided by n - 1."""
    return {f"{of}/std": unbiased(metrics[f"{of}/std"], int(metrics[f"{of}/scored"] or 0))}


def numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a finite number.

    >>> numbers({"entropy": None, "kl": float("nan"), "reward": 0.5})
    {'reward': 0.5}
    """
    return {key: value for key, value in entry.items() if value is not None and math.isfinite(value)}


def unbiased(std: float | None, count: int) -> float | None:
    """The standard deviation divided by n - 1, from that divided by n; None for fewer than two numbers.

    >>> unbiased(0.5, 2)
    0.7071067811865476
    """
    return None if std is None or count < 2 else std * math.sqrt(count / (count - 1))


def zero_std_share(metrics: Numbers, objective: Objective) -> float | None:
    """Share of completions in groups of two or more scored completions with a standard deviation of 0; 0 or 1 where all
    are divided by that of the batch."""
    if objective.reward_aggregation == "normalize_sum_normalize":
        dead = [metrics[f"rewards/{name}/dead_share"] for name in _reward_names(metrics)]
        return float(all(share == 1 for share in dead))
    if isinstance(objective.scale, BatchStd):
        return float((metrics["reward/std"] or 0.0) <= 1e-8)  # torch.isclose, as in TRL
    return (metrics["groups/dead_share"] or 0.0) - (metrics["groups/unscored_share"] or 0.0)


_STATE = (
    *("num_tokens", "total_loss", "updates", "_step_time", "_of_rollouts", "_own", "_of_updates"),
    *("entropy_coef", "_entropy"),
)
_LENGTHS = ("mean", "min", "max")


def _reward_names(metrics: Numbers) -> list[str]:
    end = "/unscored_share"
    return [key[len("rewards/") : -len(end)] for key in metrics if key.startswith("rewards/") and key.endswith(end)]


def _means(entries: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean of each key's values over the entries that have it, without None and NaN; None without any."""
    values: dict[str, list[float]] = {}
    for entry in entries:
        for key, value in entry.items():
            kept = values.setdefault(key, [])
            if isinstance(value, int | float) and not math.isnan(value):
                kept.append(value)
    return {key: sum(kept) / len(kept) if kept else None for key, kept in values.items()}


# ----------------------------------------
# ``eval_loss``: the loss that TRL computes of an evaluation.
#
# The policy that sampled is the one that is evaluated, so every ratio is 1, and the policy term follows from rewards,
# lengths and the sampler's log-probs. The other terms need a pass of a model over the completions, which an evaluation
# does not make: there is no ``eval_loss`` with a KL, an entropy bonus, ``top_entropy_quantile``, a load-balancing loss,
# or weights by a server's log-probs.


def evaluation_loss(evaluation: Evaluation, config: GRPOConfig, batch_size: int) -> float | None:
    """TRL's loss of an evaluated set: the mean over its batches, in the order of the rows. None where it needs a pass.

    With A the advantage of a completion in its batch, a token's loss is -A under PPO's clip; -A logp where the ratio is
    a constant weight (cispo, vespo); and -2 A / tau under SAPO's gate.

    Args:
        evaluation: the evaluation.
        config: the settings of the run.
        batch_size: completions of a batch, over all processes.
    """
    objective, size = config.resolved_objective, config.eval.num_generations_eval
    served = config.rollout.engine != "local" and bool(objective.mismatch)
    needs_pass = objective.beta or objective.entropy or objective.top_entropy < 1 or config.model.router_aux_loss_coef
    if needs_pass or served:
        return None
    step, table = max(1, batch_size // size) * size, evaluation.table
    losses = [
        _batch_loss(table.slice(first, step), config) * min(step, len(table) - first)
        for first in range(0, len(table), step)
    ]
    return sum(losses) / len(table)


def _batch_loss(table: Any, config: GRPOConfig) -> float:
    objective, size, weights = config.resolved_objective, config.eval.num_generations_eval, config.reward.weights
    logps, region = [row or [] for row in table["sampler_logps"].to_pylist()], objective.trust_region
    sequence_N = torch.repeat_interleave(torch.tensor([len(row) for row in logps]))
    names = [name for name in table.column_names if name.startswith("rewards/")]
    outcomes = Outcomes(
        _column(table, "reward"),
        torch.arange(len(logps)) // size,
        sequence_N,
        config.rollout.max_completion_length,
        torch.stack([_column(table, name) for name in names], dim=1),
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
    )
    losses_N = -completion_advantages(objective, outcomes)[sequence_N]
    if isinstance(region, SAPO):
        losses_N = losses_N * torch.where(losses_N < 0, 2 / region.tau_positive, 2 / region.tau_negative)
    elif region is not None and region.constant_weight:
        losses_N = losses_N * torch.tensor([logp for row in logps for logp in row], dtype=torch.float64)
    counted_N = None
    if objective.truncated == "mask":
        whole = [reason != FinishReason.LENGTH for reason in table["finish_reason"].to_pylist()]
        counted_N = torch.tensor(whole)[sequence_N]
    weights_N = token_weights(
        sequence_N,
        len(logps),
        aggregation=objective.aggregation,
        length=objective.aggregation_length,
        counted_N=counted_N,
    )
    return float((weights_N * losses_N).sum())


def _column(table: Any, name: str) -> Tensor:
    values = [torch.nan if value is None else value for value in table[name].to_pylist()]
    return torch.tensor(values, dtype=torch.float64)


# ----------------------------------------
# ``log_completions``: with each entry of the log, a table of the last rollout on the console and in the trackers.


log = logging.getLogger("cohort.trl")


class LastRollout:
    """A callback of Cohort that keeps the last scored rollout, and warns of completions without any reward."""

    rollout: ScoredRollout | None = None

    def on_rollout(self, _trainer: Any, rollout: ScoredRollout) -> None:
        """Keep it, and warn as TRL does."""
        self.rollout, scores = rollout, rollout.scores
        missing = scores.by_function_SK.isnan().all(dim=1).nonzero().flatten().tolist()
        completions = [(group.prompt, one) for group in rollout.groups for one in group.completions]
        for place in missing:
            prompt, completion = completions[place]
            if completion.finish_reason.usable and place not in scores.errors:
                shown = {**prompt.columns, "prompt": prompt.prompt, "completion": completion.text}
                message = "All reward functions returned None for the following kwargs: %s. It is left out of its group"
                log.warning(message, shown)
                break  # one tells what is wrong

    def columns(self) -> dict[str, Any]:
        """TRL's ``trainer._logs`` of the rollout, to be read."""
        rows = list(_rows(self.rollout)) if self.rollout else []
        scores = self.rollout.scores if self.rollout else None
        found: dict[str, Any] = {name: [row[name] for row in rows] for name in ("prompt", "completion")}
        found["advantages"] = [row["advantage"] for row in rows]
        rewards = zip(scores.names, scores.by_function_SK.T.tolist(), strict=True) if scores else ()
        return {**found, "rewards": dict(rewards), "extra": dict(scores.extras) if scores else {}, "images": []}


class CompletionTables(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Prints the completions of the last rollout, ``num_completions_to_print`` of them drawn at random, and sends all
    to wandb and trackio; with ``log_unique_prompts`` one for each prompt.

    Args:
        last: where they come from.
    """

    def __init__(self, last: LastRollout) -> None:
        self._last = last

    def on_log(self, args: Any, state: Any, _control: Any, logs: Any = None, **_more: Any) -> None:
        """Show the table, if the entry is of training."""
        if self._last.rollout is None or "reward" not in (logs or {}):
            return
        rows = list(_rows(self._last.rollout))
        limit = args.num_completions_to_print
        shown = rows if limit is None else random.Random(state.global_step).sample(rows, min(limit, len(rows)))
        Console().print(_table(shown, state.global_step))
        if args.log_unique_prompts:
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        _send(args.report_to, [{"step": state.global_step, **row} for row in rows])


def _rows(rollout: ScoredRollout) -> Iterator[dict[str, Any]]:
    """The completions with prompt, rewards, advantage of the first token (0: unused) and logged columns."""
    scores, place = rollout.scores, 0
    for group in rollout.groups:
        for completion in group.completions:
            advantages = rollout.advantages[place]
            yield {
                "prompt": _text(group.prompt.prompt),
                "completion": completion.text,
                **dict(zip(scores.names, scores.by_function_SK[place].tolist(), strict=True)),
                "advantage": advantages[0] if advantages else 0.0,
                **{name: values[place] for name, values in scores.extras.items()},
            }
            place += 1


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role'].upper()}\n{message.get('content') or ''}" for message in prompt)


def _table(rows: list[dict[str, Any]], step: int) -> Panel:
    table = Table(show_lines=True, expand=True)
    for name in rows[0] if rows else ():
        table.add_column(Text(clean(name)), justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
        table.add_row(*(Text(clean(cell)) for cell in cells))  # text of a model: no markup, no control characters
    return Panel(table, title=f"Step {step}", expand=False)


def _send(report_to: list[str], rows: list[dict[str, Any]]) -> None:
    """Send the table to trackers that the script's own callbacks have started."""
    import pandas

    for name in {"wandb", "trackio"}.intersection(report_to):
        tracker = sys.modules.get(name)
        if tracker is not None and getattr(tracker, "run", True) is not None:
            tracker.log({"completions": tracker.Table(dataframe=pandas.DataFrame(rows))})
