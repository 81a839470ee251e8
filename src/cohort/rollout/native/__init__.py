"""Decode steps whose operations between matrix products run in C. Where that is not possible, torch is used."""

from cohort.rollout.native.cache import SlotCache
from cohort.rollout.native.decoder import Decoder
