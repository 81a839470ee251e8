"""C kernels for CPUs: what decode steps and updates compute between their matrix products, and these products.

They are compiled at their first use. Where that is not possible, torch computes the same.
"""

from cohort.native.attention import Work, attend
from cohort.native.build import Unavailable, load
from cohort.native.calls import DTYPES, call, has_pairs, require, room, structure, threads_for, whole_rows
from cohort.native.decode import Kernels
from cohort.native.products import NativeProduct, PackedProduct, many_rows, multiplies, packed, packed_bias
