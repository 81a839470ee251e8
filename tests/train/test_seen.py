"""The record of a step's tokens: the first update that made a pass of a token stays."""

import torch

from cohort.objective import PRESETS, Coefficients, TokenStatistics, UpdateTokens, coefficients
from cohort.train import part_of
from cohort.train.update import NonFinite, UpdateResult, Updates, Used
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


def result(batch, minibatch, active, logp):
    of_update = used(batch, minibatch, active, logp)
    logps_N = torch.zeros(batch.num_tokens)
    return UpdateResult(TokenStatistics.of_idle(3, 0), logps_N, 0.0, 0.1, 0.0, used=of_update)


def test_the_first_pass_stays():
    """Four sequences of 2, 1, 3 and 2 tokens: one never used, one first used without a pass."""
    batch = make_batch([[2, 1], [3, 2]], [0.0] * 4)
    updates = Updates.none(batch, 0)
    updates.add(result(batch, [0, 1], [0], -1.0))
    updates.add(NonFinite("a value is NaN"))
    updates.add(result(batch, [2], [], -9.0))
    assert updates.update_S.tolist() == [0, 0, 2, -1]
    updates.add(result(batch, [0, 1, 2], [0, 1, 2], -2.0))
    updates.add(result(batch, [0, 1, 2], [0, 1, 2], -3.0))
    assert updates.update_S.tolist() == [0, 3, 3, -1]
    assert updates.passed_S.tolist() == [True, True, True, False]
    assert updates.values["logps"].tolist() == [-1.0, -1.0, -2.0, -2.0, -2.0, -2.0, 0.0, 0.0]
    assert updates.values["weight"].dtype == torch.float64
    assert [one is None for one in updates.outcomes] == [False, True, False, False, False]
    assert all(one.used is None for one in updates.results)  # the tensors of the passes are not kept
