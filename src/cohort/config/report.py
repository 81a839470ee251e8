"""The section ``report``: output and diagnostics."""

from __future__ import annotations

from cohort.config.section import Count, PositiveInt, Section, Strings


class ReportConfig(Section):
    """Output and diagnostics."""

    progress: bool = True
    """Print a description of the run at its start, progress and evaluations. Off: print nothing."""
    log_completions: bool = True
    """Write the completions of each step to rollouts/step-N.parquet, with their rewards and what the updates saw of
    each token (docs/store.md), and those of evaluations to evaluations/."""
    store_steps: PositiveInt = 1
    """Write the completions of every this many steps."""
    store_groups: Count = 0
    """Number of groups of a step to write, chosen whatever their rewards are. 0: all."""
    skip_checks: Strings = ()
    """Checks to leave out, in `cohort doctor` and before a run, by their names, as in ["text"] (docs/doctor.md)."""
    check_saved: bool = True
    """Read back the weights of the last checkpoint and of best/ after writing, and compare them bit for bit with the
    trained ones."""
    term_norms_steps: Count = 0
    """Every this many steps, measure the gradient norm of each term (policy, KL, entropy) with a separate backward pass
    over the first minibatch. 0: never."""
    update_kl_completions: Count = 8
    """Number of completions per step on which to measure how far the step moved the policy (update_kl). 0: off."""
