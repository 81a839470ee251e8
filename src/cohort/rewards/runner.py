"""The reward functions of a run."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards.calls import Caller
from cohort.rewards.contract import RewardFunction, TrainerState
from cohort.rewards.functions import Function, unique_names
from cohort.rewards.scoring import Scoring, extra_column, log
from cohort.types import Completion, FinishReason, Group, Prompt, Scores

DRY_RUN_MESSAGE_SECONDS = 5.0
"""A dry run that takes longer than this is reported in the log."""


class RewardRunner:
    """Reward functions with their weights.

    Args:
        functions: see ``rewards.contract``.
        weights: one per function; None: 1 each.
        settings: ``[reward]`` of the settings; None: the defaults.
        per_token: whether the functions reward tokens, not completions.
        not_negative: the part of the objective that does not accept negative rewards; None: any sign.

    Raises:
        RewardError: there are no functions, one is not callable, or the number of weights differs.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        settings: RewardConfig | None = None,
        *,
        per_token: bool = False,
        not_negative: str | None = None,
    ) -> None:
        if not functions:
            raise RewardError("no reward function given: set reward.functions, or pass reward_funcs")
        for function in functions:
            if not callable(function):
                raise RewardError(f"a reward function must be callable, got {function!r:.80}")
        self.names = tuple(unique_names(functions))
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        if len(self.weights) != len(functions):
            raise RewardError(f"reward.weights has {len(self.weights)} numbers for {len(functions)} functions")
        self.settings = settings or RewardConfig()
        self.functions = tuple(
            Function(*given, self.settings, per_token=per_token, not_negative=not_negative)
            for given in zip(functions, self.names, self.weights, strict=True)
        )
        self._caller = Caller(self.settings)

    def begin(self, prompts: Sequence[Prompt], num_generations: int, state: TrainerState | None = None) -> Scoring:
        """The scoring of a rollout that is about to be sampled, with ``num_generations`` completions per prompt."""
        return self._scoring(prompts, num_generations, state, self.settings.on_error)

    def _scoring(
        self, prompts: Sequence[Prompt], num_generations: int, state: TrainerState | None, on_error: str
    ) -> Scoring:
        return Scoring(self.functions, self._caller, prompts, num_generations, state or TrainerState(), on_error)

    def score(self, groups: Sequence[Group], state: TrainerState | None = None) -> Scores:
        """The rewards of all completions, group after group: the weighted sum over functions.

        A function that returned ``None`` for a completion is left out of its sum. The reward of a completion is NaN if
        no function scored it or any function failed on it. With rewards per token, the reward of a completion is the
        sum over its tokens. Completions that are not usable (``FinishReason``) are passed to no function, and their
        reward is NaN.

        Raises:
            RewardError: see ``Scoring.finish``.
        """
        with self.begin([group.prompt for group in groups], 0, state) as scoring:
            return scoring.finish(groups)

    def dry_run(self, prompts: Sequence[Prompt], num_generations: int = 2, state: TrainerState | None = None) -> None:
        """Call every function with a placeholder completion of real rows, to find broken functions before sampling.

        Raises:
            RewardError: a function broke its contract, or failed on a row.
        """
        text = "A made completion, to try the reward functions."
        made = Completion.of_tokens((0,), (0.0,), FinishReason.LENGTH, text)
        groups = [Group(prompt, (made,) * num_generations) for prompt in prompts]
        message = "trying the reward functions (%s) on %d rows"
        timer = threading.Timer(DRY_RUN_MESSAGE_SECONDS, log.warning, [message, ", ".join(self.names), len(groups)])
        timer.daemon = True
        timer.start()
        try:
            with self._scoring(prompts, 0, state, "stop") as scoring:
                scoring.finish(groups)
        except RewardError as error:
            hint = "; completions of conversations are lists of messages: completions[0][-1]['content'] is the text"
            hint = hint if "'list' object" in str(error) and any(prompt.is_conversation for prompt in prompts) else ""
            raise RewardError(
                f"{error}{hint} (tried on {len(groups)} rows with a made completion)"
            ) from error.__cause__
        finally:
            timer.cancel()

    def column(self, column: str, name: str) -> str:
        """The column of ``Scores.extras`` with the values that function ``name`` logs as ``column``."""
        return extra_column(self.functions, column, name)

    def describe(self) -> str:
        """Each function with its weight, what one call sees, and where it runs."""
        return "rewards: " + "; ".join(
            f"{function.name} x {function.weight:g} (per {function.per}, {self._caller.describe(function)})"
            for function in self.functions
        )

    def close(self) -> None:
        """Stop the worker processes. The next call starts new ones."""
        self._caller.close()
