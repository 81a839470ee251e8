"""What passes are compared with (the model's own forward pass, one row at a time, without padding), and the models."""

import contextlib

import numpy as np
import torch

from cohort.policy import Distribution, PackedRows, Policy, Precision
from cohort.types import Support
from tests.conftest import family_model, tiny_llama
from tests.families.configs import ATTENTION, small_model
from tests.rollout.test_lean import disturbed

SINGLE = Precision(torch.float32, torch.float32)
DOUBLE = Precision(torch.float64, torch.float64)
MIXED = Precision(torch.float32, torch.bfloat16)

# Prompts longer than the windows, shorter, and of one token; several completions of one, equal prompts apart.
LONG = tuple(range(20, 36))
PROMPTS = [(5, 9, 20), (5, 9, 20), (7,), LONG, (7,), LONG, (5, 9, 20)]
COMPLETIONS = [(4, 6, 1), (8, 8, 8, 8, 8, 1), (1,), (12, 13), tuple(range(3, 15)), (9,), (4,)]
WEIGHTS = torch.linspace(-1, 2, sum(map(len, COMPLETIONS)), dtype=torch.float64)
TEMPERATURE = 0.8

WINDOW = ATTENTION | {"sliding_window": 6}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def model_of(family, settings=None):
    """With its settings in full; None: those of ``small_config``."""
    torch.manual_seed(0)
    return disturbed(family_model(family, **settings) if settings else small_model(family))


def policy_of(family, settings=None, precision=DOUBLE):
    return Policy(model_of(family, settings).to(precision.master), precision)


def with_peft(config, adapters=("default",)):
    """A Llama with adapters whose trainable numbers are disturbed, so that they have an effect."""
    import peft

    torch.manual_seed(1)
    config = dict(config)
    make = getattr(peft, config.pop("kind", "LoraConfig"))
    settings = {"task_type": "CAUSAL_LM"} | config
    wrapped = peft.get_peft_model(tiny_llama(), make(**settings), adapter_name=adapters[0])
    for name in adapters[1:]:
        wrapped.add_adapter(name, make(**settings))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad or ("lora_" in name and "magnitude" not in name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def plain_rows(policy, prompt, completion):
    """The logits that each token of a completion is drawn from, ``[T, V]``. Differentiable. In ``compute()`` of a
    float64 policy transformers' norms stay in float64, so that tolerances can be tight."""
    with policy.compute():
        ids = torch.tensor([[*prompt, *completion]])
        return policy.model(input_ids=ids, use_cache=False).logits[0, -len(completion) - 1 : -1]


def plain_logps(policy, prompts=PROMPTS, completions=COMPLETIONS, temperature=TEMPERATURE):
    """``[N]``, float32 or wider: log softmax at the drawn tokens."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        rows = plain_rows(policy, prompt, completion)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) / temperature
        found.append(torch.log_softmax(rows, -1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
    return torch.cat(found)


def weighted(policy, function=None):
    """A loss of our log-probs; of ``plain_logps`` where it is given."""
    logps_N = function(policy) if function else policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N
    return (logps_N * WEIGHTS.to(policy.precision.master)).sum()


def gradients(policy, value):
    """Of every parameter that needs one; zeros where none arrives. Checkpointed layers run again in ``compute()``."""
    policy.model.zero_grad()
    with policy.compute():
        value.backward()
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}


def assert_near(got, expected, tolerance):
    """Parameter by parameter, relative to the largest number of the expected gradient: sums in another order. A
    gradient that is 0 in exact arithmetic (a key's bias) is rounding alone: it is compared with a hundredth of the
    largest of all."""
    assert got.keys() == expected.keys()
    least = 0.01 * max(wanted.abs().max().item() for wanted in expected.values())
    for name, wanted in expected.items():
        assert torch.isfinite(got[name]).all(), name
        scale = max(wanted.abs().max().item(), least)
        gap = (got[name] - wanted).abs().max().item() / scale
        assert gap <= tolerance, f"{name}: off by {gap:.2g} of {scale:.2g}"


def assert_plain(policy, tolerance=1e-10, logp_tolerance=1e-11, prompts=PROMPTS, completions=COMPLETIONS):
    """Log-probs and gradients are those of the model's own forward pass. float64: sums in another order."""
    weights = torch.linspace(-1, 2, sum(map(len, completions)), dtype=policy.precision.master)
    ours = policy.logps(prompts, completions, TEMPERATURE).logps_N
    plain = plain_logps(policy, prompts, completions)
    torch.testing.assert_close(ours, plain, rtol=logp_tolerance, atol=logp_tolerance)
    got, expected = (gradients(policy, (values * weights).sum()) for values in (ours, plain))
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-3
    assert_near(got, expected, tolerance)


def shares(policy):
    """Whether the first implementation that was tried shares prompts: the description gives no reason against it."""
    return policy.passes.shared and "(" not in policy.passes.description


def rows_of(prompts, completions, read, supports=(), drawn=None):
    """Completions as rows after prompts that are among those read."""
    return PackedRows.of([read.index(prompt) for prompt in prompts], completions, supports, drawn)


def support_of(kept, vocabulary=37):
    """A ``Support`` of the kept tokens of each position, listed as kept or, where they are most, as excluded."""
    excluded = [2 * len(tokens) > vocabulary for tokens in kept]
    listed = [
        sorted(set(range(vocabulary)) - set(tokens)) if out else sorted(tokens)
        for tokens, out in zip(kept, excluded, strict=True)
    ]
    ids = np.array([token for tokens in listed for token in tokens], np.int32)
    return Support(ids, np.array([len(tokens) for tokens in listed], np.int32), np.array(excluded, np.bool_))


def random_supports(completions, vocabulary=37, whole=3):
    """Kept tokens of every position, the drawn one and others, many or few, and the supports. All tokens of one
    completion are kept; it has no support."""
    generator, every = np.random.default_rng(0), list(range(vocabulary))
    kept = []
    for completion in completions:
        sizes = generator.choice([0, 1, 4, vocabulary // 2 + 2, vocabulary - 1], size=len(completion))
        others = [generator.permutation(every)[:size].tolist() for size in sizes]
        kept.append([sorted({token, *more}) for token, more in zip(completion, others, strict=True)])
    kept[whole] = [every] * len(completions[whole])
    supports = [support_of(rows, vocabulary) for rows in kept]
    assert any(support.excluded_N.any() for support in supports)
    supports[whole] = None
    return kept, supports


def distribution_of(prompts, completions, temperature=1.0, supports=(), penalty=1.0):
    rows = PackedRows.of(range(len(prompts)), completions, supports)
    return Distribution(rows, prompts, temperature, penalty)


@contextlib.contextmanager
def threads(count):
    """Set the number of torch's threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
