"""The terminal: the description of a run at its start, and its progress."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from cohort.config import Schedule
from cohort.data import DataCursor, PromptLoader
from cohort.objective import explain
from cohort.policy import Policy
from cohort.report.diagnosis import why_no_gradient
from cohort.rewards import RewardRunner
from cohort.rollout import LocalEngine, Sampling, VLLMEngine
from cohort.types import Prompt

PLAIN_LINES = 20
"""Progress lines of a whole run without a terminal."""


def announce(*paragraphs: str) -> None:
    """Print and flush, so that the text is there if something fails later."""
    for paragraph in paragraphs:
        print(paragraph, flush=True)


def describe_run(
    policy: Policy,
    engine: LocalEngine | VLLMEngine,
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
    warmup = f", {optim.warmup_steps} updates of warm-up" if optim.warmup_steps else ""
    return "\n".join(
        [
            engine.describe_model(),
            f"sampling: {sampling.describe()}{replayed}",
            engine.describe_ends(),
            *prompts.describe(),
            describe_prompt(prompts.fetch(DataCursor(), 1)[0]),
            rewards.describe(),
            explain(schedule.objective),
            f"update: {share}{policy.passes.description}; {budget}",
            f"optimizer: {optim.optimizer}, learning rate {optim.learning_rate:g} ({optim.lr_scheduler_type}{warmup}), "
            f"gradient norm clipped to {optim.max_grad_norm:g}",
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


class _Bar(Progress):
    """A progress bar above a line of metrics, which a narrow terminal can wrap without breaking the bar."""

    line = "sampling the first rollout"

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.line)


class StepDisplay:
    """A progress bar on a terminal, otherwise a line every twentieth of the run.

    Args:
        steps: steps of the whole run.
        enabled: False shows nothing.
        groups_can_die: whether a group of equal rewards teaches nothing, so that the share of dead groups is shown.
    """

    def __init__(self, steps: int, *, enabled: bool = True, groups_can_die: bool = True) -> None:
        self._steps, self._enabled, self._groups_can_die = steps, enabled, groups_can_die
        self._bar: _Bar | None = None
        self._warned = False
        if enabled and sys.stdout.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=30), TimeRemainingColumn())
            self._bar = _Bar(*columns, console=Console())
            self._task = self._bar.add_task("", total=steps)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, metrics: dict[str, Any]) -> None:
        """Show a step, its evaluation, and once a warning when a step had no gradient."""
        if not self._enabled:
            return
        step, line = metrics["step"], step_line(metrics, groups_can_die=self._groups_can_die)
        if self._bar:
            self._bar.line = line
            self._bar.update(self._task, completed=step)
        elif step == 1 or step % max(1, self._steps // PLAIN_LINES) == 0 or step == self._steps:
            print(f"step {step}/{self._steps}  {line}", flush=True)
        if metrics["updates"] == metrics["updates_skipped"] and not self._warned:
            self._warned = True
            self._print(f"step {step}: {why_no_gradient(metrics)}")
        if any(key.startswith("eval/") for key in metrics):
            self._print(evaluation_line(metrics, f"after step {step}"))

    def _print(self, text: str) -> None:
        if self._bar:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)


def evaluation_line(metrics: dict[str, Any], when: str) -> str:
    """Rewards, pass@k and maj@k of an evaluation with their intervals, set by set."""
    sets: dict[str, list[str]] = {}
    for key, mean in metrics.items():
        name, metric = split_metric(key)
        if key.startswith("eval/") and key.endswith("/mean") and metric not in ("length", "cut_share"):
            low, high = (metrics[key.removesuffix("mean") + end] for end in ("low", "high"))
            shown = f"{metric.removeprefix('rewards/')} {_number(mean)} ({_number(low)} to {_number(high)})"
            sets.setdefault(name, []).append(shown)
    found = [f"{name}: " * bool(name) + ", ".join(parts) for name, parts in sets.items()]
    return f"evaluation {when}: " + "; ".join(found)


def best_lines(summary: dict[str, Any]) -> list[str]:
    """The best model and early stopping in words; empty without either."""
    lines = []
    if best := summary.get("best"):
        value = f"{best['metric']} {_number(best['value'])}"
        lines.append(f"best: {value} after step {best['step']}, kept in {summary['output_dir']}/best")
    if summary.get("stopped_early"):
        patience = "no better evaluation within eval.early_stopping_patience"
        lines.append(f"stopped early after step {summary['steps']}: {patience}")
    return lines


def split_metric(key: str) -> tuple[str, str]:
    """Split the key of an evaluation's mean into set and metric.

    >>> split_metric("eval/reward/mean"), split_metric("eval/gsm8k/rewards/math/mean")
    (('', 'reward'), ('gsm8k', 'rewards/math'))
    """
    path = key.removeprefix("eval/").removesuffix("/mean")
    head, _, rest = path.partition("/")
    return (head, rest) if rest and head != "rewards" else ("", path)


def step_line(metrics: dict[str, Any], *, groups_can_die: bool = True) -> str:
    """One line about a step. It has no loss, whose value means nothing in GRPO."""
    parts = [f"reward {_number(metrics['reward/mean'])}"]
    functions = [key for key in metrics if key.startswith("rewards/") and key.count("/") == 1]
    parts += [f"{key.removeprefix('rewards/')} {_number(metrics[key])}" for key in functions]
    if groups_can_die:
        parts.append(f"dead groups {metrics['groups/dead_share']:.0%}")
    if metrics["groups/rounds"] > 1:
        parts.append(f"{metrics['groups/sampled']} groups sampled, {metrics['groups/left_out']} left out")
    if "episodes/turns" in metrics:
        parts.append(f"turns {metrics['episodes/turns']:.1f}")
        if metrics["episodes/calls"]:
            failed = metrics["episodes/failed_call_share"]
            parts.append(f"calls {metrics['episodes/calls']:.2f}" + (f" ({failed:.0%} failed)" if failed else ""))
        if metrics["episodes/failed"]:
            parts.append(f"{metrics['episodes/failed']} episodes failed")
    if "entropy" in metrics:
        parts.append(f"entropy {metrics['entropy']:.4f}")
    if "kl/k3" in metrics:
        parts.append(f"KL {metrics['kl/k3']:.4f}")
    parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


def _number(value: float | None) -> str:
    return "none" if value is None or math.isnan(value) else f"{value:.3f}"
