"""The local engine: samples with the trainer's own weights, in its own process."""
