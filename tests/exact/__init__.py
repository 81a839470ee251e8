"""Exact expectations: every sequence, or every group of sequences, of a tiny vocabulary with its probability."""
