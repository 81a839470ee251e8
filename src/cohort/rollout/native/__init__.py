"""Parts of a decode step in C, for CPUs, compiled at their first use. Where they are unavailable, torch is used."""

from cohort.native import Unavailable
from cohort.rollout.native.cache import SlotCache
from cohort.rollout.native.decoder import Decoder
from cohort.rollout.native.kernels import Kernels
