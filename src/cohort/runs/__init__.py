"""A run's folder: settings, metrics, completions, checkpoints.

This module imports nothing, so that what only reads a run folder (``cohort watch``, ``report``, ``diagnose``) starts
without torch.
"""
