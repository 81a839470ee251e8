"""Several processes, called ranks, that train one policy. One rank initialises nothing."""

from cohort.parallel.agree import agreed, on_main, together
from cohort.parallel.layout import Layout, Replicate, layout_of
from cohort.parallel.shares import shares
from cohort.parallel.world import World
