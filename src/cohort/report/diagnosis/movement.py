"""Checks of how the policy moves: entropy, KL, the measured size of an update, clipping, and updates without effect."""

from __future__ import annotations

from statistics import median

from cohort.report.diagnosis.case import RECENT, Case, mean, number, share_interval
from cohort.report.diagnosis.finding import Level, Verdict, clipped_share

FEWEST_STEPS = 5
CERTAIN = 4.0
MIN_RISE = 0.5
"""Nats that entropy has to rise to be called an explosion: from 0.02 to 0.06 it only has more room."""
STUCK = 0.15
"""Share of groups of wrong, or of equal, completions from which a collapse of the entropy does harm."""
WORSE = 10.0
"""Factor over a threshold of ``update_kl`` or of the KL's speed from which the run is about to be lost: an alarm."""
MOST_CLIPPED = 0.8
NARROW = 0.01
"""A trust region that ends this close to 1 is meant to clip often, as GSPO's."""
MANY_TOKENS = 500
STALE_STEPS = 3
DESTROYS = 1.0
"""Nats per token: a step that moves the policy by more is an alarm by itself."""


def entropy_collapse(case: Case) -> Verdict | None:
    """Entropy that has fallen far while there was still something to find."""
    before, after, certainty = case.since_start("entropy", 5)
    if before is None or after is None or certainty > -CERTAIN or after * case.limits.entropy_fall > before:
        return None
    right, wrong = case.ends_of_dead()
    stuck = max(wrong, case.share("groups/identical_share")[0] - right)
    if case.rising() or share_interval(stuck * case.groups(), case.groups())[0] < STUCK:
        return None
    factor = before / after if after else float("inf")
    return Verdict(
        Level.ALARM if factor > case.limits.entropy_fall**2 else Level.WARNING,
        f"entropy fell from {before:.2g} to {after:.2g} nats and the reward no longer rises: the policy has stopped "
        f"trying other answers, and {stuck:.0%} of groups are all wrong or all the same",
        ("raise objective.epsilon_high (0.28), " if case.facts.updates > 1 else "")
        + "add an entropy bonus (objective.entropy), raise rollout.temperature, or start again from an earlier "
        "checkpoint (RUN/checkpoints/step-N as model.path) with a lower optim.learning_rate",
        {"entropy_before": before, "entropy": after, "stuck_share": stuck},
    )


def entropy_explosion(case: Case) -> Verdict | None:
    """Entropy that has risen far without a gain in reward."""
    before, after, certainty = case.since_start("entropy", 5)
    if before is None or after is None or certainty < CERTAIN or case.risen("entropy"):
        return None
    limit = case.limits.entropy_rise
    if after < before * limit or after - before < MIN_RISE:
        return None
    return Verdict(
        Level.ALARM if after > before * limit**2 else Level.WARNING,
        f"entropy rose from {before:.2g} to {after:.2g} nats and the reward did not: the policy drifts "
        "towards random text",
        "lower optim.learning_rate or the entropy bonus; set objective.beta above 0; check that wrong completions do "
        "not outweigh right ones (length/mean_negative, objective.sign_weights)",
        {"entropy_before": before, "entropy": after},
    )


def reward_falls(case: Case) -> Verdict | None:
    """A reward that is well below what it was."""
    best, now = case.best, case.mean("reward/mean", RECENT)
    if best is None or now is None or not case.fallen(case.limits.reward_fall):
        return None
    high, step = mean(best.rewards) or 0.0, best.step
    return Verdict(
        Level.ALARM,
        f"the mean reward fell from {high:.2f} (the {RECENT} steps up to step {step}) to {now:.2f} (the last {RECENT})",
        f"start again from a checkpoint of about step {step} (RUN/checkpoints/step-{step} as model.path) with a lower "
        "optim.learning_rate, or objective.beta above 0. If the later prompts are harder, compare evaluations instead",
        {"reward_best": high, "best_step": step, "reward": now},
    )


def kl_fast(case: Case) -> Verdict | None:
    """A KL to the reference that grows fast."""
    values = case.values("kl/k3", 10)
    if len(values) < 10:
        return None
    before, after = mean(values[:5]) or 0.0, mean(values[5:]) or 0.0
    speed, limit = (after - before) / 5, case.limits.kl_per_step
    if min(values[5:]) < max(values[:5]) or speed < limit:
        return None
    return Verdict(
        Level.ALARM if speed > WORSE * limit else Level.WARNING,
        f"the KL to the reference grows by {speed:.2g} nats per token and step (now {values[-1]:.2g}): the policy "
        "moves away from the reference very fast",
        "lower optim.learning_rate, or raise objective.beta",
        {"kl_per_step": speed, "kl": values[-1]},
    )


def learning_rate_high(case: Case) -> Verdict | None:
    """Updates that move the policy too far: a single step, or most."""
    worst = max(case.recent(), key=lambda one: number(one, "update_kl") or 0.0)
    if (size := number(worst, "update_kl") or 0.0) > DESTROYS:
        return Verdict(
            Level.ALARM,
            f"step {worst.get('step')} moved the policy by {size:.2g} nats per token (update_kl): that destroys most "
            "of what a model knows",
            "start again with a tenth of optim.learning_rate",
            {"update_kl": size, "learning_rate": number(worst, "learning_rate")},
        )
    values = case.values("update_kl", RECENT)
    if len(values) < FEWEST_STEPS or (size := median(values)) <= case.limits.update_kl_high:
        return None
    return Verdict(
        Level.ALARM if size > WORSE * case.limits.update_kl_high else Level.WARNING,
        f"a step moves the policy by {size:.2g} nats per token (update_kl, median of {len(values)} steps): more than "
        "the clip assumes",
        "lower optim.learning_rate to a third, or make fewer updates per rollout",
        {"update_kl": size, "learning_rate": number(case.now, "learning_rate")},
    )


def learning_rate_low(case: Case) -> Verdict | None:
    """Updates that hardly move the policy although there is a gradient."""
    steps = case.recent(RECENT)
    values = [number(one, "update_kl") for one in steps if _steps_made(one) and _full_rate(case, one)]
    known = [value for value in values if value is not None]
    if len(known) < RECENT or max(known) >= case.limits.update_kl_low:
        return None
    size, rate = median(known), number(case.now, "learning_rate")
    still = max(known) == 0
    return Verdict(
        Level.ALARM if still else Level.WARNING,
        f"there is a gradient (norm {number(case.now, 'grad_norm') or 0:.2g}), but a step moves the policy by only "
        f"{size:.1g} nats per token (update_kl): "
        + (
            "no weight changes in the precision it has"
            if still
            else f"the learning rate of {rate or 0:.1g} is too small"
        ),
        "raise optim.learning_rate tenfold; adapters need about ten times the rate of full weights",
        {"update_kl": size, "learning_rate": rate},
    )


def stale_logps(case: Case) -> Verdict | None:
    """Ratios of exactly 1 where the policy has moved between the updates of a rollout."""
    steps = case.recent(STALE_STEPS)
    if len(steps) < STALE_STEPS or case.facts.updates < 2 or case.facts.objective.ratio_anchor == "self":
        return None
    for one in steps:
        ends = [number(one, f"ratio/log_{end}") for end in ("min", "max")]
        if ends != [0.0, 0.0] or _steps_made(one) < 2 or (number(one, "update_kl") or 0.0) <= case.limits.update_kl_low:
            return None
    return Verdict(
        Level.ALARM,
        f"every ratio is exactly 1 and the clip never acts, although each rollout has {case.facts.updates} updates and "
        f"the policy moves (update_kl {number(case.now, 'update_kl'):.2g}): the old log-probs are not those from "
        "before the updates",
        "compute old log-probs once, before the first update of a rollout. With a loop of your own, do not "
        "recompute them per update; see 'When log-probs are computed' in 'cohort docs grpo'",
        {"update_kl": number(case.now, "update_kl"), "updates": case.facts.updates},
    )


def clipped(case: Case) -> Verdict | None:
    """Tokens that the trust region silences."""
    known = [share for one in case.recent(FEWEST_STEPS) if (share := clipped_share(one)) is not None]
    if len(known) < FEWEST_STEPS:
        return None
    share, limit = mean(known) or 0.0, case.limits.clipped
    rule = case.facts.objective.trust_region
    if abs((getattr(rule, "high", None) or 2.0) - 1) < NARROW:
        limit = max(limit, MOST_CLIPPED)
    if min(known) <= limit:
        return None
    return Verdict(
        Level.ALARM if min(known) > max(limit, MOST_CLIPPED) else Level.WARNING,
        f"the trust region silences {share:.0%} of the tokens that could have a gradient: the later updates of a "
        "rollout do little",
        "lower optim.learning_rate, or make fewer updates per rollout (objective.num_iterations, "
        "objective.minibatches)",
        {"clipped_share": share},
    )


def few_tokens(case: Case) -> Verdict | None:
    """A gradient that hangs on a few tokens."""
    values, tokens = case.values("gradient/effective_tokens", RECENT), case.mean("tokens", RECENT) or 0.0
    alive = [value for value in values if value > 0]
    if len(alive) < FEWEST_STEPS or tokens < MANY_TOKENS or (count := median(alive)) >= case.limits.gradient_tokens:
        return None
    live = (1 - (case.mean("groups/dead_share", RECENT) or 0.0)) * case.groups() / len(case.recent(RECENT))
    if count >= live:  # few groups are left to learn from, and each of them has its tokens
        return None
    return Verdict(
        Level.WARNING,
        f"the gradient comes from about {count:.0f} of {tokens:,.0f} tokens (gradient/effective_tokens): each "
        "step depends on a few sampled tokens",
        "raise rollout.prompts_per_step; set objective.scale 'none' if rare rewards are scaled up; cap the ratio "
        "(objective.trust_region), or add a mismatch weight",
        {"effective_tokens": count, "tokens": tokens},
    )


def nonfinite(case: Case) -> Verdict | None:
    """Updates that were skipped because a value was NaN or infinite."""
    steps = case.recent(RECENT)
    skipped = sum(number(one, "updates_nonfinite") or 0 for one in steps)
    made = sum(number(one, "updates") or 0 for one in steps)
    if not skipped:
        return None
    return Verdict(
        Level.ALARM if skipped >= made else Level.WARNING,
        f"{skipped:.0f} of the last {skipped + made:.0f} updates were skipped, because a value was NaN or infinite",
        "lower optim.learning_rate; set model.precision to 'float32'. The batch is in nonfinite/ of the run folder",
        {"skipped": skipped, "updates": made},
    )


def _steps_made(metrics: object) -> float:
    """Updates of a step that had a gradient."""
    updates, skipped = (number(metrics, key) or 0.0 for key in ("updates", "updates_skipped"))  # type: ignore[arg-type]
    return updates - skipped


def _full_rate(case: Case, metrics: object) -> bool:
    """Whether warm-up is over and decay has not begun to end the run."""
    rate = number(metrics, "learning_rate")  # type: ignore[arg-type]
    return rate is not None and rate >= 0.5 * case.facts.learning_rate
