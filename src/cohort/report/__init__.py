"""What a run shows."""
