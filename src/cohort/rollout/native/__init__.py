"""What the sampler computes on a CPU in C, compiled at its first use; where that cannot be, the same is done in torch."""

from cohort.rollout.native.build import Unavailable
from cohort.rollout.native.cache import SlotCache
from cohort.rollout.native.decoder import Decoder
from cohort.rollout.native.kernels import DTYPES, Kernels

__all__ = ["DTYPES", "Decoder", "Kernels", "SlotCache", "Unavailable"]
