"""The embedded task and model of ``cohort demo``."""
