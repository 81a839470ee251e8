"""The record of a step's tokens: the first update that made a pass of a token stays."""

import torch

from cohort.objective import PRESETS, Coefficients, TokenStatistics, UpdateTokens, coefficients
from cohort.train import part_of
from cohort.train.update import NonFinite, Seen, UpdateResult, Updates, Used
from tests.train.test_layout import make_batch


def used(batch, minibatch, active, logp):
    """What an update saw of the active ones of its sequences, in which every log-prob is ``logp``."""
    part = part_of(batch, active)
    logps_N = torch.full((part.num_tokens,), logp, dtype=torch.float32)
    weights_N = torch.full_like(logps_N, 0.5, dtype=torch.float64)
    terms = coefficients(PRESETS["default"], logps_N, torch.ones_like(weights_N), weights_N, sequence_N=part.sequence_N)
    assert isinstance(terms, Coefficients)
    tokens = UpdateTokens(
        logps_N=logps_N,
        entropy_N=-logps_N,
        collision_N=logps_N.exp(),
        advantages_N=torch.ones_like(weights_N),
        weights_N=weights_N,
        base_weights_N=weights_N,
        sequence_N=part.sequence_N,
        coefficients=terms,
        sampler_logps_N=logps_N.double(),
    )
    return Used(part_of(batch, minibatch), part, tokens if active else None)


def test_the_first_pass_stays():
    """Four sequences of 2, 1, 3 and 2 tokens: one never used, one first used without a pass."""
    batch = make_batch([[2, 1], [3, 2]], [0.0] * 4)
    seen = Seen.nothing(batch)
    seen.add(0, used(batch, [0, 1], [0], -1.0), batch.num_tokens)
    seen.add(2, used(batch, [2], [], -9.0), batch.num_tokens)  # update 1 was skipped
    assert seen.update_S.tolist() == [0, 0, 2, -1]
    seen.add(3, used(batch, [0, 1, 2], [0, 1, 2], -2.0), batch.num_tokens)
    seen.add(4, used(batch, [0, 1, 2], [0, 1, 2], -3.0), batch.num_tokens)
    assert seen.update_S.tolist() == [0, 3, 3, -1]
    assert seen.passed_S.tolist() == [True, True, True, False]
    assert seen.values["logps"].tolist() == [-1.0, -1.0, -2.0, -2.0, -2.0, -2.0, 0.0, 0.0]
    assert seen.values["weight"].dtype == torch.float64


def test_what_is_kept_of_an_update_has_no_tensors_of_its_passes():
    batch = make_batch([[2, 1]], [0.0] * 2)
    part, updates = part_of(batch, [0, 1]), Updates(0, Seen.nothing(batch))
    of_nothing = Used(part, part, None)
    updates.add(UpdateResult(TokenStatistics.of_idle(3, 0), torch.zeros(3), 0.0, 0.1, 0.0, used=of_nothing))
    assert updates.results[0].used is None
    updates.add(NonFinite("a value is NaN"))
    assert (updates.done, updates.skipped) == (2, [1])
