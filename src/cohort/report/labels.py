"""Plain words with units for metrics, on axes of plots and pages."""

from __future__ import annotations

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
    "tokens": "loss tokens per step",
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


def words_for(key: str) -> str:
    """A metric in words, with its unit; an unknown key as it is, with spaces.

    >>> words_for("eval/gsm8k/reward/mean"), words_for("seconds/update"), words_for("tokens/held_share")
    ('evaluation reward on gsm8k', 'seconds of update', 'tokens held share')
    """
    if key in WORDS:
        return WORDS[key]
    if key.startswith("eval/") and key.endswith("/mean"):
        return _evaluation(key.removeprefix("eval/").removesuffix("/mean"))
    if key.startswith("rewards/") and key.count("/") == 1:
        return f"training reward of {key.removeprefix('rewards/')}"
    if key.startswith("seconds/"):
        return f"seconds of {_spaced(key.removeprefix('seconds/'))}"
    return _spaced(key.removeprefix("custom/"))


def _evaluation(name: str) -> str:
    before, marker, function = name.partition("rewards/")
    if marker:
        words, name = f"reward of {function}", before.rstrip("/")
    else:
        name, _, column = name.rpartition("/")
        words = EVALUATED.get(column, column)
    return f"evaluation {words}" + (f" on {name}" if name else "")


def _spaced(name: str) -> str:
    return name.replace("/", " ").replace("_", " ")
