"""Philox against its authors' vectors; draws as functions of their key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.rollout.philox import Purpose, RNGKey, philox4x32

# Known answers published with Random123 (kat_vectors, philox4x32 10): counter, key, output.
ONES = 0xFFFFFFFF
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter, key, expected):
    words = philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)
    assert tuple(int(word[0]) for word in words) == expected


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(0, 10**6),
    keys=st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 99)), min_size=1, max_size=6, unique=True),
    start=st.integers(0, 500),
)
def test_a_draw_does_not_depend_on_its_neighbours(seed, step, keys, start):
    uids, samples = (np.array(column, np.uint64) for column in zip(*keys, strict=True))
    together = RNGKey(seed, step).uniforms(uids, samples, start, 7)
    for row in range(len(keys)):
        alone = RNGKey(seed, step).uniforms(uids[row : row + 1], samples[row : row + 1], start + 3, 2)
        assert alone.tolist() == together[row : row + 1, 3:5].tolist()


def test_every_part_of_the_key_matters():
    one, two = np.array([1], np.uint64), np.array([2], np.uint64)
    draws = [
        RNGKey(0, 0).uniforms(one, one, 0, 1),
        RNGKey(1, 0).uniforms(one, one, 0, 1),
        RNGKey(0, 1).uniforms(one, one, 0, 1),
        RNGKey(0, 0, Purpose.EVAL).uniforms(one, one, 0, 1),
        RNGKey(0, 0).uniforms(two, one, 0, 1),
        RNGKey(0, 0).uniforms(one, two, 0, 1),
        RNGKey(0, 0).uniforms(one, one, 1, 1),
    ]
    assert len({float(draw[0, 0]) for draw in draws}) == len(draws)


def test_uniforms_are_uniform():
    uids = np.arange(1000, dtype=np.uint64)
    values = RNGKey(3, 4).uniforms(uids, np.zeros_like(uids), 0, 100).ravel()
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; the draw is fixed
