"""Which steps and groups of a run the page embeds. Steps are chosen by the metrics alone: no table is read for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cohort.report.history import RunHistory

MAX_STEPS = 60


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step or a group, and why it is in the sample."""

    number: int
    why: str


def choose_steps(history: RunHistory, begins: Mapping[int, str], limit: int = MAX_STEPS) -> list[Chosen]:
    """Steps with stored completions, the most telling first: the last, the first, those at which findings begin, those
    with the extremes of some metrics, then steps at even distances.

    Args:
        history: the run.
        begins: steps at which findings begin, and which.
        limit: how many steps.
    """
    stored = list(history.rollout_steps)
    if not stored:
        return []
    found: dict[int, str] = {stored[-1]: "last", stored[0]: "first"}
    for step, words in begins.items():
        if step in history.rollout_steps:
            found.setdefault(step, words)
    for key, words in (("reward/mean", "reward"), ("grad_norm", "gradient norm"), ("update_kl", "update KL")):
        pairs = [(v, s) for s, v in zip(*history.series(key), strict=True) if s in history.rollout_steps]
        if pairs and min(pairs)[0] < max(pairs)[0]:
            found.setdefault(max(pairs)[1], f"highest {words}")
            if key == "reward/mean":
                found.setdefault(min(pairs)[1], f"lowest {words}")
    found = dict(list(found.items())[:limit])
    even = f"every {math.ceil(len(stored) / limit)} steps" if len(stored) > limit else "in order"
    spare = limit - len(found)
    rest = [step for step in stored if step not in found]
    for place in range(min(spare, len(rest))):
        found[rest[place * len(rest) // min(spare, len(rest))]] = "evenly spaced" if len(rest) > spare else even
    return [Chosen(step, why) for step, why in found.items()]


def rank_groups(groups: Sequence[int], rewards: Sequence[float | None], cut: Sequence[bool]) -> list[Chosen]:
    """The groups of a step, the most telling first: the most varied, highest and lowest reward, equal rewards, most
    truncated, then in order.

    Args:
        groups: the group of each completion.
        rewards: the reward of each completion; None: not scored.
        cut: whether the length limit truncated it.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    scored = {group: [r for row in rows if (r := rewards[row]) is not None] for group, rows in members.items()}
    mean = {group: math.fsum(some) / len(some) for group, some in scored.items() if some}
    spread = {group: max(scored[group]) - min(scored[group]) for group in mean}
    truncated = {group: sum(cut[row] for row in rows) for group, rows in members.items()}
    found: dict[int, str] = {}
    if len(members) > 1 and mean:
        if max(spread.values()) > 0:
            found.setdefault(max(spread, key=lambda group: spread[group]), "rewards differ most")
        found.setdefault(max(mean, key=lambda group: mean[group]), "highest reward")
        found.setdefault(min(mean, key=lambda group: mean[group]), "lowest reward")
        equal = [group for group in mean if spread[group] == 0 and group not in found]
        found |= dict.fromkeys(equal[:1], "all rewards equal")
        if max(truncated.values()):
            found.setdefault(max(truncated, key=lambda group: truncated[group]), "most truncated")
    found |= {group: "in order" if len(members) > 1 else "the only group" for group in members if group not in found}
    return [Chosen(group, why) for group, why in found.items()]


def choose_completions(rewards: Sequence[float | None], lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Completions of a group in order, as many as have ``max_tokens`` together, but at least two: the best and the
    worst in turn, then those without a reward."""
    known = sorted((row for row, one in enumerate(rewards) if one is not None), key=lambda row: -(rewards[row] or 0.0))
    unknown = [row for row, one in enumerate(rewards) if one is None]
    turns = [known[place // 2] if place % 2 == 0 else known[-1 - place // 2] for place in range(len(known))]
    chosen: list[int] = []
    total = 0
    for row in [*turns, *unknown]:
        total += lengths[row]
        if len(chosen) >= 2 and total > max_tokens:
            break
        chosen.append(row)
    return sorted(chosen)
