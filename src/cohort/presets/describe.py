"""An objective in plain text: its formula, term by term, with its numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from cohort.presets.objective import GROUP_BASELINES, Objective
from cohort.presets.parts import (
    FIPO,
    GMPO,
    KL,
    SAPO,
    BatchStd,
    Cap,
    Custom,
    DropDead,
    DynamicSampling,
    Gamma,
    GroupMean,
    GroupStd,
    KLMask,
    Mask,
    Mismatch,
    MismatchWeight,
    OffPolicyMask,
    PPOClip,
    TopK,
    TrustRegion,
    TVMask,
    Veto,
)
from cohort.presets.table import TABLE


def describe(objective: Objective) -> str:
    """The objective in lines; a line for each part that does something."""
    lines = [
        ("rewards", rewards_text(objective)),
        ("groups", groups_text(objective)),
        ("advantage", advantage_text(objective)),
        ("truncated", truncated_text(objective)),
        ("ratio", ratio_text(objective)),
        ("policy term", trust_region_text(objective.trust_region, objective.ratio_anchor)),
        *(("mismatch", mismatch_text(rule)) for rule in objective.mismatch),
        ("tokens", tokens_text(objective)),
        ("KL", kl_text(objective.kl)),
        ("entropy", entropy_text(objective)),
        ("mean", aggregation_text(objective)),
        ("source", objective.source),
    ]
    title = f"objective {objective.identity}" + (f": {objective.summary}" if objective.summary else "")
    if changed := changes_from_preset(objective):
        title += f"\n  {'changed':<12} {', '.join(changed)}"
    return "\n".join([title, *(f"  {name:<12} {text}" for name, text in lines if text)])


def changes_from_preset(objective: Objective) -> list[str]:
    """The parts that differ from the row of the table that an objective is named after."""
    rows = [row for row in TABLE if row.identity == objective.identity]
    if not rows:
        return []
    own, theirs = objective.settings(), rows[0].settings()
    changed = []
    for name, value in own.items():
        before = theirs[name]
        follows = name == "aggregation_length" and before is None  # from the rollout's limit
        if value == before or follows:
            continue
        if type(value) is type(before) and dataclasses.is_dataclass(value):
            changed += [
                f"{name}.{f.name} {_word(getattr(before, f.name))} -> {_word(getattr(value, f.name))}"
                for f in dataclasses.fields(value)
                if getattr(value, f.name) != getattr(before, f.name)
            ]
        else:
            changed.append(f"{name} {_word(before)} -> {_word(value)}")
    return changed


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_word(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        numbers = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        said = ", ".join(f"{key} {_word(number)}" for key, number in numbers.items() if number is not None)
        return str(getattr(value, "rule", "")) + (f" ({said})" if said else "")
    return "none" if value is None else str(value)


def rewards_text(objective: Objective) -> str:
    """How the rewards are shaped and put together."""
    parts = []
    if rare := objective.unlikeliness:
        parts.append(f"R (1 - {rare.strength:g} rank/G), rank of the mean log-prob in the group, least likely 0")
    if overlong := objective.soft_overlong:
        length = overlong.max_length or "max_completion_length"
        parts.append(
            f"R + soft overlong: 0 up to {1 - overlong.cache_share:g} L, then down to -1 at L = {length}, over "
            f"the last {overlong.cache_share:g} L"
        )
    if objective.reward_aggregation == "normalize_then_sum":
        parts.append("each reward's advantage in its group, then their weighted sum")
    if objective.reward_aggregation == "normalize_sum_normalize":
        parts.append("each reward's advantage in its group, their weighted sum, normalised over the batch")
    return "; ".join(parts)


def groups_text(objective: Objective) -> str:
    """Which groups and completions are used."""
    match objective.group_filter:
        case DropDead():
            return "groups of equal rewards are left out, of the denominator too"
        case DynamicSampling(max_rounds=rounds):
            return (
                f"groups of equal rewards are replaced by new prompts, in at most {rounds} rounds of sampling per step"
            )
        case TopK(k=k, metric=metric):
            what = "shortest" if metric == "shortest" else "by reward per token"
            return f"the {k} best completions of a group ({what}) have an advantage, among themselves; the others 0"
    return ""


def advantage_text(objective: Objective) -> str:
    """Baseline, scale and credit as one formula."""
    if objective.credit == "given":
        text = "A_t as the reward function gives it, per token"
    elif objective.credit == "process":
        scale = _scale_text(objective).replace("R_group", "r of the group's steps")
        text = "A_t = sum over the steps that end at t or later of (r - mean(r of the group's steps))"
        text += f" / {scale}" if objective.scale else ""
    else:
        baseline = {
            "none": "R_i",
            "group_mean": "(R_i - mean(R_group))",
            "leave_one_out": "(R_i - mean of the others of the group)",
            "length_weighted": "(R_i - sum(|o_j| R_j) / sum(|o_j|) of the group)",
            "batch_mean": "(R_i - mean(R of the batch))",
            "second_best": "G (R_max - R_second) for the best of the group, else 0",
        }.get(str(objective.baseline), f"(R_i - {objective.baseline}{_of_function(objective.baseline)})")
        text = "A_i = " + baseline + (f" / {_scale_text(objective)}" if objective.scale else "")
        if objective.beta and objective.kl.place == "reward":
            text += "; R_i with its KL taken off, see below"
        if objective.credit == "return_to_go":
            text += f"; per token by returns to go, discount {objective.discount:g}"
    if rule := objective.sign_weights:
        text += f"; times {rule.positive:g} where A > 0, {rule.negative:g} where A < 0"
    if objective.baseline in GROUP_BASELINES or isinstance(objective.scale, GroupStd):
        text += "; 0 where all rewards of the group are equal"
    return text


def _of_function(baseline: object) -> str:
    return "(R, group)" if isinstance(baseline, str) else ""


def _scale_text(objective: Objective) -> str:
    match objective.scale:
        case GroupStd(ddof=ddof, epsilon=epsilon):
            return f"(std(R_group, ddof {ddof}) + {epsilon:g})"
        case BatchStd(of=of, unit=unit, ddof=ddof, epsilon=epsilon):
            what = "rewards" if of == "raw" else "centred rewards"
            over = "" if unit == "sample" else ", each token counting once"
            return f"(std of all {what} of the batch, ddof {ddof}{over} + {epsilon:g})"
        case GroupMean(epsilon=epsilon):
            return "mean(R_group)" if epsilon == 0 else f"(mean(R_group) + {epsilon:g})"
    return "1"


def truncated_text(objective: Objective) -> str:
    """What happens to completions cut by the length limit."""
    return {
        "keep": "",
        "mask": "cut completions leave every term, after the advantages of their whole group",
        "zero": "cut completions have advantage 0, after the advantages of their whole group",
        "penalize": f"cut completions have {objective.truncated_penalty:g} taken off their advantage",
    }[objective.truncated]


def ratio_text(objective: Objective) -> str:
    """What r is."""
    if objective.ratio_anchor == "self":
        return "r = 1 (policy / itself)"
    level = {
        "token": "per token",
        "sequence_mean": "per sequence, the geometric mean of its tokens' ratios",
        "sequence_mean_token": "the geometric mean over the sequence, with a gradient per token",
        "sequence_product": "per sequence, the product of its tokens' ratios",
        "prefix_product": "per token, the product of the ratios up to it, those before it constant",
    }[objective.ratio_level]
    return f"r = policy / {objective.ratio_anchor}, {level}"


def trust_region_text(rule: TrustRegion | None, anchor: str = "old") -> str:
    """The surrogate, and the multiplier phi where that says more."""
    match rule:
        case None:
            return "A log(policy)" if anchor == "self" else "r A"
        case PPOClip(low=low, high=high, dual=dual):
            text = f"min(r A, clip(r, {low:g}, {high:g}) A)"
            return text + (f"; and none where A < 0 and r > {dual:g}" if dual else "")
        case Mask(low=low, high=high, signed=signed):
            sides = f"A > 0 and r > {high:g}, or A < 0 and r < {low:g}" if signed else f"r outside [{low:g}, {high:g}]"
            return f"r A; none where {sides}"
        case Cap(low=low, high=high):
            return f"clip(r, {low:g}, {high:g}) A log(policy), the clipped ratio a constant weight"
        case SAPO(tau_positive=up, tau_negative=down):
            gate = "sigmoid(tau (r - 1)) (4 / tau) A; phi = r sech^2(tau (r - 1) / 2)"
            return f"{gate}; tau {up:g} (A > 0), {down:g} (A <= 0)"
        case Gamma():
            return (
                "r^k exp(lambda (1 - r)) A log(policy), the first factor a constant weight; (k, lambda) "
                f"({rule.k_positive:g}, {rule.lambda_positive:g}) where A >= 0, "
                f"({rule.k_negative:g}, {rule.lambda_negative:g}) where A < 0"
            )
        case TVMask(low=low, high=high, cap=cap):
            sides = f"A > 0 and p - p_{anchor} > {high:g}, or A < 0 and p_{anchor} - p > {low:g}"
            return f"min(r, {cap:g}) A; none where {sides}"
        case KLMask(threshold=threshold, cap=cap):
            return (
                f"min(r, {cap:g}) A; none where Bernoulli KL(p_{anchor} || p) > {threshold:g} and A pushes further away"
            )
        case GMPO(low=low, high=high):
            return f"A times the geometric mean of ratios clipped to [{low:.4g}, {high:.4g}] on the side A pushes to"
        case FIPO():
            clip = trust_region_text(PPOClip(low=rule.low, high=rule.high, dual=rule.dual))
            return (
                f"{clip}; times clip(exp(sum of log r from the token on, half-life {rule.half_life:g}), "
                f"{rule.weight_low:g}, {rule.weight_high:g}), at most 1 where A < 0 and r > {rule.safety:g}"
            )
        case Custom(function=function):
            return f"phi A, phi = {function}(r, A)"


def mismatch_text(rule: Mismatch) -> str:
    """What is done about sampler and trainer disagreeing."""
    match rule:
        case MismatchWeight(level=level, mode=mode, low=low, high=high):
            what = {
                "truncate": f"times clip(rho, {low:g}, {high:g})",
                "mask": f"times rho, none outside [{low:g}, {high:g}]",
                "reject": f"none where rho is outside [{low:g}, {high:g}]",
            }[mode]
            how = {"token": "per token", "sequence": "product over the sequence", "geometric": "its geometric mean"}
            return f"{what}; rho = old / sampler, {how[level]}"
        case Veto(low=low, high=high):
            return f"sequences with a token of rho = old / sampler outside [{low:g}, {high:g}] are dropped"
        case OffPolicyMask(threshold=threshold):
            return f"sequences with A < 0 and mean log(sampler / policy) > {threshold:g} are dropped"


def tokens_text(objective: Objective) -> str:
    """Which tokens the policy term uses."""
    if objective.top_entropy == 1:
        return ""
    count = "still count in" if objective.denominator == "base" else "are left out of"
    return f"the {objective.top_entropy:.3g} of the minibatch's tokens of highest entropy; the others {count} the mean"


def kl_text(kl: KL) -> str:
    """The KL term."""
    if kl.beta == 0:
        return "beta = 0; no reference policy"
    weight = f"beta = {kl.beta:g}" + (f", moving toward a KL of {kl.target:g} per token" if kl.target else "")
    name = "KL(policy || ref)" if kl.direction == "reverse" else "KL(ref || policy)"
    if kl.place != "loss":
        where = "taken off the reward" if kl.place == "reward" else "taken off the advantage"
        what = "sum of log(old/ref) over the completion" if kl.scope == "sequence" else "log(old/ref) of the token"
        return f"{weight}; {what}, {where}: the gradient of {name}"
    if kl.estimator == "full":
        how = "the vocabulary" if kl.top_k is None else f"the {kl.top_k} likeliest tokens and a bucket for the rest"
        weigh = "" if kl.correction == "none" else f", weighted by the product of earlier ratios to {kl.anchor}"
        return f"{weight}; {name} over {how}{weigh}"
    kappa = {
        ("reverse", "token"): "log(policy/ref)",
        ("forward", "token"): "1 - ref/policy",
        ("reverse", "sequence"): "sum of log(policy/ref)",
        ("forward", "sequence"): "1 - product of ref/policy",
    }[kl.direction, kl.scope]
    correction = {
        "none": "",
        "token_ratio": f"policy/{kl.anchor} * ",
        "prefix_product": f"product of policy/{kl.anchor} up to the token * ",
        "sequence_weight": f"product of policy/{kl.anchor} over the sequence * ",
    }[kl.correction]
    legacy = " (k3 as a loss)" if kl == KL(beta=kl.beta, direction="forward") else ""
    return f"{weight}; the gradient of {name} per {kl.scope}: kappa = {correction}{kappa}{legacy}"


def entropy_text(objective: Objective) -> str:
    """The entropy bonus."""
    bonus = objective.entropy
    if bonus is None or (bonus.coefficient == 0 and bonus.target is None):
        return ""
    text = f"+ {bonus.coefficient:g} * mean full-vocabulary entropy over the loss tokens"
    if bonus.target is None:
        return text
    return (
        f"{text}; the weight moves by {bonus.step:g} an update, up while the entropy is at most {bonus.target:g}, "
        "else down, and counts only then"
    )


def aggregation_text(objective: Objective) -> str:
    """The denominator."""
    length = objective.aggregation_length or "max_completion_length"
    text = {
        "seq_mean_token_mean": "over the tokens of a completion, then over completions: 1/(B |o|)",
        "token_mean": "over all tokens of the minibatch: 1/sum |o|",
        "prompt_mean": "over all tokens of a prompt's completions, then over prompts: 1/(P sum |o| of the group)",
        "constant": f"sum over tokens, over a constant length, then mean over completions: 1/(B L), L = {length}",
        "seq_sum": "sum over the tokens of a completion, mean over completions: 1/B",
        "token_sum": "none: the sum over all tokens",
    }[objective.aggregation]
    return text + ("" if objective.count_empty else "; completions without a loss token do not count")
