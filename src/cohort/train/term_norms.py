"""The gradient norm of each term of the objective, measured."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.errors import NonFiniteError
from cohort.parallel import agreed
from cohort.policy.fused import uncompiled
from cohort.train.context import StepContext
from cohort.train.layout import Part, active_part
from cohort.train.sweep import share, sweep
from cohort.train.update import microbatch_losses, minibatch_weights
from cohort.types import TokenBatch


def term_norms(
    context: StepContext, batch: TokenBatch, minibatch: Part, entropy_coefficient: float = 0.0
) -> dict[str, float]:
    """The norms of the gradients of the policy, KL and entropy terms, and the cosine between the first two, which
    ``gradient/..._energy`` estimates. Costs a backward pass per term; the weights do not change. Empty if a value is
    not finite."""
    try:
        flat = term_gradients(context, batch, minibatch, entropy_coefficient)
    except NonFiniteError:  # the update will say so
        return {}
    metrics = {f"gradient/{name}_norm": float(vector.norm()) for name, vector in flat.items()}
    if "kl" in flat and metrics["gradient/policy_norm"] and metrics["gradient/kl_norm"]:
        product = metrics["gradient/policy_norm"] * metrics["gradient/kl_norm"]
        metrics["gradient/exact_cosine"] = float(flat["policy"] @ flat["kl"]) / product
    return metrics


@torch.enable_grad()
def term_gradients(
    context: StepContext, batch: TokenBatch, minibatch: Part, entropy_coefficient: float
) -> dict[str, Tensor]:
    """Each term's gradient in all trained parameters, end to end: "policy", "kl" and "entropy", as far as the objective
    has them. Each rank computes its share.

    Raises:
        NonFiniteError: a value is not finite.
    """
    policy = context.policy
    weights = minibatch_weights(context, batch, minibatch)
    part = active_part(batch, minibatch, context.objective, entropy_coefficient)
    shared = share(context, batch, part)
    weights = weights.at(part.positions_N).at(shared.own.positions_N)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sums: dict[str, Tensor] = {}

    def own_terms() -> list[str]:
        with policy.training(), policy.compute(), uncompiled():  # a graph serves several backward passes
            for micro, states, ref_states in sweep(context, policy, batch, shared, grad=True, attached=True):
                losses, _ = microbatch_losses(
                    context.objective, batch, micro, weights, states, ref_states, entropy_coefficient
                )
                for name, loss in losses.items():
                    grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
                    flat = torch.cat([grad.flatten() for grad in grads])
                    sums[name] = sums[name] + flat if name in sums else flat
        return list(sums)

    names = dict.fromkeys(name for some in agreed(context.world, own_terms) for name in some)
    empty = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=policy.device)
    return {name: context.world.sum_(sums.get(name, empty.clone())) for name in names}
