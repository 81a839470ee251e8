"""The lean path has two ways to decode, in C and in torch: what a test says of one it says of both."""

import pytest

from cohort.rollout.native import Kernels, Unavailable


def drawn_ids(completion):
    """The drawn tokens of a completion, to compare and to count."""
    return tuple(completion.token_ids.tolist())


def cover(*lists):
    """Tuples in which each value of each list stands at least once; shorter lists are repeated. For parametrize."""
    return [tuple(values[n % len(values)] for values in lists) for n in range(max(map(len, lists)))]


class Way:
    """What tests make engines with: a test that asks for ``native`` runs once with each."""

    native = True


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def native(request, monkeypatch):
    if request.param:
        try:
            Kernels()
        except Unavailable as reason:
            pytest.skip(f"no native kernels: {reason}")
    monkeypatch.setattr(Way, "native", request.param)
    return request.param
