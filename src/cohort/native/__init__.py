"""C kernels for CPUs: what decode steps and updates compute between their matrix products.

They are compiled at their first use. Where that is not possible, torch computes the same.
"""

from cohort.native.build import Unavailable, load
from cohort.native.calls import DTYPES, call, has_pairs, require, room, structure, threads_for, whole_rows
from cohort.native.packed import empty_packed, pack, packed_bias
