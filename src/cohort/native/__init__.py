"""Kernels in C, for CPUs: what decode steps and updates do between their matrix products.

They are compiled at their first use. Where that cannot be, torch does the same.
"""

from cohort.native.build import Unavailable, load
from cohort.native.calls import fields, threads_for

__all__ = ["Unavailable", "fields", "load", "threads_for"]
