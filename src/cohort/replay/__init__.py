"""``cohort replay``: the stored rollouts of a run under another objective, without sampling.

``stored`` reads a step, ``coefficients`` computes what an objective makes of it, ``compare`` puts two of them side by
side. ``weights`` loads the model from before the step, for gradients in the space of the parameters, and makes the
updates between.
"""

from cohort.replay.compare import Replayed, coefficients_of
from cohort.replay.stored import Stored, read_step
