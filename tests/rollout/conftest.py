"""The lean path has two ways to decode, in C and in torch: what a test says of one it says of both."""

import pytest

from cohort.native import Kernels, Unavailable


def drawn_ids(completion):
    """The drawn tokens of a completion, to compare and to count."""
    return tuple(completion.token_ids.tolist())


def cover(*lists):
    """Tuples in which each value of each list stands at least once; shorter lists are repeated. For parametrize."""
    return [tuple(values[n % len(values)] for values in lists) for n in range(max(map(len, lists)))]


def each_way(cases):
    """Cases for ``parametrize`` with ``native``, which is indirect: every suite runs each in one of the two ways, the
    slow one in both."""
    found = []
    for n, case in enumerate(cases):
        marks = getattr(case, "marks", ())
        values = case.values if hasattr(case, "marks") else case if isinstance(case, tuple) else (case,)
        chosen = (n + n // 2) % 2 == 0  # native, torch, torch, native: beside settings that alternate
        for native in (True, False):
            way = "native" if native else "torch"
            apart = [] if native is chosen else [pytest.mark.slow]
            found.append(pytest.param(*values, native, marks=[*marks, *apart], id=f"{n}-{way}-{values[0]}"))
    return found


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
