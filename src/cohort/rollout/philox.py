"""Counter-based random numbers: a number is a function of its key, not of how many were drawn before.

Philox4x32-10 turns a 64-bit key and a 128-bit counter into 128 random bits. Cohort's key is (seed, purpose) and its
counter is (step, prompt, sample, position). The number that decides a token does not depend on which other completions
are in the batch or on the order in which they are decoded.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Tested against the authors'
published vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox4x32 on arrays of 32-bit words (held in uint64). The four words broadcast against each other.

    >>> zero = np.zeros(1, np.uint64)
    >>> [hex(int(word[0])) for word in philox4x32((zero, zero, zero, zero), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


class Purpose(IntEnum):
    """What draws are for. Different purposes have different numbers."""

    TRAIN = 0
    EVAL = 1
    ENVIRONMENT = 2
    """Seeds of the environments of training."""
    EVAL_ENVIRONMENT = 3


@dataclass(frozen=True, slots=True)
class RNGKey:
    """Key of the random numbers of one call of an engine: those of a step of a run."""

    seed: int
    step: int
    purpose: Purpose = Purpose.TRAIN

    def uniforms(self, prompts_S: Words, samples_S: Words, start: int | Words, count: int) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1), shape ``[S, count]``, for positions ``start .. start + count - 1``.

        Args:
            prompts_S: ``Prompt.uid`` of each completion.
            samples_S: which completion of its prompt it is, 0..G-1.
            start: the first position; one for all, or one per completion.
            count: number of positions.

        >>> one = np.ones(1, np.uint64)
        >>> whole = RNGKey(7, 0).uniforms(one, one, 0, 4)
        >>> bool((RNGKey(7, 0).uniforms(one, one, 2, 2) == whole[:, 2:]).all())
        True
        """
        starts = np.array(start, dtype=np.uint64).reshape(-1, 1)
        positions: Words = np.add(starts, np.arange(count, dtype=np.uint64), dtype=np.uint64)
        step = np.full((1, 1), self.step, np.uint64)
        counter = (step, prompts_S[:, None] & _LOW, samples_S[:, None], positions)
        high, low, _, _ = philox4x32(counter, (self.seed, int(self.purpose)))
        # 53 bits, the precision of a double: the 27 highest of one word and the 26 highest of another.
        bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
        return bits.astype(np.float64) * 2.0**-53

    def request_seed(self, prompt_uid: int, sample: int, position: int) -> int:
        """The seed, below 2**63, with which another process draws the tokens of a turn.

        Args:
            prompt_uid: ``Prompt.uid``.
            sample: which completion of the prompt it is, 0..G-1.
            position: of the turn's first token in the trajectory.

        >>> RNGKey(7, 0).request_seed(1, 0, 0) == RNGKey(7, 0).request_seed(1, 0, 5)
        False
        """
        numbers = (self.step, prompt_uid & 0xFFFFFFFF, sample, position)
        step, prompt, own, start = (np.full(1, number, np.uint64) for number in numbers)
        high, low, _, _ = philox4x32((step, prompt, own, start), (self.seed, int(self.purpose)))
        return (int(high[0]) & 0x7FFFFFFF) << 32 | int(low[0])

    def environment_seed(self, prompt_uid: int, sample: int = 0) -> int:
        """A seed of a prompt's environments, below 2**32: that of sample 0 is for all samples that share one.

        >>> RNGKey(7, 0).environment_seed(1) == RNGKey(7, 0).environment_seed(2)
        False
        """
        purpose = Purpose.ENVIRONMENT if self.purpose is Purpose.TRAIN else Purpose.EVAL_ENVIRONMENT
        words = (np.full(1, word, np.uint64) for word in (self.step, prompt_uid & 0xFFFFFFFF, sample, 0))
        step, prompt, number, zero = words
        return int(philox4x32((step, prompt, number, zero), (self.seed, int(purpose)))[0][0])
