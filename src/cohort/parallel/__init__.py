"""Several processes, called ranks, that train one policy. One rank initialises nothing."""

from cohort.parallel.agree import agreed, on_main, together
from cohort.parallel.choose import layout_of
from cohort.parallel.full import Full, call_gathered, class_before_sharding, is_gathered
from cohort.parallel.layout import Layout, Replicate
from cohort.parallel.sharded import Sharded
from cohort.parallel.shares import shares
from cohort.parallel.world import World
