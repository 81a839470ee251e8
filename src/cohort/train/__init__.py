"""Training: the loop, the update, the optimizer, evaluation, the run folder."""

from cohort.train.adapt import Adaptive
from cohort.train.batch import (
    assemble,
    assign_advantages,
    microbatches,
    policy_logps,
    policy_statistics,
    select,
    split_minibatches,
)
from cohort.train.evaluate import Estimate, Evaluation, Evaluator, confidence_interval
from cohort.train.folder import RunFolder, save_model
from cohort.train.loop import Parts, run
from cohort.train.optim import Optimizer
from cohort.train.rollout import Rollout
from cohort.train.update import UpdateResult, update

__all__ = [
    "Adaptive",
    "Estimate",
    "Evaluation",
    "Evaluator",
    "Optimizer",
    "Parts",
    "Rollout",
    "RunFolder",
    "UpdateResult",
    "assemble",
    "assign_advantages",
    "confidence_interval",
    "microbatches",
    "policy_logps",
    "policy_statistics",
    "run",
    "save_model",
    "select",
    "split_minibatches",
    "update",
]
