"""Two objectives on one stored step, side by side: pure functions of their coefficients.

The gradient in the space of the logits has one block per token, c_n (onehot - p_n), so that

    <g, h> = sum_n c_n d_n E_n          E_n = |onehot - p_n|^2 = 1 - 2 p_n + sum_v p_nv^2

for the coefficients c and d of two gradients. It ignores that tokens share the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cohort.errors import NonFiniteError, RunFolderError
from cohort.objective import Cause, Objective, coefficients, segment_sum, top_entropy_tokens
from cohort.replay.stored import Stored
from cohort.train import Part, Rollout, active_part, assign_advantages, lay_out, packs, part_of, split_minibatches
from cohort.train.update import at_tokens, term_weights
from cohort.types import TokenBatch

# ----------------------------------------
# What an objective makes of a stored step: advantages, coefficients, causes. Pure: no model, no settings file.


LEFT_OUT = -1
"""In the place of a ``Cause``: no update uses the completion."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The step under an objective. Shape ``[N]`` each, on the axis of the stored step."""

    policy_N: Tensor
    """The policy term's coefficient; 0 where no update uses the token."""
    kl_N: Tensor
    cause_N: Tensor
    """int8: a ``Cause``, or ``LEFT_OUT``."""
    advantages_N: Tensor
    is_used_S: Tensor
    """Whether the updates use the completion."""

    @property
    def total_N(self) -> Tensor:
        """c_N, float64."""
        return (self.policy_N + self.kl_N).double()


@dataclass(frozen=True, slots=True)
class Laid:
    """A stored step as an objective's updates see it."""

    stored: Stored
    batch: TokenBatch
    minibatches: list[Part]
    """Of one pass over the rollout."""
    used_S: list[int]
    """The completions in the batch, by their places in the stored step."""
    tokens_N: Tensor
    """Where the batch's tokens lie on the axis of the stored step."""

    def on_axis(self, values_N: Tensor, elsewhere: float) -> Tensor:
        """The batch's values on the axis of the stored step, and a number in the other places."""
        found_N = torch.full((len(self.stored.known.logps_N),), elsewhere, dtype=values_N.dtype)
        found_N[self.tokens_N] = values_N.cpu()
        return found_N


def coefficients_of(stored: Stored, objective: Objective) -> Replayed:
    """The coefficients that the first pass of updates over a stored step has under an objective.

    Under the objective of the run they are the stored ones, bit for bit, if the device is the run's. On a CPU, the last
    bit of a sigmoid depends on the token's place in the pass, so passes are cut as the run's updates cut them.

    Args:
        stored: the step. Where the objective needs a log-prob that is NaN, so is the coefficient.
        objective: any objective, with the beta of the step.

    Raises:
        RunFolderError: the objective needs what is not stored.
        RewardError: the objective refuses the stored rewards, as scale "group_mean" refuses negative ones.
    """
    laid = laid_out(stored, objective)
    batch = laid.batch
    logps_N = stored.known.logps_N[laid.tokens_N].to(stored.device, stored.dtype)
    policy_N, kl_N = torch.zeros_like(logps_N), torch.zeros_like(logps_N)
    cause_N = torch.where(batch.loss_N, int(Cause.NO_ADVANTAGE), int(Cause.MASKED)).to(torch.int8)
    for minibatch in laid.minibatches:
        chosen_N = _chosen(laid, minibatch, objective)
        weights = term_weights(objective, batch, minibatch, chosen_N)
        active = active_part(batch, minibatch, objective)
        passes = packs(batch, active, stored.facts.microbatch_tokens, shared=stored.facts.shared_prompts)
        for one in (active.select(torch.tensor(cut)) for pack in passes for cut in pack.microbatches):
            at_N, of_one = one.tokens_N, weights.at(active.positions_N).at(one.positions_N)
            found = coefficients(
                objective,
                logps_N[at_N],
                batch.advantages_N[at_N],
                of_one.policy_N,
                sequence_N=one.sequence_N,
                old_logps_N=at_tokens(batch.old_logps_N, at_N),
                sampler_logps_N=batch.sampler_logps_N[at_N],
                ref_logps_N=at_tokens(batch.ref_logps_N, at_N),
                base_weights_N=of_one.base_N,
            )
            policy_N[at_N], kl_N[at_N], cause_N[at_N] = found.policy_N, found.kl_N, found.cause_N
    is_used_S = torch.zeros(len(stored.is_used_S), dtype=torch.bool)
    is_used_S[laid.used_S] = True
    found_N = laid.on_axis(policy_N, 0), laid.on_axis(kl_N, 0), laid.on_axis(cause_N, LEFT_OUT)
    return Replayed(*found_N, laid.on_axis(batch.advantages_N, 0), is_used_S)


def laid_out(stored: Stored, objective: Objective) -> Laid:
    """The batch of a stored step under an objective, and its minibatches."""
    if objective.credit in ("given", "process") and stored.scores.token_rewards_N is None:
        raise RunFolderError(
            f"credit {objective.credit!r} needs a reward for each token, and {stored.path.name} has none: the run's "
            "reward functions score whole completions"
        )
    rollout = Rollout.of(stored.groups, stored.scores, objective)
    used_S = rollout.used_S
    batch = lay_out(rollout.used_groups, stored.device)
    starts_S = stored.lengths_S.cumsum(0) - stored.lengths_S
    spans = [torch.arange(count) + starts_S[s] for s, count in zip(used_S, batch.lengths_S.tolist(), strict=True)]
    tokens_N = torch.cat([torch.zeros(0, dtype=torch.long), *spans])
    known = stored.known

    def of_batch(values_N: Tensor) -> Tensor:
        return values_N[tokens_N].to(stored.device, stored.dtype)

    old_N, ref_N = of_batch(known.old_logps_N), of_batch(known.ref_logps_N)
    needs_ref = objective.beta != 0 and objective.kl.estimator == "sampled"
    if needs_ref and bool(ref_N.isnan().any()):
        raise RunFolderError(_no_reference(stored, objective, int(ref_N.isnan().sum()), len(ref_N)))
    if objective.advantages_need_logps and not stored.has_old_logps:
        old_N = of_batch(known.logps_N)  # a single update: the old policy is the current one
    has_old = stored.has_old_logps or objective.advantages_need_logps
    batch = replace(batch, old_logps_N=old_N if has_old else None, ref_logps_N=ref_N if needs_ref else None)
    batch = assign_advantages(batch, rollout.used_scores, objective, stored.facts.max_completion_length)
    if stored.groups_missing and stored.minibatch_S is not None:  # in part: as the run's updates had them
        number_S = torch.from_numpy(stored.minibatch_S[used_S])
        numbers = sorted(set(number_S.tolist()))
        minibatches = [part_of(batch, (number_S == number).nonzero()[:, 0]) for number in numbers]
    else:
        minibatches = split_minibatches(batch, stored.facts.minibatches)
    return Laid(stored, batch, minibatches, used_S, tokens_N)


def _no_reference(stored: Stored, objective: Objective, missing: int, total: int) -> str:
    """The message for tokens without log-probs of the reference."""
    cause = "the run's beta was 0"
    if stored.facts.beta:
        cause = "the run's updates did not need them (the group was left out, or the KL is over the whole vocabulary)"
    return (
        f"the KL needs log-probs of the reference (beta {objective.beta:g}), and {stored.path.name} has none for "
        f"{missing:,} of the {total:,} tokens that the updates would use: {cause}, and there is no model to compute "
        "them. Replay with --set beta=0, or with the model: without --no-model, and with the checkpoint before the "
        "step (run.save_steps)"
    )


def _chosen(laid: Laid, minibatch: Part, objective: Objective) -> Tensor | None:
    """Which tokens of a minibatch ``top_entropy`` chooses: those of the run's update, if it chose the same share."""
    if objective.top_entropy == 1:
        return None
    stored, tokens_N = laid.stored, laid.tokens_N[minibatch.tokens_N.cpu()]
    if stored.weight_N is not None and objective.top_entropy == stored.facts.objective.top_entropy:
        return (stored.weight_N[tokens_N] > 0).to(stored.device)
    loss_N = laid.batch.loss_N[minibatch.tokens_N]
    return top_entropy_tokens(stored.known.entropy_N[tokens_N].to(loss_N.device), objective.top_entropy, loss_N)


CHANGED = 0.1
"""A coefficient changes if it differs, beyond the common factor, by more than this share of the root mean square of the
run's coefficients that are not 0."""
MOST_TOKENS, MOST_COMPLETIONS, MOST_GROUPS = 40, 20, 10
"""Tokens, completions and groups that are listed."""
SHOWN_BEFORE = 12
"""Drawn tokens before a listed token whose text is given."""
MOST_TEXT = 160
"""Characters of a completion or prompt that are listed."""


@dataclass(frozen=True, slots=True)
class Products:
    """The inner products of two gradients: of the run's with itself, of the replay's with itself, of both."""

    run: float = 0.0
    replay: float = 0.0
    both: float = 0.0

    @classmethod
    def mean(cls, some: Sequence[Products]) -> Products:
        """Those of gradients of several updates, laid end to end and divided by the root of their number."""
        count = max(1, len(some))
        sums = (sum(getattr(one, name) for one in some) for name in ("run", "replay", "both"))
        return cls(*(total / count for total in sums))

    @classmethod
    def of(cls, run: Tensor, replay: Tensor, weight: Tensor | None = None) -> Products:
        """Those of two vectors, with a weight for each entry.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        first, second = run.double(), replay.double()
        weighted = (first, second) if weight is None else (first * weight, second * weight)
        found = float(first @ weighted[0]), float(second @ weighted[1]), float(first @ weighted[1])
        if not all(map(math.isfinite, found)):
            raise NonFiniteError("the squared norm of a gradient is not finite: there is nothing to compare")
        return cls(*found)

    @property
    def ratio(self) -> float | None:
        """The norm of the replay's gradient over that of the run's; None if the run's is 0."""
        return math.sqrt(self.replay / self.run) if self.run else None

    def as_json(self) -> dict[str, float | None]:
        """Norms, their ratio, and the cosine."""
        norms = math.sqrt(max(self.run, 0.0)), math.sqrt(max(self.replay, 0.0))
        size = norms[0] * norms[1]
        return {
            "norm_run": norms[0],
            "norm_replay": norms[1],
            "ratio": self.ratio,
            "cosine": max(-1.0, min(1.0, self.both / size)) if size else None,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """A stored step under the run's objective and under another."""

    stored: Stored
    run: Replayed
    replay: Replayed

    @property
    def energy_N(self) -> Tensor:
        """E_n; without the stored ``sum_v p_v^2``, its smallest possible value ``(1 - p)^2``."""
        p_N = self.stored.known.logps_N.nan_to_num(nan=0.0).exp()
        collision_N = self.stored.known.collision_N
        return (1 - 2 * p_N + torch.where(collision_N.isnan(), p_N**2, collision_N)).clamp(min=0)

    @property
    def squares(self) -> list[Tensor]:
        """The squared norms in the logits by token, of the run's gradient and of the replay's, ``[N]`` each."""
        return [one.total_N**2 * self.energy_N for one in (self.run, self.replay)]

    @property
    def uids_S(self) -> list[int]:
        """The group of each completion."""
        return [group.prompt.uid for group in self.stored.groups for _ in group.completions]

    @property
    def counted_N(self) -> Tensor:
        """The tokens that the updates of one of them use."""
        return (self.run.cause_N != LEFT_OUT) | (self.replay.cause_N != LEFT_OUT)

    @property
    def sequence_N(self) -> Tensor:
        """The row of each token."""
        return torch.repeat_interleave(torch.arange(len(self.stored.lengths_S)), self.stored.lengths_S)

    @property
    def factor(self) -> float:
        """The common factor of the replay's coefficients: the ratio of the gradients' norms in the logits; 1 if one of
        them is 0."""
        return Products.of(self.run.total_N, self.replay.total_N, self.energy_N).ratio or 1.0

    def scaled_N(self) -> tuple[Tensor, Tensor]:
        """Both coefficients, the replay's without the common factor."""
        return self.run.total_N, self.replay.total_N / self.factor


def is_same(one: Replayed, other: Replayed) -> bool:
    """Whether two replays are equal bit for bit."""
    return torch.equal(one.policy_N, other.policy_N) and torch.equal(one.kl_N, other.kl_N)


def stored_gap(stored: Stored, run: Replayed) -> float | None:
    """The largest difference between the replay of the run's objective and the stored coefficients: 0 where they are
    equal bit for bit. None: no coefficients are stored, or those of a part of the step."""
    if stored.policy_N is None or stored.groups_missing:
        return None
    kl_N = torch.zeros_like(stored.policy_N) if stored.kl_N is None else stored.kl_N
    pairs = ((run.policy_N, stored.policy_N), (run.kl_N, kl_N))
    gaps = [(mine.double() - theirs.nan_to_num(nan=0.0)).abs().max() for mine, theirs in pairs if len(mine)]
    return float(max(gaps, default=torch.tensor(0.0, dtype=torch.float32)))


def gradients(pair: Pair) -> dict[str, Any]:
    """Norms, ratios and cosines in the space of the logits: of the whole gradient and of each term."""
    run, replay, energy_N = pair.run, pair.replay, pair.energy_N
    terms = {"policy": (run.policy_N, replay.policy_N), "kl": (run.kl_N, replay.kl_N)}
    return {
        **Products.of(run.total_N, replay.total_N, energy_N).as_json(),
        "terms": {
            name: Products.of(*both, energy_N).as_json() for name, both in terms.items() if any(map(torch.any, both))
        },
    }


def token_counts(pair: Pair) -> dict[str, Any]:
    """How many tokens change their coefficient, its sign, or whether they have one."""
    counted_N = pair.counted_N
    run_N, replay_N = (values_N[counted_N] for values_N in pair.scaled_N())
    size = run_N[run_N != 0].square().mean().sqrt() if bool(run_N.any()) else 0.0
    numbers = {
        "changed": (replay_N - run_N).abs() > CHANGED * size,
        "sign": run_N * replay_N < 0,
        "lost": (run_N != 0) & (replay_N == 0),
        "gained": (run_N == 0) & (replay_N != 0),
    }
    total = int(counted_N.sum())
    found: dict[str, Any] = {"total": total}
    for name, where_N in numbers.items():
        count = int(where_N.sum())
        found |= {name: count, f"{name}_share": count / total if total else 0.0}
    return found | {"changed_means": CHANGED, "factor": pair.factor}


def causes(pair: Pair) -> list[dict[str, Any]]:
    """Tokens by the cause of a missing gradient in both, with their shares of the squared norms; most tokens first."""
    counted_N, squares = pair.counted_N, pair.squares
    wholes = [float(square_N.sum()) for square_N in squares]
    kinds_N = torch.stack([pair.run.cause_N, pair.replay.cause_N], dim=1)
    found = []
    for kind in torch.unique(kinds_N[counted_N], dim=0):
        where_N = (kinds_N == kind).all(dim=1)
        parts = [float(s[where_N].sum()) / whole if whole else 0.0 for s, whole in zip(squares, wholes, strict=True)]
        names = [cause_name(int(number)) for number in kind]
        count = int(where_N.sum())
        counts = {"tokens": count, "tokens_share": count / int(counted_N.sum())}
        found.append({"run": names[0], "replay": names[1], **counts, "share_run": parts[0], "share_replay": parts[1]})
    return sorted(found, key=lambda row: -row["tokens"])


def cause_name(number: int) -> str:
    """The name of a cause: "active" for a token that has a gradient."""
    return "left_out" if number == LEFT_OUT else Cause(number).name.lower()


def completions(pair: Pair) -> list[dict[str, Any]]:
    """The completions with the largest shares of the squared norms, strongest first."""
    shares_2S, lengths_S = _shares(pair, pair.sequence_N, len(pair.stored.lengths_S)), pair.stored.lengths_S
    advantages = [_means(one.advantages_N, pair.sequence_N, lengths_S) for one in (pair.run, pair.replay)]
    uids_S = pair.uids_S
    found = []
    for row in _strongest(shares_2S, MOST_COMPLETIONS):
        completion = pair.stored.completions[row]
        found.append(
            {
                "row": row,
                "group": uids_S[row],
                "reward": _number(pair.stored.scores.rewards_S[row]),
                "finish_reason": str(completion.finish_reason),
                "tokens": int(lengths_S[row]),
                "advantage_run": _number(advantages[0][row]) if pair.run.is_used_S[row] else None,
                "advantage_replay": _number(advantages[1][row]) if pair.replay.is_used_S[row] else None,
                "share_run": float(shares_2S[0, row]),
                "share_replay": float(shares_2S[1, row]),
                "text": shortened(completion.text),
            }
        )
    return found


def groups(pair: Pair) -> list[dict[str, Any]]:
    """The groups with the largest shares of the squared norms, strongest first."""
    sizes = torch.tensor([len(group.completions) for group in pair.stored.groups])
    group_S = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    shares_2P = _shares(pair, group_S[pair.sequence_N], len(sizes))
    rewards = pair.stored.scores.rewards_S.split(sizes.tolist())
    return [
        {
            "group": pair.stored.groups[p].prompt.uid,
            "completions": int(sizes[p]),
            "reward_mean": _number(rewards[p].nanmean()),
            "share_run": float(shares_2P[0, p]),
            "share_replay": float(shares_2P[1, p]),
            "prompt": shortened(pair.stored.groups[p].prompt.text),
        }
        for p in _strongest(shares_2P, MOST_GROUPS)
    ]


def signs(pair: Pair) -> list[dict[str, Any]]:
    """The shares of the squared norms of tokens with a positive, negative and zero advantage, by each objective's."""
    squares = pair.squares
    found = []
    for name, sign in (("positive", 1), ("negative", -1), ("zero", 0)):
        row: dict[str, Any] = {"advantage": name}
        for which, one, square_N in zip(("run", "replay"), (pair.run, pair.replay), squares, strict=True):
            where_N = (one.advantages_N.sign() == sign) & (one.cause_N != LEFT_OUT)
            whole = float(square_N.sum())
            share = float(square_N[where_N].sum()) / whole if whole else 0.0
            row |= {f"tokens_{which}": int(where_N.sum()), f"share_{which}": share}
        found.append(row)
    return found


def strongest(pair: Pair, decode: Callable[[list[int]], str] | None = None) -> list[dict[str, Any]]:
    """The tokens whose coefficient changes most, in units of the gradient: first those of another sign.

    Args:
        pair: the two objectives.
        decode: the text of token ids; None: there is no tokenizer.
    """
    run_N, replay_N = pair.scaled_N()
    size_N = (replay_N - run_N).abs() * pair.energy_N.sqrt()
    turned_N = run_N * replay_N < 0
    order_N = torch.argsort(size_N + turned_N * (1 + size_N.max() if len(size_N) else 0), descending=True)
    chosen = [n for n in order_N[:MOST_TOKENS].tolist() if size_N[n] > 0]
    sequence_N, lengths_S = pair.sequence_N, pair.stored.lengths_S
    starts_S, rows = lengths_S.cumsum(0) - lengths_S, []
    uids_S = pair.uids_S
    for n in chosen:
        row = int(sequence_N[n])
        position, ids = n - int(starts_S[row]), pair.stored.completions[row].token_ids.tolist()
        rows.append(
            {
                "row": row,
                "group": uids_S[row],
                "position": position,
                "token_id": ids[position],
                "text": decode([ids[position]]) if decode else None,
                "before": decode(ids[max(0, position - SHOWN_BEFORE) : position]) if decode else None,
                "change": _change(float(run_N[n]), float(replay_N[n])),
                "coefficient_run": float(pair.run.total_N[n]),
                "coefficient_replay": float(pair.replay.total_N[n]),
                "cause_run": cause_name(int(pair.run.cause_N[n])),
                "cause_replay": cause_name(int(pair.replay.cause_N[n])),
            }
        )
    return rows


def _change(run: float, replay: float) -> str:
    if run * replay < 0:
        return "sign"
    return "gained" if run == 0 else "lost" if replay == 0 else "larger" if abs(replay) > abs(run) else "smaller"


def shortened(text: str) -> str:
    """The end of a long text, which tells completions and prompts apart better than the beginning."""
    return text if len(text) <= MOST_TEXT else f"...{text[-MOST_TEXT:]}"


def _shares(pair: Pair, index_N: Tensor, count: int) -> Tensor:
    """The shares of the squared norms of both gradients by index, shape ``[2, count]``."""
    sums = [segment_sum(square_N, index_N, count) for square_N in pair.squares]
    return torch.stack([each / each.sum().clamp(min=torch.finfo(each.dtype).tiny) for each in sums])


def _strongest(shares_2S: Tensor, count: int) -> list[int]:
    largest_S = shares_2S.amax(dim=0)
    order = torch.argsort(largest_S, descending=True, stable=True)[:count].tolist()
    return [index for index in order if largest_S[index] > 0]


def _means(values_N: Tensor, sequence_N: Tensor, lengths_S: Tensor) -> Tensor:
    return segment_sum(values_N.double(), sequence_N, len(lengths_S)) / lengths_S.clamp(min=1)


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
