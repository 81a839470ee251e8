"""Several processes, called ranks, that train one policy. One rank initialises nothing.

Importing the room imports no torch: reward functions run in processes that do without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cohort.parallel.agree import agreed, on_main, together
from cohort.parallel.world import World, imbalance, prompt_shares, shares

if TYPE_CHECKING:
    from cohort.parallel.full import Full, layout_of
    from cohort.parallel.layout import Layout
    from cohort.parallel.sharded import Sharded

_MODULES = {"Full": "full", "Layout": "layout", "Sharded": "sharded", "layout_of": "full"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
