"""Evaluation: held-out prompts, estimates with intervals, the best model, ``cohort eval``."""

from cohort.evaluation.best import Best
from cohort.evaluation.evaluate import Evaluation, Evaluator, check_settings
from cohort.statistics import Estimate
