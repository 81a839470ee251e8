"""Combinations of an update's terms, against the objective written out and differentiated by autograd."""

import math

import pytest
import torch

from cohort.objective import PRESETS
from tests.policy.plain import plain_rows
from tests.train.updates import batch_for, gradient, segments_of, shifted_policy

TRUNCATED = (1, 6, 9)
"""Truncated completions; objectives with ``truncated="mask"`` leave them out of the loss."""
BONUS = 0.3


def written_out(policy, reference, batch, objective, bonus):
    """The loss over the unmasked completions: clipped ratios at the tokens of highest entropy, the reverse KL over the
    vocabulary weighted by the ratios of the tokens before, and the mean entropy."""
    rows, start = [], 0
    for i, (prompt, ids) in enumerate(segments_of(batch)):
        tokens = slice(start, start + len(ids))
        start += len(ids)
        if i in TRUNCATED and objective.truncated == "mask":
            continue
        p, q = (torch.log_softmax(plain_rows(model, prompt, ids), -1) for model in (policy, reference))
        logps = p.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        anchor = {"old": batch.old_logps_N, "sampler": batch.sampler_logps_N}[objective.kl.anchor]
        rows.append(
            (p, q.detach(), logps - batch.old_logps_N[tokens], logps - anchor[tokens], batch.advantages_N[tokens])
        )
    entropies = [-(p.exp() * p).sum(-1) for p, *_ in rows]
    ordered = torch.cat(entropies).detach().sort(descending=True).values
    threshold = -1.0
    if objective.top_entropy < 1:
        kept = math.ceil(objective.top_entropy * len(ordered))
        threshold = ordered[kept - 1] - 1e-9
        assert ordered[kept] < threshold  # no tie, which rounding would decide
    loss = -bonus * torch.cat(entropies).mean()
    for entropy, (p, q, log_ratio, to_anchor, a) in zip(entropies, rows, strict=True):
        chosen = entropy.detach() >= threshold
        counted = int(chosen.sum()) if objective.denominator == "after_masks" else len(a)
        ratio = log_ratio.exp()
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        loss = loss - (surrogate * chosen).sum() / max(counted, 1) / batch.num_sequences
        prefix = torch.exp(to_anchor.cumsum(0) - to_anchor).detach()
        kl = (p.exp() * (p - q)).sum(-1)
        loss = loss + objective.beta * (prefix * kl).sum() / len(a) / batch.num_sequences
    return loss


ALL = {
    "beta": 0.5,
    "kl": {"estimator": "full", "correction": "prefix_product"},
    "top_entropy": 0.45,
    "truncated": "mask",
}
CASES = {
    "a bonus beside a mask": {"truncated": "mask"},
    "a KL of prefixes": {"beta": 0.5, "kl": {"estimator": "full", "correction": "prefix_product"}},
    "a KL of prefixes since the sampler": {
        "beta": 0.5,
        "kl": {"estimator": "full", "correction": "prefix_product", "anchor": "sampler"},
    },
    "all": ALL,
    "all, denominators after masks": ALL | {"denominator": "after_masks"},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_gradient_is_that_of_the_objective_written_out(float64_policy, changes):
    objective = PRESETS["default"].replace(**changes)
    bonus = BONUS if "truncated" in changes else 0.0  # without a bonus, groups of equal rewards have a KL only
    reference = shifted_policy()
    batch = batch_for(float64_policy, objective, truncated=TRUNCATED)
    got, _ = gradient(float64_policy, batch, objective, 20, reference=reference, entropy_coefficient=bonus)
    float64_policy.model.zero_grad()
    written_out(float64_policy, reference, batch, objective, bonus).backward()
    for one, parameter in zip(got, float64_policy.model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-10)  # sums of float64 in another order
