"""Tools and environments: episodes of several turns."""

from cohort.environments.contract import Step
