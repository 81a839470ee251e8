"""vLLM in the trainer's process and servers over HTTP as an engine: turns, weights, and the probe that compares
them with the policy. Only ``colocated`` imports vLLM, when it starts it."""
