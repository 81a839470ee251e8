"""The curves of the page: which metrics share a chart, and the numbers that the browser draws."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cohort.report.page.blocks import MAX_KEY
from cohort.report.series import interval, positions, reward_functions, window_for
from cohort.runs.reader import AXES, Run

MAX_NUMBERS = 400_000
"""Numbers of all curves together. A longer run is shown as means over several steps."""
MAX_POINTS = 4_000
MAX_KEYS = 1_000
MAX_CURVES = 12
ACTIVE = "of tokens that updates pass over"
"""What the metrics that need a pass are of; see docs/metrics.md."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of some metrics."""

    title: str
    about: str
    keys: tuple[str, ...]
    """Names of metrics, or patterns that begin with ``^``; of these, every metric that matches is a curve."""
    band: tuple[str, str] | None = None
    """Metrics that bound the band of the first curve. None: the browser computes a confidence band."""
    log: bool = False
    smooth: bool = True
    """Whether a window makes sense."""
    section: str = "curves"


CHARTS = (
    Chart("Reward", "Mean over the scored completions of a step.", ("reward/mean",)),
    Chart("Reward by function", "Unweighted means.", (r"^rewards/[^/]+$",)),
    Chart(
        "Signal within groups",
        "Standard deviation of the reward within a group, mean over groups: what GRPO learns from.",
        ("reward/within_group_std", r"^rewards/[^/]+/within_group_std$"),
    ),
    Chart("Groups without a signal", "Share of groups whose rewards are all equal.", ("groups/dead_share",)),
    Chart(
        "Mean reward of a prompt",
        "Median over prompts. Band: 10% to 90% of the prompts.",
        ("groups/mean_reward_q50",),
        band=("groups/mean_reward_q10", "groups/mean_reward_q90"),
    ),
    Chart(
        "Entropy",
        f"In nats. entropy: {ACTIVE}. Band: 5% to 95% of these. entropy/sampled: estimate from all drawn tokens.",
        ("entropy", "entropy/sampled"),
        band=("entropy/q05", "entropy/q95"),
    ),
    Chart("KL to the reference", f"Two estimators per token, in nats, {ACTIVE}.", ("kl/k1", "kl/k3")),
    Chart(
        "Clipped tokens",
        "Share of tokens that the trust region clips. Exactly 0 with one update per rollout.",
        ("tokens/clipped_low_share", "tokens/clipped_high_share"),
    ),
    Chart(
        "Tokens with a gradient",
        "Share of all tokens, and why the others have none.",
        tuple(f"tokens/{cause}_share" for cause in ("active", "no_advantage", "masked", "low_entropy", "mismatch")),
    ),
    Chart(
        "Length",
        "Tokens of a completion. Band: shortest to longest.",
        ("length/mean",),
        band=("length/min", "length/max"),
    ),
    Chart(
        "Length by advantage",
        "Mean length of completions with A > 0 and with A < 0.",
        ("length/mean_positive", "length/mean_negative"),
    ),
    Chart("Truncated completions", "Share that reached the length limit.", ("length/cut_share",)),
    Chart("Gradient norm", "Before clipping, mean over the updates of a step.", ("grad_norm",), log=True),
    Chart(
        "Size of a step",
        f"KL per token between the policies before and after it, {ACTIVE}.",
        ("update_kl",),
        log=True,
    ),
    Chart("Learning rate", "Of the last update of a step.", ("learning_rate",), smooth=False),
    Chart(
        "Ratio",
        f"Logarithm of the ratio to the anchor, {ACTIVE}: median. Band: 1% to 99% of these.",
        ("ratio/log_q50",),
        band=("ratio/log_q01", "ratio/log_q99"),
    ),
    Chart(
        "Sampler gap",
        f"Distance of log-probs between sampler and trainer, {ACTIVE}: mean and largest.",
        ("sampler/gap", "sampler/max_gap"),
        log=True,
    ),
    Chart("Turns and calls", "Per episode.", ("episodes/turns", "episodes/calls")),
    Chart(
        "Failed calls",
        "Share of calls of tools that were answered with an error.",
        ("episodes/failed_call_share",),
    ),
    Chart("Logged by reward functions", "Means of a step.", (r"^custom/",)),
    Chart(
        "Seconds by phase",
        "Of a step.",
        tuple(f"seconds/{phase}" for phase in ("generate", "reward", "rollout_wait", "logps", "update", "measure")),
        section="timing",
    ),
    Chart(
        "Tokens per second", "Sampled tokens over the seconds of the step.", ("tokens_per_second",), section="timing"
    ),
    Chart(
        "Memory",
        "Highest so far, in MiB, of the process and of its tensors on the GPU.",
        (r"^(.*/)?memory",),
        section="timing",
    ),
)


def run_curves(history: Run) -> dict[str, Any]:
    """The metrics of a run by key, and the axes to draw them over."""
    lines = history.rows
    keys = [key for key in history.keys() if key != "time" and len(key) <= MAX_KEY][:MAX_KEYS]  # noqa: SIM118
    points = max(50, min(MAX_POINTS, MAX_NUMBERS // max(1, len(keys))))
    stride = -(-len(lines) // points) or 1
    axes = {"step": AXES["step"]}
    x: dict[str, list[float | None]] = {"step": [line["step"] for line in lines]}
    for name in ("updates", "tokens", "seconds"):
        places = positions(history, name)
        if any(places.values()):
            axes[name], x[name] = AXES[name], [places.get(line["step"], 0.0) for line in lines]
    return {
        "name": history.path.resolve().name,
        "axes": axes,
        "x": {name: [rounded(value) for value in values[stride - 1 :: stride]] for name, values in x.items()},
        "values": {key: _means([line.get(key) for line in lines], stride) for key in keys},
        "intervals": {key: found for key in keys if stride == 1 and (found := _interval(history, key))},
        "window": window_for(len(lines) // stride),
        "stride": stride,
    }


def _interval(history: Run, key: str) -> dict[str, list[float | None]] | None:
    """The interval of a metric in each step; None if the run does not log what it takes."""
    if not (key == "reward/mean" or history.series(f"{key}_se")[0]):
        return None
    found = [interval(line, key) for line in history.rows]
    if not any(found):
        return None
    return {
        "low": [rounded(one[0]) if one else None for one in found],
        "high": [rounded(one[1]) if one else None for one in found],
    }


def _means(values: Sequence[float | None], stride: int) -> list[float | None]:
    """The means of ``stride`` values each, without those that are absent. A rest at the end is left out."""
    if stride == 1:
        return [rounded(value) for value in values]
    found: list[float | None] = []
    for start in range(0, len(values) - stride + 1, stride):
        known = [value for value in values[start : start + stride] if value is not None]
        found.append(rounded(sum(known) / len(known)) if known else None)
    return found


def rounded(value: float | None) -> float | None:
    """Seven digits: what a screen can show."""
    if value is None or (isinstance(value, int) and abs(value) < 1 << 53):
        return value
    number = float(f"{value:.7g}")
    return int(number) if number.is_integer() and abs(number) < 1e7 else number


def evaluated_charts(keys: Sequence[str]) -> list[Chart]:
    """A chart with its interval for each metric of each evaluation set."""
    found = []
    for key in keys:
        if key.startswith("eval/") and key.endswith("/mean"):
            name, band = key[5:-5], (f"{key[:-4]}low", f"{key[:-4]}high")
            whole = all(end in keys for end in band)
            about = "Mean over the evaluation prompts." + " Band: confidence interval." * whole
            found.append(Chart(f"Evaluation: {name}", about, (key,), band if whole else None, section="evaluation"))
    return found


def charts_of(keys: Sequence[str]) -> list[dict[str, Any]]:
    """The charts that have something to draw, for the browser."""
    several = len(reward_functions(keys)) > 1  # one function is the reward
    drawn = [key for key in keys if several or not key.startswith("rewards/")]
    found = []
    for chart in (*CHARTS, *evaluated_charts(keys)[:40]):
        curves = [key for pattern in chart.keys for key in drawn if _matches(key, pattern)]
        if curves:
            named = [{"key": key, "label": _label(key)} for key in dict.fromkeys(curves)][:MAX_CURVES]
            band = chart.band if chart.band and all(end in keys for end in chart.band) else None
            found.append(asdict(chart) | {"keys": named, "band": band})
    return found


def _matches(key: str, pattern: str) -> bool:
    return re.search(pattern, key) is not None if pattern.startswith("^") else key == pattern


def _label(key: str) -> str:
    """The part of a key in which the curves of a chart differ."""
    if key.startswith("rewards/"):
        return key.split("/")[1]
    if key.startswith(("tokens/", "groups/", "length/")):
        return key.partition("/")[2].removesuffix("_share").replace("_", " ")
    return key.removeprefix("seconds/").removeprefix("episodes/").removeprefix("custom/")
