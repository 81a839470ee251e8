"""Training: the loop, the update, the optimizer, evaluation, the run folder."""

from cohort.train.adapt import Adaptive
from cohort.train.batch import (
    assemble,
    assign_advantages,
    select,
    split_minibatches,
)
from cohort.train.best import Best
from cohort.train.evaluate import Evaluation, Evaluator, check_settings, tried_prompts
from cohort.train.folder import RunFolder, save_model
from cohort.train.guard import Guard, check_finite
from cohort.train.loop import Parts, evaluate_step, run
from cohort.train.memory import TokenBudget, find_budget
from cohort.train.optim import Optimizer
from cohort.train.packing import Pack, packs, policy_logps, policy_statistics
from cohort.train.random_state import set_seed
from cohort.train.rollout import Rollout
from cohort.train.setup import load_policy, local_engine
from cohort.train.statistics import Comparison, Estimate, compare
from cohort.train.update import UpdateResult, update

__all__ = [
    "Adaptive",
    "Best",
    "Comparison",
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
    "check_settings",
    "compare",
    "evaluate_step",
    "find_budget",
    "load_policy",
    "local_engine",
    "packs",
    "policy_logps",
    "policy_statistics",
    "run",
    "save_model",
    "select",
    "set_seed",
    "split_minibatches",
    "tried_prompts",
    "update",
]
