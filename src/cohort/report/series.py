"""Curves of runs, for plots and pages: on axes that make runs comparable, smoothed, with bands, and over seeds.

To compare runs: ``grouped`` puts runs together that differ only by their seed, ``curve`` makes a curve of each run,
``over_seeds`` one of each group.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohort.config import GRPOConfig, to_toml
from cohort.config.schema import marks_of
from cohort.errors import ConfigError
from cohort.runs.reader import Run, flat
from cohort.statistics import t_quantile

# ----------------------------------------
# The names of metrics, taken apart and in plain words with units, for axes of plots and pages.


WORDS = {
    "reward/mean": "training reward",
    "reward/std": "standard deviation of the reward",
    "reward/within_group_std": "standard deviation of the reward in a group",
    "groups/dead_share": "groups without a signal",
    "length/mean": "completion length (tokens)",
    "length/max": "longest completion (tokens)",
    "length/cut_share": "completions cut at the length limit",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "update_kl": "KL of the update (nats per token)",
    "entropy": "entropy (nats per token)",
    "kl/k1": "KL to the reference, k1 (nats per token)",
    "kl/k3": "KL to the reference, k3 (nats per token)",
    "beta": "weight of the KL, beta",
    "tokens": "active tokens per step",
    "tokens_per_second": "drawn tokens per second",
    "sampler/gap": "gap of sampler and trainer (nats)",
    "sampler/max_gap": "largest gap of sampler and trainer (nats)",
    "advantage/abs_mean": "mean absolute advantage",
    "advantage/length_correlation": "correlation of advantage and length",
    "tokens/active_share": "tokens with a gradient",
    "tokens/clipped_low_share": "tokens clipped at a low ratio",
    "tokens/clipped_high_share": "tokens clipped at a high ratio",
    "seconds/step": "seconds per step",
    "memory/peak_mib": "peak memory of the process (MiB)",
    "memory/device_peak_mib": "peak memory on the GPU (MiB)",
}
EVALUATED = {"reward": "reward", "length": "completion length (tokens)", "cut_share": "completions cut at the limit"}


def parts_of(key: str) -> tuple[str, str]:
    """The evaluation set in a metric's name, and the column of stored tables that the metric is the mean of.

    >>> parts_of("eval/gsm8k/rewards/math/mean"), parts_of("eval/reward/mean"), parts_of("rewards/math")
    (('gsm8k', 'rewards/math'), ('', 'reward'), ('', 'rewards/math'))
    """
    name = key.removesuffix("/mean")
    if not name.startswith("eval/"):
        return "", name
    before, marker, function = name.removeprefix("eval/").partition("rewards/")
    if marker:
        return before.rstrip("/"), marker + function
    before, _, column = before.rpartition("/")
    return before, column


def reward_functions(keys: Iterable[str]) -> dict[str, str]:
    """The keys of the reward functions' means among the metrics of a run, by the functions' names.

    >>> reward_functions(["rewards/format", "rewards/format/failed", "reward/mean"])
    {'format': 'rewards/format'}
    """
    return {key[8:]: key for key in keys if key.startswith("rewards/") and key.count("/") == 1}


def words_for(key: str) -> str:
    """A metric in words, with its unit; an unknown key as it is, with spaces.

    >>> words_for("eval/gsm8k/reward/mean"), words_for("seconds/update"), words_for("tokens/held_share")
    ('evaluation reward on gsm8k', 'seconds of update', 'tokens held share')
    >>> words_for("eval/rewards/math/mean"), words_for("eval/aime/pass@8/mean"), words_for("rewards/math")
    ('evaluation reward of math', 'evaluation pass@8 on aime', 'training reward of math')
    >>> words_for("custom/my_number"), words_for("kl/k3")
    ('my number', 'KL to the reference, k3 (nats per token)')
    """
    if key in WORDS:
        return WORDS[key]
    if key.startswith("eval/") and key.endswith("/mean"):
        name, column = parts_of(key)
        words = f"reward of {column[8:]}" if column.startswith("rewards/") else EVALUATED.get(column, column)
        return f"evaluation {words}" + (f" on {name}" if name else "")
    if reward_functions([key]):
        return f"training reward of {key.removeprefix('rewards/')}"
    if key.startswith("seconds/"):
        return f"seconds of {_spaced(key.removeprefix('seconds/'))}"
    return _spaced(key.removeprefix("custom/"))


def _spaced(name: str) -> str:
    return name.replace("/", " ").replace("_", " ")


# ----------------------------------------
# Smooth curves: local linear fits with their confidence bands.


Floats = NDArray[np.float64]
MAX_WINDOW = 2001
"""Points of a local fit."""


def loess(values_T: Floats, window: int) -> tuple[Floats, Floats]:
    """A smooth curve without lag: at each point, the weighted least-squares line through the points around it.

    The weight of a point at distance d is ``(1 - (d / D)^3)^3``, with D one more than the distance of the window's
    farther end. In the middle the window is centred (an even one is raised by one point), and the line's value is the
    weighted mean. Within half a window of an end it is the first or last ``window`` points, so a trend goes on to the
    ends.

    Args:
        values_T: T values at even distances.
        window: points of a fit, at least 3. With fewer values, all.

    Returns:
        The fit, and half the width of its 95% confidence band: ``t_{window - 2} * sigma * |l|``, where l are the
        weights with which values enter the fit at the point, and sigma^2 is the mean over the window of the squared
        residuals, each divided by its expectation per sigma^2, ``1 - 2 l_own + |l|^2``. It takes the deviations from
        the curve as independent.

    Source: W. S. Cleveland, "Robust locally weighted regression and smoothing scatterplots" (1979).
    """
    count = len(values_T)
    window = fitted_window(window, count)
    if window < 3:
        return values_T.copy(), np.zeros(count)
    half = window // 2
    weights_HW, norm_H = _fit_weights(window)
    left_H, right_H = weights_HW[:half] @ values_T[:window], weights_HW[:half] @ values_T[::-1][:window]
    middle = np.convolve(values_T, weights_HW[half], "valid")
    fit_T = np.concatenate([left_H, middle, right_H[::-1]])
    from_end_T = np.minimum(np.minimum(np.arange(count), np.arange(count)[::-1]), half)
    own_T, norm_T = weights_HW.diagonal()[from_end_T], norm_H[from_end_T]
    squares_T = (values_T - fit_T) ** 2 / (1 - 2 * own_T + norm_T)
    means_M = np.convolve(squares_T, np.ones(window) / window, "valid")
    variance_T = means_M[np.clip(np.arange(count) - half, 0, count - window)]
    return fit_T, t_quantile(0.975, window - 2) * np.sqrt(variance_T * norm_T)


@lru_cache(maxsize=4)
def _fit_weights(window: int) -> tuple[Floats, Floats]:
    """The weights with which the values of a window enter the line's value at its points from the first to the middle,
    a row each, and the sums of their squares."""
    at_H1 = np.arange(window // 2 + 1)[:, None]
    offset_HW = np.arange(window) - at_H1
    weight_HW = (1 - (np.abs(offset_HW) / (window - at_H1)) ** 3) ** 3
    s0, s1, s2 = ((weight_HW * offset_HW**power).sum(axis=1, keepdims=True) for power in (0, 1, 2))
    weights_HW = weight_HW * (s2 - s1 * offset_HW) / (s0 * s2 - s1**2)
    return weights_HW, (weights_HW**2).sum(axis=1)


def fitted_window(window: int, points: int) -> int:
    """The points of a fit that a curve of so many points can have: an odd number."""
    return min(window | 1, points - 1 + points % 2, MAX_WINDOW)


def window_for(points: int) -> int:
    """A window that suits a curve of so many points: a tenth, at most ``MAX_WINDOW``, and none below 30.

    >>> window_for(29), window_for(100), window_for(1000), window_for(100_000)
    (1, 11, 101, 2001)
    """
    return min(points // 10, MAX_WINDOW) | 1 if points >= 30 else 1


def common_window(runs: Iterable[Run], key: str) -> int:
    """A window that suits the shortest curve of several runs: a longer one would draw numbers that a short run never
    had. Runs without the metric do not count."""
    counts = (int((~np.isnan(run.column(key))).sum()) for run in runs)
    return window_for(min((count for count in counts if count), default=0))


# ----------------------------------------
# A curve of a run, with its band.


MAX_PROMPTS = 1e6
"""Prompts of a step; with more, the interval is as if there were so many."""
Z = NormalDist().inv_cdf(0.975)
GRID = 200
"""Points of a mean over runs whose points lie at different places."""
NOT_OF_A_GROUP = {name for name, mark in marks_of(GRPOConfig).items() if not mark.experiment}
"""Settings that two runs of one group need not share."""
NAMES = tuple(name for name, mark in marks_of(GRPOConfig).items() if mark.resume == "facts" and name != "model.path")
"""Settings that are names. Whether runs share what they stand for is in the facts: one file lies at several places."""
FACTS = ("prompts", "columns", "rewards", "tools", "code", "values")


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """A metric of a run, or the mean of several runs: arrays of float64 ``[T]``."""

    label: str
    key: str
    axis: str
    """One of ``AXES``."""
    x: Floats
    y: Floats
    """As logged; of a mean over runs, the mean of the smoothed curves."""
    line: Floats
    """What to draw first: the local linear fit of ``y`` (see ``loess``), or ``y`` if the curve is not smoothed."""
    low: Floats
    """Lower edge of the band around ``line``, NaN at points without one."""
    high: Floats
    band: str = ""
    """What the band is, in words; empty: there is none."""
    window: int = 1
    """Points of a fit; 1: not smoothed. Of a mean over runs, that of their curves."""
    runs: int = 1


def curve(run: Run, key: str, axis: str = "step", window: int = 1) -> Curve:
    """A metric of a run, named like its folder.

    Args:
        run: the run.
        key: the metric.
        axis: one of ``AXES``.
        window: points of a local linear fit (see ``loess``), at most ``MAX_WINDOW``. Below 3: no smoothing.

    Returns:
        The curve; without points if the run lacks the metric or the axis. Its band is that of the fit; without
        smoothing, the metric's own interval where the run logs what it takes (see ``interval``).

    Raises:
        ConfigError: the axis is unknown.
    """
    known = ~np.isnan(run.axis(axis)) & ~np.isnan(run.column(key))
    x, y = run.axis(axis)[known], run.column(key)[known]
    label, window = run.path.resolve().name, fitted_window(window, len(y)) if window >= 3 else 1
    if window >= 3:
        fit, half = loess(y, window)
        return Curve(label, key, axis, x, y, fit, fit - half, fit + half, "95% band of the fit", window)
    low, high, words = interval(run, key)
    low, high = low[known], high[known]
    return Curve(label, key, axis, x, y, y, low, high, "" if np.isnan(low).all() else words)


def interval(run: Run, key: str) -> tuple[Floats, Floats, str]:
    """The 95% interval of a metric in each row, float64 ``[T]``, NaN where the metrics do not tell, and what it is.

    An evaluation's mean has the logged interval over its prompts. A metric with a standard error ``KEY_se`` has ``value
    +- 1.96 se``: that error takes the tokens as independent, and is too small where the tokens of a completion go
    together. ``reward/mean`` has ``value +- t_{P-1} s`` over the step's P prompts: ``reward/std^2 -
    reward/within_group_std^2`` is at least the variance of the prompts' mean rewards, and s its root over P - 1. It is
    slightly too wide, because the root mean square within groups is above the mean that is logged.
    """
    mean = run.column(key)
    if key.endswith("/mean"):
        low, high = (run.column(key.removesuffix("/mean") + end) for end in ("/low", "/high"))
        known = ~np.isnan(mean + low + high)
        if known.any():
            low, high = (np.where(known, edge, np.nan) for edge in (low, high))
            return low, high, "confidence interval over the evaluation's prompts"
    if key == "reward/mean":
        spread, within, prompts = map(run.column, ("reward/std", "reward/within_group_std", "groups/sampled"))
        degrees = np.where(prompts >= 2, np.minimum(prompts, MAX_PROMPTS), np.nan) // 1 - 1
        quantile = np.array([math.nan if math.isnan(n) else t_quantile(0.975, int(n)) for n in degrees.tolist()])
        half = quantile * np.sqrt(np.maximum(0.0, spread**2 - within**2) / degrees)
        words = "95% interval over the step's prompts"
    else:
        half, words = Z * run.column(f"{key}_se"), "95% interval over the step's tokens, as if independent"
    return mean - half, mean + half, words


# ----------------------------------------
# Groups of runs that differ by their seed, and the means over them.


@dataclass(frozen=True, slots=True)
class Group:
    """Runs with equal settings apart from the seed."""

    label: str
    """What distinguishes the group from the others: "learning_rate 1e-05"; else the name of the folder."""
    runs: tuple[Run, ...]
    differs: dict[str, Any]
    """The settings that are not equal in all groups, with the values of this one; "absent" where there is none."""

    @property
    def seeds(self) -> list[Any]:
        """``run.seed`` of each run."""
        return [run.flat_settings().get("run.seed") for run in self.runs]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that have equal settings apart from the seed and from settings that do not change what is
    learned (names and places, report, ranks). Runs without settings stay alone, and so does a run of a group that has
    its seed already. Groups are in the order of their first runs.
    """
    settings = [_compared(run) for run in runs]
    groups: dict[str, list[int]] = {}
    for number, (run, one) in enumerate(zip(runs, settings, strict=True)):
        name, seed = repr(sorted(_identity(run, one).items())), run.flat_settings().get("run.seed")
        taken = [runs[other].flat_settings().get("run.seed") for other in groups.get(name, [])]
        groups.setdefault(f"{name}#{number}" if not one or seed in taken else name, []).append(number)
    first = [settings[numbers[0]] for numbers in groups.values()]
    known = dict.fromkeys(key for one in first for key in one)
    keys = [key for key in known if len({repr(one.get(key, "absent")) for one in first}) > 1]
    differs = [{key: one.get(key, "absent") for key in keys} for one in first]
    members = [[runs[number] for number in numbers] for numbers in groups.values()]
    labels = _labels(differs, members)
    return [Group(*parts) for parts in zip(labels, map(tuple, members), differs, strict=True)]


@cache
def default_settings() -> Mapping[str, Any]:
    """The default of every setting by ``section.key``, as ``config.toml`` writes it."""
    return dict(flat(tomllib.loads(to_toml(GRPOConfig()))))


def _compared(run: Run) -> dict[str, Any]:
    """The settings that runs of a group share, and the hash of the code, which is no setting."""
    kept = {key: value for key, value in run.flat_settings().items() if key not in NOT_OF_A_GROUP}
    return kept | ({"code": facts["code"]} if kept and "code" in (facts := _facts(run)) else {})


def _identity(run: Run, compared: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with facts in place of names, if the run has recorded them."""
    facts = _facts(run)
    if "prompts" not in facts:
        return dict(compared)
    kept = {key: value for key, value in compared.items() if not f"{key}.".startswith(tuple(f"{n}." for n in NAMES))}
    return kept | {f"fact {name}": facts[name] for name in FACTS if name in facts}


def _facts(run: Run) -> Mapping[str, Any]:
    facts = [one.get("facts") for one in run.starts[-1:]]
    return facts[0] if facts and isinstance(facts[0], dict) else {}


def _labels(differs: Sequence[Mapping[str, Any]], members: Sequence[Sequence[Run]]) -> list[str]:
    """What differs, if that is short and distinguishes the groups; else the names of the folders."""
    names = [one[0].path.resolve().name + (f" and {len(one) - 1} more" if len(one) > 1 else "") for one in members]
    texts = [", ".join(f"{key.rpartition('.')[2]} {_short(value)}" for key, value in one.items()) for one in differs]
    if len(members) > 1 and all(0 < len(text) <= 60 for text in texts) and len(set(texts)) == len(texts):
        return texts
    if len(set(names)) < len(names):
        names = [str(one[0].path) for one in members]
    return names


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 30 else f"...{text[-27:]}"


def check_key(runs: Sequence[Run], key: str) -> None:
    """Check that some run has a metric.

    Raises:
        ConfigError: none has; names the nearest.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.keys()))  # noqa: SIM118  (it is a method)
    if key in known:
        return
    if not known:
        raise ConfigError(f"{runs[0].path} has no metrics yet: no step is complete")
    near = difflib.get_close_matches(key, known, n=5, cutoff=0.5)
    near += [name for name in known if key in name and name not in near][: 5 - len(near)]
    some = f"there are {', '.join(known[:12])}, ... (see 'cohort docs metrics')"
    named = f"did you mean {', '.join(near)}?" if near else some
    raise ConfigError(f"no run has the metric {key!r}; {named}")


def means_of_groups(
    groups: Sequence[Group], key: str, axis: str = "step", window: int = 1
) -> list[tuple[Curve, list[Curve]]]:
    """For each group, the mean over its seeds and the curves of its runs; without points if it lacks the metric."""
    curves = [[curve(run, key, axis, window) for run in group.runs] for group in groups]
    return [(over_seeds(some, group.label), some) for group, some in zip(groups, curves, strict=True)]


def over_seeds(curves: Sequence[Curve], label: str) -> Curve:
    """The mean of the curves of runs that differ by their seed, at the places of ``aligned``.

    From three runs on, the band is the 95% interval of the mean over seeds, ``mean +- t_{n-1} s / sqrt(n)``; of two it
    shows both, because the interval of two is 12.7 standard errors wide.
    """
    filled = [one for one in curves if len(one.x)]
    if len(filled) < 2:
        return replace([*filled, *curves][0], label=label)
    x, lines_RT = aligned(filled)
    mean, count = lines_RT.mean(axis=0), len(filled)
    if count == 2:
        low, high, band = lines_RT.min(axis=0), lines_RT.max(axis=0), "range of 2 seeds"
    else:
        half = t_quantile(0.975, count - 1) * lines_RT.std(axis=0, ddof=1) / math.sqrt(count)
        low, high, band = mean - half, mean + half, f"95% interval of the mean over {count} seeds"
    return Curve(label, filled[0].key, filled[0].axis, x, mean, mean, low, high, band, filled[0].window, count)


def aligned(curves: Sequence[Curve]) -> tuple[Floats, Floats]:
    """Places that all curves cover, float64 ``[T]``, and their lines there, float64 ``[R, T]``.

    They are their own points if all have the same, the common ones if they share steps on the axis ``step`` or
    ``updates``, else ``GRID`` places of the range that all cover, by linear interpolation. Empty if the curves do not
    overlap.
    """
    first = curves[0]
    shared = reduce(np.intersect1d, (one.x for one in curves))
    low, high = max(one.x.min() for one in curves), min(one.x.max() for one in curves)
    if (first.axis in ("step", "updates") and len(shared) > 1) or all(np.array_equal(one.x, first.x) for one in curves):
        x = shared
    else:
        x = np.linspace(low, high, GRID) if high >= low else np.zeros(0)
    return x, np.array([np.interp(x, one.x, one.line) for one in curves])
