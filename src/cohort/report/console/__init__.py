"""The terminal: a run described at its start, its progress while it trains, and ``cohort watch``.

This module imports nothing, so that ``cohort watch`` starts without torch.
"""
