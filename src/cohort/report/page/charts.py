"""The curves of the page: which metrics share a chart, and the numbers that the browser draws."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cohort.report.series import Floats, interval, reward_functions, window_for
from cohort.runs.reader import AXES, Run
from cohort.statistics import t_quantile

MAX_NUMBERS = 400_000
"""Numbers of all curves together. A longer run is shown as means over several steps."""
MAX_POINTS = 4_000
MAX_KEY = 200
"""Characters of a name, such as that of a metric. Metrics with longer names are left out."""
MAX_KEYS = 1_000
MAX_CURVES = 12
ACTIVE = "of tokens that updates pass over"
"""What the metrics that need a pass are of; see docs/metrics.md."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of some metrics."""

    title: str
    about: str
    keys: str
    """Names of metrics, or patterns that begin with ``^``; of these, every metric that matches is a curve."""
    band: str = ""
    """The two metrics that bound the band of the first curve. Empty: the browser computes a confidence band."""
    log: bool = False
    smooth: bool = True
    """Whether a window makes sense."""
    section: str = "curves"


CHARTS = (
    Chart("Reward", "Mean over the scored completions of a step.", "reward/mean"),
    Chart("Reward by function", "Unweighted means.", "^rewards/[^/]+$"),
    Chart("Signal within groups",
          "Standard deviation of the reward within a group, mean over groups: what GRPO learns from.",
          "reward/within_group_std ^rewards/[^/]+/within_group_std$"),
    Chart("Groups without a signal", "Share of groups whose rewards are all equal.", "groups/dead_share"),
    Chart("Mean reward of a prompt", "Median over prompts. Band: 10% to 90% of the prompts.",
          "groups/mean_reward_q50", "groups/mean_reward_q10 groups/mean_reward_q90"),
    Chart("Entropy",
          f"In nats. entropy: {ACTIVE}. Band: 5% to 95% of these. entropy/sampled: estimate from all drawn tokens.",
          "entropy entropy/sampled", "entropy/q05 entropy/q95"),
    Chart("KL to the reference", f"Two estimators per token, in nats, {ACTIVE}.", "kl/k1 kl/k3"),
    Chart("Clipped tokens", "Share of tokens that the trust region clips. Exactly 0 with one update per rollout.",
          "tokens/clipped_low_share tokens/clipped_high_share"),
    Chart("Tokens with a gradient", "Share of all tokens, and why the others have none.",
          "tokens/active_share tokens/no_advantage_share tokens/masked_share tokens/low_entropy_share "
          "tokens/mismatch_share"),
    Chart("Length", "Tokens of a completion. Band: shortest to longest.", "length/mean", "length/min length/max"),
    Chart("Length by advantage", "Mean length of completions with A > 0 and with A < 0.",
          "length/mean_positive length/mean_negative"),
    Chart("Truncated completions", "Share that reached the length limit.", "length/cut_share"),
    Chart("Gradient norm", "Before clipping, mean over the updates of a step.", "grad_norm", log=True),
    Chart("Size of a step", f"KL per token between the policies before and after it, {ACTIVE}.", "update_kl", log=True),
    Chart("Learning rate", "Of the last update of a step.", "learning_rate", smooth=False),
    Chart("Ratio", f"Logarithm of the ratio to the anchor, {ACTIVE}: median. Band: 1% to 99% of these.",
          "ratio/log_q50", "ratio/log_q01 ratio/log_q99"),
    Chart("Sampler gap", f"Distance of log-probs between sampler and trainer, {ACTIVE}: mean and largest.",
          "sampler/gap sampler/max_gap", log=True),
    Chart("Turns and calls", "Per episode.", "episodes/turns episodes/calls"),
    Chart("Failed calls", "Share of calls of tools that were answered with an error.", "episodes/failed_call_share"),
    Chart("Logged by reward functions", "Means of a step.", "^custom/"),
    Chart("Seconds by phase", "Of a step.", "seconds/generate seconds/reward seconds/rollout_wait seconds/logps "
          "seconds/update seconds/measure", section="timing"),
    Chart("Tokens per second", "Sampled tokens over the seconds of the step.", "tokens_per_second", section="timing"),
    Chart("Memory", "Highest so far, in MiB, of the process and of its tensors on the GPU.", "^(.*/)?memory",
          section="timing"),
)  # fmt: skip


def run_curves(history: Run) -> dict[str, Any]:
    """The metrics of a run by key, and the axes to draw them over."""
    keys = shown_keys(history)[:MAX_KEYS]
    stride = -(-len(history.rows) // max(50, min(MAX_POINTS, MAX_NUMBERS // max(1, len(keys))))) or 1
    axes = {name: np.nan_to_num(history.axis(name)) for name in ("step", "updates", "tokens", "seconds")}
    x = {name: listed(values[stride - 1 :: stride]) for name, values in axes.items() if name == "step" or values.any()}
    bands = [key for key in keys if stride == 1 and (key == "reward/mean" or f"{key}_se" in keys)]
    intervals = {key: interval(history, key)[:2] for key in bands}
    count = len(history.rows) // stride
    windows = [width for width in sorted({5, 11, 25, 51, 101, window_for(count)}) if 1 < width <= count]
    return {
        "name": history.path.resolve().name,
        "axes": {name: AXES[name] for name in x},
        "x": x,
        "values": {key: listed(_means(history.column(key), stride)) for key in keys},
        "intervals": {
            key: {"low": listed(low), "high": listed(high)}
            for key, (low, high) in intervals.items()
            if not np.isnan(low).all()
        },
        "window": window_for(count),
        "windows": [[width, t_quantile(0.975, width - 2)] for width in windows],
        "stride": stride,
    }


def shown_keys(history: Run) -> list[str]:
    """The metrics of a run that can be curves."""
    return [key for key in history.keys() if key != "time" and len(key) <= MAX_KEY]  # noqa: SIM118


def _means(values_T: Floats, stride: int) -> Floats:
    """The means of ``stride`` values each, without those that are absent. A rest at the end is left out."""
    values_MS = values_T[: len(values_T) // stride * stride].reshape(-1, stride)
    counts_M = (~np.isnan(values_MS)).sum(axis=1)
    means_M: Floats = np.nansum(values_MS, axis=1) / np.where(counts_M, counts_M, np.nan)
    return means_M


def listed(values: Floats) -> list[float | None]:
    """Numbers for JSON with seven digits, what a screen can show; whole ones are exact, None for NaN."""
    return [
        None
        if math.isnan(value)
        else int(value)
        if value.is_integer() and abs(value) < 2**53
        else float(f"{value:.7g}")
        for value in values.tolist()
    ]


def evaluated_charts(keys: Sequence[str]) -> list[Chart]:
    """A chart with its interval for each metric of each evaluation set."""
    about = "Mean over the evaluation prompts."
    found = []
    for stem in (key[:-4] for key in keys if key.startswith("eval/") and key.endswith("/mean")):
        band = f"{stem}low {stem}high" if f"{stem}low" in keys and f"{stem}high" in keys else ""
        words = f"{about} Band: confidence interval." if band else about
        found.append(Chart(f"Evaluation: {stem[5:-1]}", words, f"{stem}mean", band, section="evaluation"))
    return found


def charts_of(keys: Sequence[str]) -> list[dict[str, Any]]:
    """The charts that have something to draw, for the browser."""
    several = len(reward_functions(keys)) > 1  # one function is the reward
    drawn = [key for key in keys if several or not key.startswith("rewards/")]
    found = []
    for chart in (*CHARTS, *evaluated_charts(keys)[:40]):
        curves = dict.fromkeys(key for pattern in chart.keys.split() for key in drawn if _matches(key, pattern))
        if curves:
            named = [{"key": key, "label": _label(key)} for key in curves][:MAX_CURVES]
            band = chart.band.split() if chart.band and all(end in keys for end in chart.band.split()) else None
            found.append(asdict(chart) | {"keys": named, "band": band})
    return found


def _matches(key: str, pattern: str) -> bool:
    return re.search(pattern, key) is not None if pattern.startswith("^") else key == pattern


def _label(key: str) -> str:
    """The part of a key in which the curves of a chart differ."""
    first, _, rest = key.partition("/")
    if first == "rewards":
        return rest.split("/")[0]
    if first in ("tokens", "groups", "length") and rest:
        return rest.removesuffix("_share").replace("_", " ")
    return rest if first in ("seconds", "episodes", "custom") and rest else key
