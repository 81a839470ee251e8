"""Whether the runs of two groups measured a metric in the same way: otherwise a difference says nothing of policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cohort.report.evidence import Pair, evaluated_at, per_prompt
from cohort.report.files import default_settings
from cohort.report.history import RunHistory
from cohort.report.labels import parts_of

PROMPTS = ("eval_split", "eval_rows", "columns", "prompt_column", "prompt_template", "system_prompt", "format",
    "chat_template", "chat_template_kwargs", "escape_control_tokens", "max_prompt_length",
    "overlong_prompts")  # fmt: skip
"""Settings of ``[data]``, besides ``eval``, that decide which prompts an evaluation has."""
OF_EVALUATION = ("temperature", "top_p", "top_k", "min_p", "max_completion_length")
"""Settings of ``[rollout]`` that ``eval.NAME_eval`` replaces in evaluations."""
SAMPLING = ("repetition_penalty", "min_completion_length", "regex", "json_schema", "stop")
"""Settings of ``[rollout]`` that evaluations share with the training."""
NOT_OF_REWARDS = ("rollout.engine", "rollout.prompts_per_step", "rollout.num_generations", "rollout.replay_sampling",
    "rollout.max_batch_size", "rollout.lag", "rollout.cache_tokens", "data.eval", "data.template_time")  # fmt: skip
"""How the names of settings begin that do not change what a training reward means."""


def unequal_evaluations(pair: Pair, key: str) -> str:
    """Why an evaluation metric cannot be compared, in words; empty if it can."""
    if not key.startswith("eval/"):
        return ""
    runs = (*pair.a.runs, *pair.b.runs)
    name, _ = parts_of(key)
    texts = _stored_prompts(pair, key, name)
    prompts = _unequal(runs, [f"data.eval.{name}" if name else "data.eval", *(f"data.{one}" for one in PROMPTS)])
    if texts and texts[0].isdisjoint(texts[1]) and not _unequal(runs, ["model.path"]):
        return f"evaluated on different prompts{_named(prompts)}"
    if prompts and not (texts and texts[0] == texts[1]):  # the same file may have two names
        return f"evaluated on different prompts{_named(prompts)}"
    sampled = [one for one in OF_EVALUATION if len({repr(_sampling(run, one)) for run in runs}) > 1]
    sampled += _unequal(runs, [f"rollout.{one}" for one in SAMPLING])
    return f"evaluated with different sampling{_named(sampled)}" if sampled else ""


def unequal_training(pair: Pair) -> list[str]:
    """The settings of data, sampling and environment that differ: a training reward is then of something else."""
    runs = (*pair.a.runs, *pair.b.runs)
    keys = dict.fromkeys(key for run in runs for key in _settings(run) if key.startswith(("data.", "rollout.", "env")))
    return _unequal(runs, [key for key in keys if not key.startswith(NOT_OF_REWARDS)])


def same_rewards(runs: Iterable[RunHistory]) -> bool:
    """Whether all runs have the same reward functions with the same weights."""
    return not _unequal(list(runs), ["reward.functions", "reward.weights"])


def _stored_prompts(pair: Pair, key: str, name: str) -> list[set[Any]]:
    """The prompts of stored evaluations near the budget, of one run of each side; empty unless both have some."""
    steps = ((run, evaluated_at(run, key, pair.axis, pair.budget)) for run in pair.one_run_each())
    files = [run.evaluation_files.get((step, name)) for run, step in steps if step is not None]
    found = [{prompt for _, prompt in per_prompt(file, parts_of(key)[1])} for file in files if file]
    return found if len(found) == 2 and all(found) else []


def _settings(run: RunHistory) -> dict[str, Any]:
    """The settings by name, with the defaults of those that are missing."""
    return {**default_settings(), **run.flat_settings()}


def _sampling(run: RunHistory, name: str) -> Any:
    settings = _settings(run)
    return settings.get(f"eval.{name}_eval", settings.get(f"rollout.{name}"))


def _unequal(runs: Sequence[RunHistory], names: Iterable[str]) -> list[str]:
    """Those of some settings, or tables of settings, that are not equal in all runs."""
    tables = [_settings(run) for run in runs]
    return [name for name in names if len({repr(_part(table, name)) for table in tables}) > 1]


def _part(settings: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """A setting, or the entries of a table: without the default of a setting that the table replaces."""
    entries = sorted((key, value) for key, value in settings.items() if key.startswith(f"{name}."))
    return entries or [(name, settings.get(name))]


def _named(settings: Sequence[str]) -> str:
    shown = ", ".join(settings[:5]) + (", ..." if len(settings) > 5 else "")
    return f" ({shown})" if settings else ""
