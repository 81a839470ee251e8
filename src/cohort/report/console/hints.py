"""One hint on the time of a step: what takes much of it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cohort.report.console.progress import BETWEEN, Seconds

REWARDS, FILES, WAITING, SAMPLING = 0.25, 0.25, 0.3, 0.8
"""Shares of the time from which a hint is worth reading."""


def hint(seconds: Seconds, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """What to do about the phase that takes more than it should; empty if none does.

    Args:
        seconds: where the time of the latest steps went.
        settings: the run's, as nested tables.
        metrics: of the latest step.
    """
    shares = seconds.shares
    if (part := shares.get("rewards", 0.0)) >= REWARDS:
        slowest = max(seconds.functions, key=lambda name: seconds.functions[name], default="")
        which = f", most of it in {slowest}" if len(seconds.functions) > 1 else ""
        how = "set reward.workers, or make the functions async, to score while sampling goes on"
        if _setting(settings, "reward", "workers"):
            how = "raise reward.workers, or make the functions faster"
        return f"rewards take {part:.0%} of the step{which}: {how}"
    if (part := shares.get(BETWEEN, 0.0)) >= FILES:
        rare = [f"{table}.{key}" for table, key in (("eval", "eval_steps"), ("run", "save_steps"))]
        rare = [name for name in rare if _is_on(settings, *name.split("."))]
        how = f"raise {' or '.join(rare)}" if rare else "files, trackers or callbacks are slow"
        return f"{BETWEEN} take {part:.0%} of the time: {how}"
    if (part := shares.get("waiting for the rollout", 0.0)) >= WAITING:
        return f"training waits for its rollout {part:.0%} of the time: {_faster_rollout(seconds, settings)}"
    blocked = metrics.get("seconds/episodes_blocked")
    if blocked and seconds.step and (part := blocked / seconds.step) >= REWARDS:
        return f"sampling waits for tools and environments {part:.0%} of the step: raise environment.tool_workers"
    if (part := shares.get("sampling", 0.0)) >= SAMPLING and _setting(settings, "rollout", "engine") != "vllm":
        how = 'shorter completions cost less, and on a GPU rollout.engine = "vllm" samples faster'
        return f"sampling takes {part:.0%} of the step: {how}"
    return ""


def _faster_rollout(seconds: Seconds, settings: Mapping[str, Any]) -> str:
    """What to do when a rollout in the background takes longer than a step."""
    if sum(seconds.functions.values()) >= seconds.step / 2:
        return "raise reward.workers, or make the reward functions faster"
    if _setting(settings, "rollout", "engine") == "vllm":
        return "add servers to vllm.url, or lower rollout.max_completion_length"
    return 'lower rollout.max_completion_length, or on a GPU set rollout.engine = "vllm"'


def _is_on(settings: Mapping[str, Any], section: str, key: str) -> bool:
    value = _setting(settings, section, key)
    return isinstance(value, int) and value > 0


def _setting(settings: Mapping[str, Any], section: str, key: str) -> Any:
    table = settings.get(section)
    return table.get(key) if isinstance(table, Mapping) else None
