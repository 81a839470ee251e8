"""Training: the loop, the update, the optimizer, evaluation, the run folder."""

from cohort.train.adapt import Adaptive
from cohort.train.best import Best
from cohort.train.context import StepContext
from cohort.train.evaluate import Evaluation, Evaluator, check_settings, tried_prompts
from cohort.train.folder import RunFolder, save_model
from cohort.train.guard import NonFiniteLog, check_finite
from cohort.train.layout import Part, active_part, assign_advantages, lay_out, packs, part_of, split_minibatches
from cohort.train.logps import policy_logps
from cohort.train.loop import TrainerParts, evaluate_step, run
from cohort.train.memory import OutOfMemory, TokenBudget, find_budget
from cohort.train.optim import Optimizer
from cohort.train.random_state import set_seed
from cohort.train.rollout import Rollout
from cohort.train.setup import load_policy, local_engine
from cohort.train.statistics import Comparison, Estimate, compare
from cohort.train.update import NonFinite, UpdateResult, update

__all__ = [
    "Adaptive",
    "Best",
    "Comparison",
    "Estimate",
    "Evaluation",
    "Evaluator",
    "NonFinite",
    "NonFiniteLog",
    "Optimizer",
    "OutOfMemory",
    "Part",
    "Rollout",
    "RunFolder",
    "StepContext",
    "TokenBudget",
    "TrainerParts",
    "UpdateResult",
    "active_part",
    "assign_advantages",
    "check_finite",
    "check_settings",
    "compare",
    "evaluate_step",
    "find_budget",
    "lay_out",
    "load_policy",
    "local_engine",
    "packs",
    "part_of",
    "policy_logps",
    "run",
    "save_model",
    "set_seed",
    "split_minibatches",
    "tried_prompts",
    "update",
]
