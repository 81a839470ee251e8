"""A face for scripts that are written for TRL."""
