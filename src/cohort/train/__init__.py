"""Training: the loop, the update, the optimizer, evaluation, the run folder."""

from cohort.train.adapt import Adaptive
from cohort.train.batch import (
    assemble,
    assign_advantages,
    select,
    split_minibatches,
)
from cohort.train.evaluate import Estimate, Evaluation, Evaluator, confidence_interval
from cohort.train.folder import RunFolder, save_model
from cohort.train.guard import Guard, check_finite
from cohort.train.loop import Parts, run
from cohort.train.memory import TokenBudget, find_budget
from cohort.train.optim import Optimizer
from cohort.train.packing import Pack, packs, policy_logps, policy_statistics
from cohort.train.rollout import Rollout
from cohort.train.update import UpdateResult, update

__all__ = [
    "Adaptive",
    "Estimate",
    "Evaluation",
    "Evaluator",
    "Guard",
    "Optimizer",
    "Pack",
    "Parts",
    "Rollout",
    "RunFolder",
    "TokenBudget",
    "UpdateResult",
    "assemble",
    "assign_advantages",
    "check_finite",
    "confidence_interval",
    "find_budget",
    "packs",
    "policy_logps",
    "policy_statistics",
    "run",
    "save_model",
    "select",
    "split_minibatches",
    "update",
]
