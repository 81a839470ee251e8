"""The names of metrics, taken apart and in plain words with units, for axes of plots and pages."""

from __future__ import annotations

from collections.abc import Iterable

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
