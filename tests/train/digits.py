"""Reward functions that workers import: they load no torch."""

from cohort import reward


def digits(completion, **_):
    return sum(ch.isdigit() for ch in completion) / (len(completion) + 1)


async def digits_async(completion, **_):
    return digits(completion)


@reward(per="group")
def digits_of_group(completions, **_):
    return [digits(text) for text in completions]
