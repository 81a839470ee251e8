"""Tools and environments: episodes of several turns."""

from typing import TYPE_CHECKING, Any

from cohort.environments.contract import Step

if TYPE_CHECKING:
    from cohort.environments.setup import Acting

__all__ = ["Acting", "Step"]


def __getattr__(name: str) -> Any:
    if name == "Acting":  # on demand: worker processes import this package and need no engine
        from cohort.environments.setup import Acting

        return Acting
    raise AttributeError(f"module 'cohort.environments' has no attribute {name!r}")
