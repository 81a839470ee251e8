"""The command line."""

from cohort.cli.app import app
from cohort.cli.main import main

__all__ = ["app", "main"]
