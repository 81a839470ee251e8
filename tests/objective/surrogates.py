"""The presets' objectives as their papers print them, by loops over completions and tokens.

Each is a differentiable function of the current log-probs ``lp``, to be maximised, with its numbers written out. None
uses a rule of ``cohort.objective``. ``b`` is a batch, ``i`` a completion, ``n`` a token's place, ``fixed`` stops the
gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.objective.batches import Batch

Surrogate = Callable[[Batch, Tensor], Tensor]
Term = Callable[[int, int], Tensor]


def fixed(value: Tensor) -> Tensor:
    return value.detach()


# Means over tokens --------------------------------------------------------------------------------------------------


def seq_mean(b: Batch, term: Term) -> Tensor:
    """(1/B) sum_i (1/|o_i|) sum_t"""
    return sum(term(i, n) / len(tokens) for i, tokens in enumerate(b.tokens) for n in tokens) / len(b.tokens)


def token_mean(b: Batch, term: Term) -> Tensor:
    """(1/sum|o|) sum_i sum_t"""
    return sum(term(i, n) for i, tokens in enumerate(b.tokens) for n in tokens) / len(b.sequence_N)


def constant(b: Batch, term: Term) -> Tensor:
    """(1/B) sum_i (1/L) sum_t"""
    return sum(term(i, n) / b.length for i, tokens in enumerate(b.tokens) for n in tokens) / len(b.tokens)


def seq_sum(b: Batch, term: Term) -> Tensor:
    """(1/B) sum_i sum_t"""
    return sum(term(i, n) for i, tokens in enumerate(b.tokens) for n in tokens) / len(b.tokens)


def prompt_mean(b: Batch, term: Term) -> Tensor:
    """(1/P) sum_groups (1/sum_{i in group}|o_i|) sum_i sum_t"""
    groups = sorted(set(b.group_S.tolist()))
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        members = [i for i, of in enumerate(b.group_S.tolist()) if of == group]
        count = sum(len(b.tokens[i]) for i in members)
        total = total + sum(term(i, n) / count for i in members for n in b.tokens[i])
    return total / len(groups)


# Ratios -------------------------------------------------------------------------------------------------------------


def geometric(b: Batch, lp: Tensor, i: int) -> Tensor:
    """(pi(o_i) / pi_old(o_i))^(1/|o_i|)"""
    tokens = b.tokens[i]
    return torch.exp(sum(lp[n] - b.old[n] for n in tokens) / len(tokens))


def product(lp: Tensor, anchor: Tensor, tokens: list[int]) -> Tensor:
    return torch.exp(sum((lp[n] - anchor[n] for n in tokens), torch.zeros((), dtype=torch.float64)))


# Policy terms -------------------------------------------------------------------------------------------------------


def min_clip(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.min(r * a, torch.clamp(r, low, high) * a)


def ppo(mean, low: float, high: float, anchor: str = "old") -> Surrogate:
    """PPO's clip per token."""

    def surrogate(b, lp):
        to = getattr(b, anchor)
        return mean(b, lambda i, n: min_clip(torch.exp(lp[n] - to[n]), b.advantages_S[i], low, high))

    return surrogate


def two_sided(mean, low: float, high: float, delta: float) -> Surrogate:
    """INTELLECT-2: min(min(r, delta) A, clip(r) A)"""

    def term(r, a):
        return torch.min(torch.clamp(r, max=delta) * a, torch.clamp(r, low, high) * a)

    return lambda b, lp: mean(b, lambda i, n: term(torch.exp(lp[n] - b.old[n]), b.advantages_S[i]))


def v32(b: Batch, lp: Tensor) -> Tensor:
    """DeepSeek-V3.2's policy term: the clip against the sampler, and M_i = 0 iff A_i < 0 and mean log(mu/pi) > 0.5."""

    def keeps(i):
        gap = sum(b.sampler[n] - fixed(lp[n]) for n in b.tokens[i]) / len(b.tokens[i])
        return 0.0 if b.advantages_S[i] < 0 and gap > 0.5 else 1.0

    return seq_mean(b, lambda i, n: keeps(i) * min_clip(torch.exp(lp[n] - b.sampler[n]), b.advantages_S[i], 0.8, 1.2))


def rloo(b: Batch, lp: Tensor) -> Tensor:
    """(1/B) sum_i min(W_i A_i, clip(W_i) A_i)"""
    terms = [
        min_clip(product(lp, b.old, b.tokens[i]), a, 0.8, 1.2) for i, a in enumerate(b.advantages_S) if b.tokens[i]
    ]
    return sum(terms) / len(b.tokens)


def gspo(low: float, high: float, by_length: bool = False) -> Surrogate:
    """(1/B) sum_i min(g_i A_i, clip(g_i) A_i), and in LUSPO times |o_i|."""

    def surrogate(b, lp):
        full = [i for i, tokens in enumerate(b.tokens) if tokens]
        terms = [
            min_clip(geometric(b, lp, i), b.advantages_S[i], low, high) * (len(b.tokens[i]) if by_length else 1)
            for i in full
        ]
        return sum(terms) / len(b.tokens)

    return surrogate


def gspo_token(low: float, high: float) -> Surrogate:
    """g_it = sg(g_i) pi_t / sg(pi_t), a gradient per token."""

    def surrogate(b, lp):
        def ratio(i, n):
            return fixed(geometric(b, lp, i)) * torch.exp(lp[n] - fixed(lp[n]))

        return seq_mean(b, lambda i, n: min_clip(ratio(i, n), b.advantages_S[i], low, high))

    return surrogate


def gmpo(epsilon: float) -> Surrogate:
    """(1/B) sum_i A_i exp(mean of min or max [log r, clip(log r, -e, e)], by the sign of A)"""

    def surrogate(b, lp):
        total = torch.zeros((), dtype=torch.float64)
        for i, tokens in enumerate(b.tokens):
            a = b.advantages_S[i]
            pick = torch.min if a > 0 else torch.max
            logs = [lp[n] - b.old[n] for n in tokens]
            held = [pick(log, torch.clamp(log, -epsilon, epsilon)) for log in logs]
            total = total + (a * torch.exp(sum(held) / len(held)) if held else 0)
        return total / len(b.tokens)

    return surrogate


def cispo(mean, low: float, high: float) -> Surrogate:
    """mean of sg(clip(r)) A log pi"""

    def term(b, lp, i, n):
        return fixed(torch.clamp(torch.exp(lp[n] - b.old[n]), low, high)) * b.advantages_S[i] * lp[n]

    return lambda b, lp: mean(b, lambda i, n: term(b, lp, i, n))


def ce_gppo(b: Batch, lp: Tensor) -> Tensor:
    """mean over tokens of r A; where PPO clips, beta (bound / sg(r)) r A, beta 0.75 below and 1 above"""

    def term(r, a):
        if a < 0 and r < 0.8:
            return 0.75 * 0.8 / fixed(r) * r * a
        return 1.0 * 1.2 / fixed(r) * r * a if a > 0 and r > 1.2 else r * a

    return token_mean(b, lambda i, n: term(torch.exp(lp[n] - b.old[n]), b.advantages_S[i]))


def topr(b: Batch, lp: Tensor) -> Tensor:
    """(1/B) sum over A >= 0 of A log pi(o) + (1/B) sum over A < 0 of sg(min(pi(o) / pi_old(o), 1)) A log pi(o)"""

    def weight(i):
        return 1.0 if b.advantages_S[i] >= 0 else torch.clamp(fixed(product(lp, b.old, b.tokens[i])), max=1.0)

    return seq_sum(b, lambda i, n: weight(i) * b.advantages_S[i] * lp[n])


def sapo(up: float, down: float) -> Surrogate:
    """mean of sigmoid(tau (r - 1)) (4 / tau) A"""

    def term(r, a):
        tau = up if a > 0 else down
        return 1 / (1 + torch.exp(-tau * (r - 1))) * 4 / tau * a

    return lambda b, lp: seq_mean(b, lambda i, n: term(torch.exp(lp[n] - b.old[n]), b.advantages_S[i]))


def vespo(b: Batch, lp: Tensor) -> Tensor:
    """mean over tokens of sg(W^k e^(lambda (1 - W))) A log pi, W to the sampler"""

    def term(i, n):
        k, lam = (2, 3) if b.advantages_S[i] >= 0 else (3, 2)
        w = fixed(product(lp, b.sampler, b.tokens[i]))
        return w**k * torch.exp(lam * (1 - w)) * b.advantages_S[i] * lp[n]

    return token_mean(b, term)


def dppo(keeps, cap: float = 20.0) -> Surrogate:
    """mean over tokens of sg(M min(pi / mu, cap)) pi / sg(pi) A, with a mask M of probabilities p and mu"""

    def surrogate(b, lp):
        def term(i, n):
            p, mu, a = fixed(torch.exp(lp[n])), torch.exp(b.sampler[n]), b.advantages_S[i]
            weight = torch.clamp(p / mu, max=cap) if keeps(p, mu, a) else torch.zeros(())
            return weight * torch.exp(lp[n] - fixed(lp[n])) * a

        return token_mean(b, term)

    return surrogate


def within_tv(p: Tensor, mu: Tensor, a: Tensor) -> bool:
    return not (a > 0 and p - mu > 0.15) and not (a < 0 and mu - p > 0.15)


def within_kl(p: Tensor, mu: Tensor, a: Tensor) -> bool:
    kl = mu * torch.log(mu / p) + (1 - mu) * torch.log((1 - mu) / (1 - p))
    moves_away = p > mu if a > 0 else p < mu
    return not (kl > 0.05 and moves_away)


POLICY: dict[str, Surrogate] = {
    "default": ppo(seq_mean, 0.8, 1.2),
    "grpo": ppo(seq_mean, 0.8, 1.2),
    "grpo_r1": ppo(seq_mean, 1 - 10, 1 + 10),
    "grpo_v32": v32,
    "dr_grpo": ppo(constant, 0.8, 1.2),
    "bnpo": ppo(token_mean, 0.8, 1.2),
    "dapo": ppo(token_mean, 0.8, 1.28),
    "lite_ppo": ppo(token_mean, 0.8, 1.2),
    "rloo": rloo,
    "reinforce_pp": ppo(token_mean, 0.8, 1.2),
    "reinforce_pp_baseline": ppo(token_mean, 0.8, 1.2),
    "gspo": gspo(1 - 3e-4, 1 + 4e-4),
    "gspo_token": gspo_token(1 - 3e-4, 1 + 4e-4),
    "luspo": gspo(1 - 2e-3, 1 + 2.5e-3, by_length=True),
    "gmpo": gmpo(0.4),
    "cispo": cispo(token_mean, 0, 5),
    "scalerl": cispo(prompt_mean, 0, 5),
    "sapo": sapo(1.0, 1.05),
    "vespo": vespo,
    "dppo_tv": dppo(within_tv),
    "dppo_kl": dppo(within_kl),
    "maxrl": ppo(seq_sum, 0.8, 1.2),
    "intellect2": two_sided(token_mean, 0.8, 1.2, 4.0),
    "gdpo": ppo(token_mean, 0.8, 1.2),
    "mo_grpo": ppo(token_mean, 0.8, 1.2),
    "gfpo": ppo(token_mean, 0.8, 1.2),
    "w_reinforce": ppo(token_mean, 0.8, 1.2),
    "passk": ppo(seq_sum, 0.8, 1.2),
    "ce_gppo": ce_gppo,
    "topr": topr,
}
"""Of each preset."""
TO_SAMPLER = ("grpo_v32", "vespo", "dppo_tv", "dppo_kl")
"""Those whose ratios, the KL's too, are to the sampler."""
MEAN = {
    **dict.fromkeys(POLICY, token_mean),
    **dict.fromkeys(("default", "grpo", "grpo_r1", "grpo_v32", "gspo", "gspo_token", "gmpo", "sapo"), seq_mean),
    **dict.fromkeys(("rloo", "luspo", "maxrl", "passk", "topr"), seq_sum),
    "dr_grpo": constant,
    "scalerl": prompt_mean,
}
"""The mean that the KL term of each preset is."""


# KL terms (to be subtracted, times beta) ----------------------------------------------------------------------------


def kl_k3(mean) -> Surrogate:
    """k3 as a loss: DeepSeekMath eq. 4"""
    return lambda b, lp: mean(b, lambda i, n: torch.exp(b.ref[n] - lp[n]) - (b.ref[n] - lp[n]) - 1)


def kl_k2(mean) -> Surrogate:
    return lambda b, lp: mean(b, lambda i, n: (lp[n] - b.ref[n]) ** 2 / 2)


def kl_unbiased(mean, anchor: str = "old") -> Surrogate:
    """r k3 with the ratio in the graph: DeepSeek-V3.2's unbiased estimate"""

    def term(b, lp, n):
        d = b.ref[n] - lp[n]
        return torch.exp(lp[n] - getattr(b, anchor)[n]) * (torch.exp(d) - d - 1)

    return lambda b, lp: mean(b, lambda i, n: term(b, lp, n))


def kl_of(name: str) -> Surrogate | None:
    """The KL term of a preset; None: it is in the reward."""
    if name in ("rloo", "reinforce_pp"):
        return None
    if name in ("grpo", "grpo_r1", "intellect2"):
        return kl_k3(MEAN[name])
    if name == "reinforce_pp_baseline":
        return kl_k2(MEAN[name])
    return kl_unbiased(MEAN[name], "sampler" if name in TO_SAMPLER else "old")


def gradient_of(surrogate: Surrogate, batch: Batch) -> tuple[Tensor, float]:
    """Gradient with respect to each token's log-prob, by autograd, and the value."""
    leaf = batch.logps.clone().requires_grad_()
    value = surrogate(batch, leaf)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if gradient is None else gradient, value.item()
