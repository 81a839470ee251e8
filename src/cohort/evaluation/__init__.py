"""``cohort eval``: a model, data and rewards in; means with intervals out, and what of two models is better."""

from cohort.evaluation.request import Request
from cohort.evaluation.run import evaluate

__all__ = ["Request", "evaluate"]
