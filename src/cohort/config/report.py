"""The settings of ``[report]``: output and diagnostics, and the thresholds of the diagnosis."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from cohort.config.section import Count, OneAsList, PositiveFloat, PositiveInt, Section, Share, Strings

Factor = Annotated[float, Field(gt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet"]


class ThresholdsConfig(Section):
    """When the diagnosis of a run says something (see 'cohort docs diagnosis'). A share counts as above a threshold
    when its whole confidence interval is."""

    dead_groups: Share = 0.8
    """Share of groups with equal rewards."""
    truncated: Share = 0.3
    """Share of completions cut at the length limit."""
    failed_rewards: Share = 0.01
    """Share of completions that a reward function failed on."""
    distinct: Share = 0.25
    """Different completions of a prompt over all of them; below it they are duplicates."""
    repetition: Share = 0.5
    """Share of spans of 4 tokens that occurred earlier in the completion."""
    length_change: Factor = 1.5
    """Factor by which lengths may grow or shrink without a gain in reward."""
    reward_fall: Share = 0.25
    """Fall of the mean reward from its best, over the height of the best above the lowest reward of the run."""
    drowned: Share = 0.1
    """Spread of a reward function within groups over that of the one that varies most."""
    entropy_fall: Factor = 3.0
    """Factor by which entropy may fall while prompts are left to learn."""
    entropy_rise: Factor = 2.0
    """Factor by which entropy may rise without a gain in reward."""
    update_kl_low: PositiveFloat = 1e-8
    """Size of a step, in nats per token, below which the learning rate is too low."""
    update_kl_high: PositiveFloat = 0.05
    """Size of a step, in nats per token, above which the learning rate is too high."""
    kl_per_step: PositiveFloat = 0.1
    """Growth of the KL to the reference in a step, in nats per token."""
    clipped: Share = 0.4
    """Share of tokens that the trust region silences, of those that could have a gradient."""
    gradient_tokens: PositiveFloat = 10.0
    """Effective number of tokens that the gradient comes from."""
    sampler_gap: PositiveFloat = 0.05
    """Mean difference between the log-probs of sampler and trainer, in nats per token."""


class ReportConfig(Section):
    """Output and diagnostics."""

    progress: bool = True
    """Print a description of the run at its start, progress and evaluations. Off: print nothing."""
    log_completions: bool = True
    """Write the completions of each step to rollouts/step-N.parquet, with their rewards and what the updates saw of
    each token (see 'cohort docs store'), and those of evaluations to evaluations/."""
    store_steps: PositiveInt = 1
    """Write the completions of every this many steps."""
    store_groups: Count = 0
    """Number of groups of a step to write, chosen whatever their rewards are. 0: all."""
    trackers: Annotated[tuple[Tracker, ...], Strict(False), OneAsList] = ()
    """Experiment trackers that the run is sent to, as in ["tensorboard", "wandb"]: tensorboard, wandb, mlflow, trackio,
    swanlab, comet (see 'cohort docs trackers')."""
    tracker_project: str | None = None
    """The project or experiment of the trackers. Default: what the tracker's own variable says, such as WANDB_PROJECT,
    else "cohort"."""
    skip_checks: Strings = ()
    """Checks to leave out, by their names, as in ["text"]: in `cohort doctor` and before a run (see 'cohort docs
    doctor'), and in the diagnosis of a run (see 'cohort docs diagnosis')."""
    thresholds: ThresholdsConfig = ThresholdsConfig()
    """Thresholds of the diagnosis; see below."""
    check_saved: bool = True
    """Read back the weights of the last checkpoint and of best/ after writing, and compare them bit for bit with the
    trained ones."""
    term_norms_steps: Count = 0
    """Every this many steps, measure the gradient norm of each term (policy, KL, entropy) with a separate backward pass
    over the first minibatch. 0: never."""
    update_kl_completions: Count = 8
    """Number of completions per step on which to measure how far the step moved the policy (update_kl). 0: off."""
