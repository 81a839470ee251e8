"""Training: the loop, the update, the optimizer, evaluation, the run folder."""

from cohort.train.batch import assemble, microbatches, policy_logps, select, split_minibatches
from cohort.train.evaluate import Estimate, Evaluation, Evaluator, confidence_interval
from cohort.train.folder import RunFolder, save_model
from cohort.train.loop import Parts, run
from cohort.train.optim import Optimizer
from cohort.train.update import UpdateResult, update

__all__ = [
    "Estimate",
    "Evaluation",
    "Evaluator",
    "Optimizer",
    "Parts",
    "RunFolder",
    "UpdateResult",
    "assemble",
    "confidence_interval",
    "microbatches",
    "policy_logps",
    "run",
    "save_model",
    "select",
    "split_minibatches",
    "update",
]
