"""``cohort replay --train``: the updates of a step again, under the run's objective and under another, on copies of the
weights and of the optimizer's state from before the step. The run is not touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from cohort.errors import RunFolderError
from cohort.objective import Objective, k3
from cohort.policy import Policy
from cohort.replay.coefficients import Settings, laid_out
from cohort.replay.stored import Known, Stored
from cohort.replay.weights import Before, learning_rates, make_update, measured
from cohort.runs.models import check_saved, save_model


def check_output(output: Path, run: Path) -> None:
    """Check that a model can be written to a folder.

    Raises:
        RunFolderError: the folder is not empty, or in the run folder.
    """
    if output.resolve().is_relative_to(run.resolve()):
        raise RunFolderError(f"--output {output} is in the run folder, which a replay never changes: choose another")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RunFolderError(f"--output {output} is not empty: choose another folder")


def train(
    load: Callable[[], Before],
    stored: Stored,
    objective: Objective,
    settings: Settings,
    iterations: int,
    output: Path,
    after: Path,
) -> dict[str, Any]:
    """Repeat the updates of a step under both objectives, and write the model that the other one gives.

    Args:
        load: loads the models as before the step.
        stored: the step, with all log-probs that the objectives need.
        objective: the other objective.
        settings: those of the run.
        iterations: passes over the rollout.
        output: the folder of the model.
        after: the run's checkpoint after the step, which need not exist.

    Returns:
        In types of JSON, how far each moved the policy and how far apart they end: means over the stored tokens of k3,
        in nats.

    Raises:
        NonFiniteError: a value is not finite.
    """
    before_N, rates = None, learning_rates(stored)
    ends: dict[str, Known] = {}
    found: dict[str, Any] = {}
    for name in ("run", "replay"):
        before = load()
        context = before.context if name == "run" else before.under(objective)
        before_N = measured(before, stored, settings).logps_N if before_N is None else before_N
        laid = laid_out(stored, context.objective, settings)
        parts = zip(laid.minibatches * iterations, rates, strict=False)  # a group filter may leave fewer minibatches
        norms = [make_update(before, context, laid, part, rate) for part, rate in parts]
        ends[name] = measured(before, stored, settings)
        found[name] = {"grad_norms": norms, "update_kl": _distance(before_N, ends[name].logps_N)}
        if name == "run":
            found[name]["reproduced"] = _reproduced(context.policy, after)
        else:
            save_model(context.policy, before.tokenizer, output)
        del before, context
    found["between"] = _distance(ends["run"].logps_N, ends["replay"].logps_N)
    return found | {"output": str(output)}


def _distance(first_N: Tensor, second_N: Tensor) -> float | None:
    """Mean k3 of two policies over the tokens that are known of both."""
    known_N = ~(first_N.isnan() | second_N.isnan())
    return float(k3(first_N[known_N], second_N[known_N]).mean()) if bool(known_N.any()) else None


def _reproduced(policy: Policy, folder: Path) -> bool | None:
    """Whether the weights are those of the run's checkpoint, bit for bit; None: there is no such checkpoint."""
    if not folder.is_dir():
        return None
    try:
        check_saved(policy, folder)
    except RunFolderError:
        return False
    return True
