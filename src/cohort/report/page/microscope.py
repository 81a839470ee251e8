"""What the microscope shows: groups of completions, packed until the page is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cohort.errors import RunFolderError
from cohort.report.history import RunHistory
from cohort.report.page.group import ARRAYS, PackedGroup, number, pack_group, shown_columns
from cohort.report.page.sample import Chosen, choose_steps, rank_groups
from cohort.report.page.tokens import Vocabulary, find_vocabulary
from cohort.report.rollouts import StoredStep

MAX_BLOCKS = 11_000_000
"""Characters of all blocks: the page stays under 20 MB with everything else."""

QUANTITIES = (
    (
        "advantage",
        "Advantage",
        "diverging",
        "How much better the completion is than its group, as the update weighs it.",
    ),
    ("coefficient", "Coefficient", "diverging", "Weight of the token's score in the gradient, KL term included."),
    (
        "ratio",
        "Ratio",
        "ratio",
        "Probability under the current policy over that under the policy of objective.ratio_anchor.",
    ),
    ("kl", "KL to reference", "positive", "k3 estimate of KL(current || reference) at this token, in nats."),
    ("entropy", "Entropy", "positive", "Entropy of the policy's distribution at this token, in nats."),
    ("sampler_logps", "Log-prob: sampler", "negative", "Under the distribution that the token was drawn from."),
    ("old_logps", "Log-prob: old policy", "negative", "Under the policy that sampled, as the trainer computes it."),
    ("logps", "Log-prob: current policy", "negative", "Under the policy of the first update that used the token."),
    ("ref_logps", "Log-prob: reference", "negative", "Under the reference policy of the KL term."),
    ("gap", "Sampler gap", "diverging", "Log-prob of the old policy minus that of the sampler."),
)
"""Key, label, scale and meaning of what a token can be coloured by. ``kl``, ``gap`` and ``coefficient`` follow from the
stored columns in the browser."""


@dataclass
class Microscope:
    """The embedded sample."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    """``step``, ``group`` and ``why`` of each block."""
    blocks: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    completions: dict[str, list[Any]] = field(default_factory=dict)
    """Columns for the filters: block, place in it, number in the group, reward, length, index of finish reason, clipped
    tokens."""
    finishes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the sample is and what could not be read, in words."""
    choice: str = ""
    """How the sample was chosen; empty if it is everything."""

    def data(self) -> dict[str, Any]:
        """What the script of the page needs, besides the blocks."""
        return {name: getattr(self, name) for name in ("groups", "steps", "completions", "finishes")}


def build_microscope(history: RunHistory, begins: Mapping[int, str], space: int = MAX_BLOCKS) -> Microscope:
    """The sample of a run.

    Args:
        history: the run.
        begins: steps at which findings begin, and which.
        space: characters that all blocks may have.
    """
    vocabulary, chosen = find_vocabulary(history), choose_steps(history, begins)
    found: list[tuple[Chosen, list[PackedGroup], int]] = []
    unreadable: list[str] = []
    left = space
    for place, step in enumerate(chosen):
        try:
            path = history.rollout_steps[step.number]
            stored = StoredStep.read(path, shown_columns(path))
        except RunFolderError as error:
            unreadable.append(str(error))
            continue
        share = left // (len(chosen) - place)
        packed, groups = _fitting(stored, vocabulary, share, left)
        left -= sum(len(one.block) for one in packed)
        found.append((step, packed, groups))
    found = sorted(((step, packed, groups) for step, packed, groups in found if packed), key=lambda one: one[0].number)
    result = _indexed(found, _notes(history, found, vocabulary, unreadable))
    whole = len(found) == len(history.rollout_steps) and all(len(packed) == count for _, packed, count in found)
    return replace(result, choice="" if whole else CHOICE)


def _fitting(stored: StoredStep, vocabulary: Vocabulary | None, share: int, left: int) -> tuple[list[PackedGroup], int]:
    """The most telling groups of a step that fit into its share of the space; at least one, if that fits what is left.
    Also the number of groups of the step."""
    groups = [-1 if one is None else one for one in stored.values("group")]
    rewards = [number(one) for one in stored.values("reward")]
    ranked = rank_groups(groups, rewards, [reason == "length" for reason in stored.values("finish_reason")])
    places: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        places.setdefault(group, []).append(row)
    columns = {name: stored.arrays(name) for name in ARRAYS if name in stored}
    packed: list[PackedGroup] = []
    used = 0
    for choice in ranked:
        one = pack_group(stored.table, columns, places[choice.number], choice, vocabulary)
        used += len(one.block)
        if used > (share if packed else left):
            break
        packed.append(one)
    return packed, len(ranked)


CHOICE = (
    "Steps: the last, the first, those at which findings begin, those with the extremes of the reward, of the gradient "
    "norm and of update_kl, then steps at even distances. Groups of a step: the largest differences of rewards, the "
    "highest and the lowest mean reward, equal rewards, the most truncated completions, then in order, until the page "
    "is full."
)
"""How a sample is chosen."""


def _indexed(found: Sequence[tuple[Chosen, list[PackedGroup], int]], notes: list[str]) -> Microscope:
    """The sample with the columns that the filters use."""
    result = Microscope(
        notes=notes,
        completions={name: [] for name in ("group", "at", "number", "reward", "length", "finish", "clipped")},
    )
    for step, packed, _ in found:
        result.steps.append({"step": step.number, "why": step.why})
        for one in packed:
            block = len(result.blocks)
            result.blocks.append(one.block)
            result.groups.append({"step": step.number, "group": one.group.number, "why": one.group.why})
            for at, (position, reward, length, finish, clipped_tokens) in enumerate(one.rows):
                if finish not in result.finishes:
                    result.finishes.append(finish)
                row = (block, at, position, reward, length, result.finishes.index(finish), clipped_tokens)
                for column, value in zip(result.completions.values(), row, strict=True):
                    column.append(value)
    return result


def _notes(
    history: RunHistory,
    found: Sequence[tuple[Chosen, list[PackedGroup], int]],
    vocabulary: Vocabulary | None,
    unreadable: list[str],
) -> list[str]:
    """What the sample is, in words."""
    stored = len(history.rollout_steps)
    groups, all_groups = sum(len(packed) for _, packed, _ in found), sum(count for _, _, count in found)
    notes = []
    if not stored:
        return ["The run folder has no stored completions (rollouts/)."]
    if len(found) == stored and groups == all_groups:
        notes.append(f"All stored completions are in this page: {groups:,} groups of {stored:,} steps.")
    elif found:
        part = f"all {groups:,} groups" if groups == all_groups else f"{groups:,} of the {all_groups:,} groups"
        notes.append(
            f"This page holds a sample: {part} of {len(found):,} of the {stored:,} stored steps. All are in rollouts/."
        )
    if vocabulary is None:
        notes.append(
            "The run folder has no tokenizer.json beside a checkpoint: tokens are shown as ids, beside the text."
        )
    return notes + unreadable
