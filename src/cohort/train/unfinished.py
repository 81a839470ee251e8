"""A rollout that was cancelled: what is complete of it, so that a resumed run draws and scores only the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cohort.rewards.runner import EndedCall, Scoring
from cohort.runs.rollouts import StoredRollout
from cohort.train.rollout import Rollout
from cohort.types import FinishReason, Group, Prompt


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What is complete of a rollout: whole rounds, and of the round after them the completions that have ended."""

    rollout: Rollout | None = None
    """The whole rounds; None: there is none."""
    groups: Sequence[Group] = ()
    """Of the next round, each prompt with its completions that have ended."""
    samples: Sequence[Sequence[int]] = ()
    """Their numbers in their groups."""
    calls: Sequence[EndedCall] = ()
    """The calls of reward functions that have ended."""
    drawn: bool = False
    """Whether every completion of the round has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the sampler."""
    weights_step: int | None = None
    """Complete steps when it began; None: as many as before its own."""
    version: int | None = None
    """Of the weights that sample it."""

    @classmethod
    def of(
        cls,
        rollout: Rollout | None,
        groups: Sequence[Group],
        calls: Sequence[EndedCall],
        metrics: Mapping[str, float],
    ) -> Unfinished:
        """What is complete, of whole rounds and the groups of a cancelled one."""
        samples = [
            [g for g, one in enumerate(group.completions) if one.finish_reason is not FinishReason.CANCELLED]
            for group in groups
        ]
        ended = [
            Group(group.prompt, tuple(group.completions[g] for g in some))
            for group, some in zip(groups, samples, strict=True)
        ]
        drawn = all(len(some) == len(group.completions) for group, some in zip(groups, samples, strict=True))
        return cls(rollout, ended, samples, calls, drawn, metrics)

    @property
    def holds_something(self) -> bool:
        """Whether anything is complete."""
        return self.rollout is not None or any(self.samples)

    @property
    def size(self) -> tuple[int, int, int]:
        """How much is complete: rounds, completions of the next one, and calls."""
        return self.rollout.rounds if self.rollout else 0, sum(map(len, self.samples)), len(self.calls)

    def round_of(self, prompts: Sequence[Prompt], *, apart: bool) -> Unfinished:
        """The cancelled round, if it was of these prompts, and all of it is drawn or the rest may be drawn ``apart``;
        or else a round of which nothing is drawn."""
        same = [group.prompt.uid for group in self.groups] == [prompt.uid for prompt in prompts]
        if same and (apart or self.drawn):
            # The prompts may have objects in their columns that files cannot hold; environments may have added to them.
            fresh = zip(self.groups, prompts, strict=True)
            groups = [replace(g, prompt=replace(g.prompt, columns=p.columns) if g.completions else p) for g, p in fresh]
            return replace(self, groups=groups)
        return Unfinished(None, [Group(prompt, ()) for prompt in prompts], [()] * len(prompts))

    def missing(self, num_generations: int) -> list[list[int]]:
        """The numbers of the completions of each prompt that are to be drawn."""
        return [[g for g in range(num_generations) if g not in some] for some in self.samples]

    def begin(self, scoring: Scoring) -> None:
        """Give a scoring what has ended."""
        scoring.keep(self.calls)
        for p, (group, some) in enumerate(zip(self.groups, self.samples, strict=True)):
            if some:
                scoring.on_prompt(p, group.prompt)
            for g, completion in zip(some, group.completions, strict=True):
                scoring.on_completion(p, g, completion)

    def joined(self, drawn: Sequence[Group]) -> list[Group]:
        """The groups, with the completions that were missing."""
        return [_merged(old, some, new) for old, some, new in zip(self.groups, self.samples, drawn, strict=True)]

    def to_store(self) -> StoredRollout:
        """It, as files hold it."""
        rounds = self.rollout
        facts = {"samples": self.samples, "calls": self.calls, "drawn": self.drawn, "metrics": self.metrics}
        facts |= {"rounds": 0, "is_used": (), "weights_step": self.weights_step, "version": self.version}
        if rounds:
            facts |= {"rounds": rounds.rounds, "is_used": rounds.is_used_P}
        sampled = rounds.sampled if rounds else []
        return StoredRollout([*sampled, *self.groups], rounds.sampled_scores if rounds else None, facts)

    @staticmethod
    def is_stored(stored: StoredRollout) -> bool:
        """Whether files hold such a rollout, and not a complete one."""
        return "samples" in stored.facts

    @classmethod
    def stored(cls, stored: StoredRollout) -> Unfinished:
        """The inverse of ``to_store``."""
        facts, whole = stored.facts, len(stored.facts["is_used"])
        rounds = None
        if stored.scores is not None:
            rounds = Rollout(list(stored.groups[:whole]), stored.scores, facts["is_used"], facts["rounds"])
        members = {name: facts[name] for name in ("samples", "calls", "drawn", "metrics")}
        given = {name: facts.get(name) for name in ("weights_step", "version")}
        members |= {name: None if number is None else int(number) for name, number in given.items()}
        return cls(rounds, stored.groups[whole:], **members)


def _merged(old: Group, samples: Sequence[int], new: Group) -> Group:
    """A group with all completions, in order."""
    ended, drawn = dict(zip(samples, old.completions, strict=True)), iter(new.completions)
    pairs = [
        (old.prompt, ended[g]) if g in ended else (new.prompt, next(drawn))
        for g in range(len(old.completions) + len(new.completions))
    ]
    if not (ended and new.completions) or old.prompt.token_ids == new.prompt.token_ids:
        return Group(old.prompt if ended else new.prompt, tuple(completion for _, completion in pairs))
    return Group.of_starts(old.prompt, pairs)
