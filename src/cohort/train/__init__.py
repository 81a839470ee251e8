"""Training: the loop, the step's context, the layout of tokens, the update, the optimizer."""

from cohort.train.context import StepContext
from cohort.train.guard import NonFiniteLog, check_finite
from cohort.train.layout import (
    Part,
    Rollout,
    active_part,
    assign_advantages,
    lay_out,
    packs,
    part_of,
    split_minibatches,
)
from cohort.train.loop import run
from cohort.train.memory import TokenBudget, find_budget
from cohort.train.observers import Observer, Observers, Wishes
from cohort.train.optim import Optimizer
from cohort.train.parts import TrainerParts
from cohort.train.state import Adaptive, State
from cohort.train.sweep import policy_logps
from cohort.train.update import NonFinite, UpdateResult, update
