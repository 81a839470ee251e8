"""An objective in plain text: its formula, term by term, with its numbers."""

from __future__ import annotations

from cohort.presets.base import Part
from cohort.presets.objective import Objective
from cohort.presets.parts import GROUP_BASELINES, GroupStd
from cohort.presets.table import TABLE
from cohort.presets.words import WORDS

STEPS = "r of the group's steps"
"""What credit "process" normalises in place of the group's rewards."""


def describe(objective: Objective) -> str:
    """The objective in plain text: a line for each part that has an effect, and one for changes of its preset."""
    shaping = (_text(objective, name) for name in ("unlikeliness", "soft_overlong", "reward_aggregation"))
    ratio, policy_term = f"r = {_text(objective, 'ratio_anchor')}, {_text(objective, 'ratio_level')}", "r A"
    if objective.ratio_anchor == "self":
        ratio, policy_term = f"r = 1 ({_text(objective, 'ratio_anchor')})", "A log(policy)"
    chosen = f"the {objective.top_entropy:.3g} of the minibatch's tokens of highest entropy"
    chosen += f"; the others {_text(objective, 'denominator')} the mean"
    empty = "; completions without a loss token do not count" * (not objective.count_empty)
    lines = [
        ("changed", ", ".join(changes_from_preset(objective))),
        ("rewards", "; ".join(filter(None, shaping))),
        ("groups", _text(objective, "group_filter")),
        ("advantage", _advantage(objective)),
        ("truncated", _text(objective, "truncated")),
        ("ratio", ratio),
        ("policy term", _text(objective, "trust_region") or policy_term),
        *(("mismatch", rule.words()) for rule in objective.mismatch),
        ("tokens", chosen if objective.top_entropy < 1 else ""),
        ("KL", _text(objective, "kl")),
        ("entropy", _text(objective, "entropy")),
        ("mean", _text(objective, "aggregation") + empty),
        ("updates", _updates(objective)),
        ("source", "; ".join(filter(None, (objective.source, *_sources_of_other_rules(objective))))),
    ]
    title = f"objective {objective.identity}" + (f": {objective.summary}" if objective.summary else "")
    return "\n".join([title, *(f"  {name:<12} {text}" for name, text in lines if text)])


def changes_from_preset(objective: Objective) -> list[str]:
    """The parts that differ from the row of the table that the objective is named after."""
    row = _row(objective)
    if row.aggregation_length is None:  # it follows from the rollout's limit
        row = row.model_copy(update={"aggregation_length": objective.aggregation_length})
    changed = changes_between(row, objective)
    if objective.minibatches != row.minibatches:
        changed.append(f"minibatches {row.minibatches} -> {objective.minibatches}")
    return changed


def changes_between(before: Objective, after: Objective) -> list[str]:
    """The parts in which two objectives differ: "beta 0 -> 0.1", "trust_region.high 1.2 -> 1.28"."""
    changed = []
    for name, value in after.settings().items():
        was = getattr(before, name)
        if value == was:
            continue
        if isinstance(value, Part) and isinstance(was, Part) and value.rule == was.rule:
            old, new = was.numbers(), value.numbers()
            changed += [f"{name}.{key} {_short(old[key])} -> {_short(new[key])}" for key in new if new[key] != old[key]]
        else:
            changed.append(f"{name} {_short(was)} -> {_short(value)}")
    return changed


def _row(objective: Objective) -> Objective:
    return next((row for row in TABLE if row.identity == objective.identity), objective)


def _sources_of_other_rules(objective: Objective) -> list[str]:
    """The papers of the parts with another rule than in the preset."""
    pairs = zip(objective.settings().values(), _row(objective).settings().values(), strict=True)
    return [new.source for new, old in pairs if isinstance(new, Part) and new.rule != getattr(old, "rule", None)]


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_short(item) for item in value) or "none"
    if isinstance(value, Part):
        numbers = ", ".join(f"{key} {_short(number)}" for key, number in value.numbers().items() if number is not None)
        return value.rule + (f" ({numbers})" if numbers else "")
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _text(objective: Objective, name: str) -> str:
    """The words of one part."""
    value = getattr(objective, name)
    if isinstance(value, Part):
        return value.words().replace("{anchor}", objective.ratio_anchor)
    length = objective.aggregation_length or "max_completion_length"
    return WORDS.get(name, {}).get(value, "").format(objective=objective, length=length)


def _updates(objective: Objective) -> str:
    count = objective.minibatches
    return f"{count} minibatches per pass over a rollout, an optimizer step each" if count > 1 else ""


def _advantage(objective: Objective) -> str:
    """Baseline, scale and credit as one formula."""
    baseline, scale, text = objective.baseline, _text(objective, "scale"), _text(objective, "credit")
    if objective.credit == "process" and scale:
        text += f" / {scale.replace('R_group', STEPS)}"
    if objective.credit in ("outcome", "return_to_go"):
        function = "(R, group)" if isinstance(baseline, str) else ""
        formula = _text(objective, "baseline") or f"(R_i - {baseline}{function})"
        formula = f"A_i = {formula}" + (f" / {scale}" if scale else "")
        formula += "; R_i with its KL subtracted, see below" if objective.kl_in_reward else ""
        text = f"{formula}; {text}" if text else formula
    weights = _text(objective, "sign_weights")
    compares = (baseline in GROUP_BASELINES or isinstance(objective.scale, GroupStd)) and objective.credit != "turns"
    zero = "0 where all rewards of the group are equal" if compares else ""
    return "; ".join(filter(None, (text, weights, zero)))
