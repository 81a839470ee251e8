"""A model that a run loads when everything that is cheaper has been checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cohort.policy.load import read_configs


@dataclass(frozen=True, slots=True)
class DeferredModel:
    """Stands for a loaded model until ``load_policy``. For models that are loaded in another way than the settings
    say."""

    generation_config: Any
    config: Any
    load: Callable[[], Any]
    """Returns the model of transformers or peft."""

    @classmethod
    def of(cls, path: str, load: Callable[[], Any], *, trust_remote_code: bool = False) -> DeferredModel:
        """A model in a folder or of a hub id, whose configs are read now.

        Raises:
            ModelError: there is no such model.
        """
        return cls(*read_configs(path, trust_remote_code=trust_remote_code), load)
