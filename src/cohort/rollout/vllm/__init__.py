"""vLLM servers as an engine, over HTTP: requests, weights, and the probe that compares servers with the policy. Cohort
does not import vLLM."""
