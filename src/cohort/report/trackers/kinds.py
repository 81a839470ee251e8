"""The trackers by name: what must be installed, and where their own settings name the project."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass

from cohort.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Kind:
    """A tracker."""

    title: str
    package: str
    """The name under which its library is imported."""
    project_variable: str | None
    """The environment variable with which its users name the project."""
    says_step: bool = False
    """Whether a run that is opened again says which steps arrived."""

    def project(self, given: str | None) -> str:
        """The project of a run: as given, by the tracker's environment variable, or "cohort"."""
        return given or (self.project_variable and os.environ.get(self.project_variable)) or "cohort"


KINDS = {
    "tensorboard": Kind("TensorBoard", "tensorboard", None),
    "wandb": Kind("W&B", "wandb", "WANDB_PROJECT", says_step=True),
    "mlflow": Kind("MLflow", "mlflow", "MLFLOW_EXPERIMENT_NAME"),
    "trackio": Kind("trackio", "trackio", "TRACKIO_PROJECT"),
    "swanlab": Kind("SwanLab", "swanlab", "SWANLAB_PROJECT"),
    "comet": Kind("Comet", "comet_ml", "COMET_PROJECT_NAME"),
}


def check_installed(names: Iterable[str]) -> None:
    """Check that trackers exist and can be imported.

    Raises:
        ConfigError: one is unknown, or not installed; names the extra to install.
    """
    for name in names:
        if name not in KINDS:
            hint = did_you_mean(name, KINDS, form="{!r}") or f"; the trackers are {', '.join(KINDS)}"
            raise ConfigError(f"unknown tracker {name!r}{hint}")
        for package in (KINDS[name].package, "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"the tracker {name!r} needs {package}, which is not installed: pip install 'cohort-rl[{name}]'"
                )
