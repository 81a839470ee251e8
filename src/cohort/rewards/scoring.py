"""Scoring one rollout: which calls it takes, begun as early as they can be, gathered at its end."""

from __future__ import annotations

import logging
import math
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cohort.errors import RewardError
from cohort.rewards.calls import Recorded, loop_answers
from cohort.rewards.contract import Failed, Function, TrainerState, Value, arguments
from cohort.types import Completion, Group, Prompt, Scores
from cohort.workers import CallFailed, said_of

if TYPE_CHECKING:
    from cohort.rewards.runner import RewardRunner

Key = tuple[int, int, int]
"""Places of a function, of a prompt (ALL: the whole batch) and of a completion in its group (ALL: the whole group)."""
log = logging.getLogger("cohort.rewards")
ALL = -1
MOST_BARREN = 3
"""A function may fail on all completions of a single prompt; that often in a row it is the function's fault."""


@dataclass(slots=True)
class Unit:
    """One call: of one function on a sample, a group or the batch."""

    function: Function
    groups: Sequence[Group]
    """What it sees: completions that ended as they should."""
    future: Future[Recorded] | None = None
    """Set when the call is made elsewhere."""
    recorded: Recorded | None = None
    """What came of it, unless it raised."""
    timed_out: bool = False
    values: list[Value] = field(default_factory=list)
    """One per completion it sees, once the call was made."""

    @property
    def settled(self) -> bool:
        """Whether the call was made and nothing of it failed."""
        return bool(self.values) and not any(isinstance(value, Failed) for value in self.values)

    @property
    def completions(self) -> list[Completion]:
        """Those it sees, in order."""
        return [completion for group in self.groups for completion in group.completions]


class Scoring:
    """The scoring of one rollout. ``take`` completions as they end, then ``finish``; in a ``with`` block, so that what
    is under way is called off when something else fails.

    Functions that are async or run in worker processes are called for a sample as soon as it has ended, for a group as
    soon as it is whole, while others are still sampled. The rest is called in ``finish``, in this process.

    Args:
        runner: functions and settings.
        prompts: of the rollout.
        num_generations: completions that each of them will have.
        state: how far the run is.
        on_error: in place of ``reward.on_error``.
    """

    def __init__(
        self,
        runner: RewardRunner,
        prompts: Sequence[Prompt],
        num_generations: int,
        state: TrainerState,
        on_error: str | None = None,
    ) -> None:
        self._runner, self._prompts, self._state = runner, prompts, state
        self._num_generations = num_generations
        self._stops = (on_error or runner.settings.on_error) == "stop"
        self._units: dict[Key, Unit] = {}
        self._ended: dict[int, dict[int, Completion]] = {}

    def take(self, prompt_index: int, sample: int, completion: Completion) -> None:
        """A completion has ended: begin what can be begun. For ``rollout.Watch.on_completion``."""
        group = self._ended.setdefault(prompt_index, {})
        group[sample] = completion
        prompt = self._prompts[prompt_index]
        for k, function in enumerate(self._runner.functions):
            if not self._runner.runs_elsewhere(function):
                continue
            if function.kind.per == "sample":
                self._begin((k, prompt_index, sample), [Group(prompt, (completion,)).usable])
            elif function.kind.per == "group" and len(group) == self._num_generations:
                whole = Group(prompt, tuple(group[g] for g in sorted(group)))
                self._begin((k, prompt_index, ALL), [whole.usable])

    def finish(self, groups: Sequence[Group]) -> Scores:
        """Make the calls that are left, wait for all, and put the rewards together.

        Args:
            groups: the rollout's, with every completion, those that failed too.

        Raises:
            RewardError: a function broke its contract; or a call failed and ``reward.on_error`` is "stop", or all calls
                of a function failed.
        """
        for k, function in enumerate(self._runner.functions):
            for key, seen in _calls(k, function, groups):
                self._begin(key, seen)
        for attempt in range(self._runner.settings.retries + 1):
            self._make_calls(again=attempt > 0)
        self._report_failures()
        return self._scores(groups)

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            return
        under_way = [unit.future for unit in self._units.values() if unit.future is not None]
        for future in under_way:
            future.cancel()
        if not all(future.done() for future in under_way):  # a worker is in a call, which only its end stops
            self._runner.close()

    def _begin(self, key: Key, groups: Sequence[Group]) -> None:
        """Note a call, and make it now if it is made elsewhere."""
        if key in self._units or not any(group.completions for group in groups):
            return
        unit = self._units[key] = Unit(self._runner.functions[key[0]], [g for g in groups if g.completions])
        if (kept := self._runner.cached(unit.function, unit.groups)) is not None:
            self._take_result(unit, kept)
        else:
            unit.future = self._runner.submit(unit.function, self._arguments(unit))

    def _arguments(self, unit: Unit) -> dict[str, Any]:
        given = unit.function.accepted(arguments(unit.function.kind.per, unit.groups, self._state))
        if self._runner.caches(unit.function):  # what is kept must not depend on it
            given.pop("trainer_state", None)
        return given

    def _make_calls(self, *, again: bool) -> None:
        """Make what is to be made here, and gather the rest; ``again``: once more what failed."""
        units = [unit for unit in self._units.values() if not unit.settled]
        for unit in units:
            if again:
                unit.future = self._runner.submit(unit.function, self._arguments(unit))
        for unit in units:
            if unit.future is None:
                self._attempt(unit, partial(unit.function.recorded, self._arguments(unit)))
        self._wait([unit for unit in units if unit.future is not None])
        for unit in units:
            if unit.future is not None:
                self._attempt(unit, unit.future.result)

    def _attempt(self, unit: Unit, call: Callable[[], Recorded]) -> None:
        unit.recorded, unit.timed_out = None, False
        try:
            recorded = call()
        except RewardError:
            raise
        except CallFailed as error:
            failed, unit.timed_out = Failed(str(error), error.details), error.timed_out
        except (Exception, SystemExit) as error:
            details = "".join(traceback.format_exception(error)).rstrip()
            failed, unit.timed_out = Failed(said_of(error), details), isinstance(error, TimeoutError)
        else:
            self._take_result(unit, recorded)
            return
        unit.values = [failed] * len(unit.completions)

    def _take_result(self, unit: Unit, recorded: Recorded) -> None:
        """Check what a call gave, and keep it."""
        unit.recorded = recorded
        unit.values = unit.function.values(recorded.result, unit.completions, per_token=self._runner.per_token)
        self._runner.check_sign(unit.function, unit.values)
        if unit.settled:
            self._runner.keep(unit.function, unit.groups, recorded)

    def _wait(self, units: Sequence[Unit]) -> None:
        """Until all calls have ended. An event loop that a function blocks is found out when there is a timeout."""
        on_loop = [unit for unit in units if unit.function.kind.is_async and self._runner.limit(unit.function)]
        limit = max((self._runner.limit(unit.function) or 0.0 for unit in on_loop), default=0.0)
        waiting = {unit.future for unit in units if unit.future is not None}
        while waiting:
            _, waiting = wait(waiting, timeout=limit or None)
            if waiting and limit and not loop_answers(within=limit):
                names = ", ".join(dict.fromkeys(unit.function.name for unit in on_loop))
                raise RewardError(
                    f"the async reward functions ({names}) did nothing for {limit:g} s: one of them blocks, as "
                    "time.sleep or a plain HTTP call does. Await instead, or make it a plain function"
                )

    def _report_failures(self) -> None:
        """Say what failed. Stop where the settings say so; and where a function failed on everything, be it of several
        prompts or, with rollouts of one, for the third time."""
        for function in self._runner.functions:
            units = [unit for unit in self._units.values() if unit.function is function]
            values = [value for unit in units for value in unit.values]
            failures = [value for value in values if isinstance(value, Failed)]
            times = self._runner.count_barren(function, barren=0 < len(failures) == len(values))
            if not failures:
                continue
            first = failures[0]
            what = f"reward function {function.name} failed on {len(failures)} of {len(values)} completions"
            several = len({group.prompt.uid for unit in units for group in unit.groups}) > 1
            if self._stops or times >= (1 if several else MOST_BARREN):
                raise RewardError(f"{what}; the first: {first.message}") from _Details(first.details)
            log.warning("%s: they are unscored. The first:\n%s", what, first.details)

    def _scores(self, groups: Sequence[Group]) -> Scores:
        import torch

        runner = self._runner
        place = {
            (p, g): s
            for s, (p, g) in enumerate((p, g) for p, group in enumerate(groups) for g in range(len(group.completions)))
        }
        lengths = [len(c.token_ids) if runner.per_token else 1 for group in groups for c in group.completions]
        columns = [[[math.nan] * length for length in lengths] for _ in runner.functions]
        errors: dict[int, str] = {}
        gathered = _Gathered(len(place), runner.column)
        for key, unit in self._units.items():
            places = [place[where] for where in _places(key, groups)]
            for s, value in zip(places, unit.values, strict=True):
                if isinstance(value, Failed):
                    errors.setdefault(s, f"{unit.function.name}: {value.details}")
                else:
                    columns[key[0]][s] = value
            gathered.add(unit, places)
        for s in errors:  # a sum that lacks a term is no reward to compare with others
            for column in columns:
                column[s] = [math.nan] * lengths[s]
        totals_KS = [[_total(numbers) for numbers in column] for column in columns]
        by_function_SK = torch.tensor(totals_KS, dtype=torch.float64).T
        weights_K = torch.tensor(runner.weights, dtype=torch.float64)
        tokens = [[number for numbers in column for number in numbers] for column in columns]
        return Scores(
            rewards_S=weighted_sum(by_function_SK, weights_K),
            by_function_SK=by_function_SK,
            names=runner.names,
            weights=runner.weights,
            token_rewards_N=weighted_sum(torch.tensor(tokens, dtype=torch.float64).T, weights_K)
            if runner.per_token
            else None,
            extras=gathered.extras,
            errors=errors,
            counts={**gathered.counts, **gathered.seconds},
            logged=gathered.logged,
        )


class _Details(Exception):  # noqa: N818 - the cause of a RewardError, with the traceback of where it was called
    pass


class _Gathered:
    """What calls said on the side, by completion."""

    def __init__(self, count: int, column: Callable[[str, str], str]) -> None:
        self._count, self._column = count, column
        self.extras: dict[str, list[Any]] = {}
        self.logged: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, unit: Unit, places: Sequence[int]) -> None:
        name = unit.function.name
        self.counts[f"rewards/{name}/failed"] += sum(isinstance(value, Failed) for value in unit.values)
        self.counts[f"rewards/{name}/timeouts"] += len(unit.values) if unit.timed_out else 0
        self.seconds[f"seconds/reward/{name}"] += unit.recorded.seconds if unit.recorded else 0.0
        if unit.recorded is None:
            return
        for metric, number in unit.recorded.metrics:
            self.logged.setdefault(metric, []).append(number)
        for column, given in unit.recorded.extras:
            values = [given] if unit.function.kind.per == "sample" else given
            if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(places):
                raise RewardError(
                    f"reward function {name} must log one value per completion as {column!r}: {len(places)}, "
                    f"got {given!r:.60}"
                )
            kept = self.extras.setdefault(self._column(column, name), [None] * self._count)
            for s, value in zip(places, values, strict=True):
                kept[s] = value


def _calls(k: int, function: Function, groups: Sequence[Group]) -> Iterator[tuple[Key, list[Group]]]:
    """All calls of a function, with what each sees."""
    if function.kind.per == "batch":
        yield (k, ALL, ALL), [group.usable for group in groups]
        return
    for p, group in enumerate(groups):
        if function.kind.per == "group":
            yield (k, p, ALL), [group.usable]
        else:
            for g, completion in enumerate(group.completions):
                yield (k, p, g), [replace(group, completions=(completion,)).usable]


def _places(key: Key, groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Prompt and sample of every completion that a call saw."""
    _, p, g = key
    if g != ALL:
        return [(p, g)]
    prompts = range(len(groups)) if p == ALL else [p]
    return [(q, h) for q in prompts for h, c in enumerate(groups[q].completions) if c.finish_reason.usable]


def weighted_sum(values_MK: Any, weights_K: Any) -> Any:
    """Over functions, those that gave nothing left out; NaN where none gave anything."""
    import torch

    counted_K = weights_K != 0 if bool(weights_K.any()) else torch.ones_like(weights_K, dtype=torch.bool)
    none_M = values_MK[:, counted_K].isnan().all(dim=1)  # what has no weight scores nothing
    return torch.where(none_M, torch.nan, (values_MK * weights_K).nansum(dim=1))


def _total(numbers: Sequence[float]) -> float:
    given = [number for number in numbers if not math.isnan(number)]
    return math.fsum(given) if given else math.nan
