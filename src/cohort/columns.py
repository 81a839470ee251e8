"""The format of ``rollouts/step-N.parquet``, for its writer and its reader; see ``docs/store.md``."""

STORE_VERSION = 1
"""Version of the columns, in each file's metadata. A reader refuses later ones."""
VERSION_KEY, FACTS_KEY = "cohort_store_version", "cohort_step"
"""Keys of the metadata: the version, and what holds for the whole step, as JSON."""
ALL_DIFFERENT = (
    *("sampler_logps", "full_logps", "old_logps", "ref_logps", "logps", "ratio", "policy_coefficient"),
    *("kl_coefficient", "entropy", "collision"),
)
"""Columns of floats that hardly repeat: split into bytes, without a dictionary, they take half the space and a fifth of
the time to write (benchmarks/recording.py)."""
TOKEN_NUMBERS = (*ALL_DIFFERENT, "weight", "kl_weight", "token_advantages", "token_rewards")
"""Columns with a number for each drawn token."""
PER_DRAWN_TOKEN = (*TOKEN_NUMBERS, "no_gradient")
"""Columns with an entry for each drawn token."""
