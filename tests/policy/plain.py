"""What the trainer's passes are compared with: the model's own forward pass, one row at a time, without padding."""

import contextlib

import torch

from cohort.policy import Distribution, PackedRows


def plain_rows(policy, prompt, completion):
    """The logits that each token of a completion is drawn from, ``[T, V]``. Differentiable. In a float64 policy's
    ``compute()`` transformers' norms stay in float64, so that what is compared with it can be compared tightly."""
    with policy.compute():
        ids = torch.tensor([[*prompt, *completion]])
        return policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def plain_logps(policy, prompts, completions, temperature=1.0):
    """``[N]``, float32 or wider: log softmax at the drawn tokens."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        rows = plain_rows(policy, prompt, completion)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) / temperature
        found.append(torch.log_softmax(rows, -1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
    return torch.cat(found)


def gradients(policy, value):
    """Of every parameter that needs one; zeros where none arrives. Checkpointed layers run again in ``compute()``."""
    policy.model.zero_grad()
    with policy.compute():
        value.backward()
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def assert_near(got, expected, tolerance):
    """Parameter by parameter, beside the largest number of the expected one: sums in another order. A gradient that is
    0 in exact arithmetic (a key's bias) is rounding alone: it is looked at beside a hundredth of the largest of all."""
    assert got.keys() == expected.keys()
    least = 0.01 * max(wanted.abs().max().item() for wanted in expected.values())
    for name, wanted in expected.items():
        assert torch.isfinite(got[name]).all(), name
        scale = max(wanted.abs().max().item(), least)
        gap = (got[name] - wanted).abs().max().item() / scale
        assert gap <= tolerance, f"{name}: off by {gap:.2g} of {scale:.2g}"


def shares(policy):
    """Whether prompts are read once, by the first way that was tried: there is no reason given."""
    return policy.passes.shared and "(" not in policy.passes.description


def rows_of(prompts, completions, read, supports=(), drawn=None):
    """Completions as rows after prompts that are among those read."""
    return PackedRows.of([read.index(prompt) for prompt in prompts], completions, supports, drawn)


def distribution_of(prompts, completions, temperature=1.0, supports=(), penalty=1.0):
    rows = PackedRows.of(range(len(prompts)), completions, supports)
    return Distribution(rows, prompts, temperature, penalty)


@contextlib.contextmanager
def threads(count):
    """So many of torch's, within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
