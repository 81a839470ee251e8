"""``cohort generate``: sample completions of prompts, to the terminal or to a file."""
