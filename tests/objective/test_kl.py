"""KL estimators against exact sums, their gradients against exact gradients, and their numerics."""

import math

import pytest
import torch

from cohort.objective import k1, k2, k3, kl_correction, kl_multiplier
from cohort.presets.parts import KL

PI = torch.tensor([0.5, 0.5], dtype=torch.float64)
REF = torch.tensor([0.9, 0.1], dtype=torch.float64)
# KL(pi || ref) = 0.5 ln(0.5/0.9) + 0.5 ln(0.5/0.1); KL(ref || pi) = 0.9 ln(0.9/0.5) + 0.1 ln(0.1/0.5)
REVERSE = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
FORWARD = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)


def random_pair(size=5, seed=0):
    """Logits of a policy (with gradient) and log-probs of a reference over a small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()
    ref_logps = torch.log_softmax(torch.randn(size, dtype=torch.float64, generator=generator), 0)
    return logits, ref_logps


def exact_gradient(logits, divergence):
    """Gradient of a divergence of softmax(logits) with respect to the logits."""
    (gradient,) = torch.autograd.grad(divergence(torch.log_softmax(logits, 0)), logits)
    return gradient


def expected_gradient(logits, kappa):
    """E over tokens drawn from the policy of kappa(token) * grad logp(token), exactly."""
    logps = torch.log_softmax(logits, 0)
    (gradient,) = torch.autograd.grad((logps.exp().detach() * kappa.detach() * logps).sum(), logits)
    return gradient


def test_hand_worked_directions():
    assert pytest.approx(0.510826, abs=5e-7) == REVERSE
    assert pytest.approx(0.368064, abs=5e-7) == FORWARD


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased_for_the_reverse_kl(estimator):
    assert (PI * estimator(PI.log(), REF.log())).sum().item() == pytest.approx(REVERSE, rel=1e-12)


def test_k2_is_biased():
    # 0.5 * (ln(5/9)^2 / 2 + ln(5)^2 / 2) = 0.733939
    expected = 0.25 * (math.log(5 / 9) ** 2 + math.log(5) ** 2)
    assert (PI * k2(PI.log(), REF.log())).sum().item() == pytest.approx(expected, rel=1e-12)
    assert abs(expected - REVERSE) > 0.2


@pytest.mark.parametrize("seed", range(1))
def test_forward_multiplier_gives_the_forward_kl_gradient(seed):
    logits, ref = random_pair(seed=seed)
    kappa = kl_multiplier(torch.log_softmax(logits, 0), ref, direction="forward")
    exact = exact_gradient(logits, lambda lp: (ref.exp() * (ref - lp)).sum())
    torch.testing.assert_close(expected_gradient(logits, kappa), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(1))
def test_reverse_multiplier_gives_the_reverse_kl_gradient(seed):
    logits, ref = random_pair(seed=seed)
    kappa = kl_multiplier(torch.log_softmax(logits, 0), ref, direction="reverse")
    exact = exact_gradient(logits, lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(expected_gradient(logits, kappa), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(1))
def test_k3_as_a_loss_has_the_forward_gradient_though_its_value_is_the_reverse_kl(seed):
    logits, ref = random_pair(seed=seed)
    logps = torch.log_softmax(logits, 0)
    weights = logps.exp().detach()  # tokens drawn from the policy; the draw carries no gradient
    (gradient,) = torch.autograd.grad((weights * k3(logps, ref)).sum(), logits)
    forward = exact_gradient(logits, lambda lp: (ref.exp() * (ref - lp)).sum())
    reverse = exact_gradient(logits, lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(gradient, forward, rtol=0, atol=1e-12)
    assert (gradient - reverse).abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(1))
def test_off_policy_the_ratio_keeps_the_reverse_gradient_exact(seed):
    logits, ref = random_pair(seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    old = torch.log_softmax(logits.detach() + 0.7 * torch.randn(5, dtype=torch.float64, generator=generator), 0)
    logps = torch.log_softmax(logits, 0)
    kappa = kl_multiplier(logps, ref, direction="reverse", weight_N=(logps - old).exp()).detach()
    (gradient,) = torch.autograd.grad((old.exp() * kappa * logps).sum(), logits)  # tokens drawn from the old policy
    exact = exact_gradient(logits, lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)


def test_multipliers_agree_to_first_order_and_part_far_away():
    near = torch.tensor([1e-4], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    forward, reverse = (kl_multiplier(near, zero, direction=g).item() for g in ("forward", "reverse"))
    assert forward == pytest.approx(reverse, rel=1e-4)
    # the policy 5 nats below the reference: forward pulls with e^5 - 1, reverse with 5
    far = torch.tensor([-5.0], dtype=torch.float64)
    assert kl_multiplier(far, zero, direction="forward").item() == pytest.approx(1 - math.exp(5))
    assert kl_multiplier(far, zero, direction="reverse").item() == -5.0


@pytest.mark.parametrize("gap", [1e-6, 1e-4, 1e-3, 1e-2])
def test_k3_keeps_its_digits_in_float32(gap):
    # exp(D) - D - 1 in float32 is off by 100% at 1e-4. expm1(D) - D still subtracts two numbers near D: what is left
    # is the rounding of expm1, half an ulp of D, about 6e-8 * D against D^2 / 2.
    value = k3(torch.tensor([0.0]), torch.tensor([gap])).item()
    exact = math.expm1(gap) - gap
    assert value >= 0
    assert abs(value - exact) <= 1.2e-7 * gap


def test_k3_is_never_negative():
    gaps = torch.linspace(-30, 30, 10_001)
    assert (k3(torch.zeros_like(gaps), gaps) >= 0).all()


def test_unknown_direction():
    with pytest.raises(ValueError, match="reverse"):
        kl_multiplier(torch.zeros(1), torch.zeros(1), direction="k3")


GAPS = torch.tensor([0.2, -0.4, 0.1, 0.3], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 1, 0, 0])


@pytest.mark.parametrize(
    ("kl", "logs"),
    [
        (KL(correction="token_ratio"), [0.2, -0.4, 0.1, 0.3]),
        (KL(correction="prefix_product"), [0.2, -0.4, 0.3, 0.6]),
        (KL(correction="sequence_weight"), [0.6, -0.4, 0.6, 0.6]),
        # Over the vocabulary there is no token to weigh: only what came before it.
        (KL(correction="prefix_product", estimator="full"), [0.0, 0.0, 0.2, 0.3]),
    ],
    ids=lambda value: f"{value.correction}-{value.estimator}" if isinstance(value, KL) else "",
)
def test_corrections_by_hand(kl, logs):
    expected = torch.tensor(logs, dtype=torch.float64).exp()
    torch.testing.assert_close(kl_correction(kl, GAPS, SEQUENCE), expected, rtol=1e-14, atol=0)


def test_no_correction_is_no_weight():
    assert kl_correction(KL(), GAPS, SEQUENCE) is None


@pytest.mark.parametrize("correction", ["prefix_product", "sequence_weight"])
def test_a_correction_over_a_sequence_needs_the_sequences(correction):
    with pytest.raises(ValueError, match="sequence_N"):
        kl_correction(KL(correction=correction), GAPS)


def test_the_sequence_scope_sums_over_the_sequence():
    ref = torch.zeros(4, dtype=torch.float64)
    sums = torch.tensor([0.6, -0.4, 0.6, 0.6], dtype=torch.float64)
    reverse = kl_multiplier(GAPS, ref, scope="sequence", sequence_N=SEQUENCE)
    forward = kl_multiplier(GAPS, ref, direction="forward", scope="sequence", sequence_N=SEQUENCE)
    torch.testing.assert_close(reverse, sums, rtol=1e-14, atol=0)
    torch.testing.assert_close(forward, 1 - torch.exp(-sums), rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="sequence_N"):
        kl_multiplier(GAPS, ref, scope="sequence")


def test_a_weight_multiplies_the_multiplier():
    ref, weight = torch.zeros(4, dtype=torch.float64), torch.tensor([2.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    for direction in ("reverse", "forward"):
        plain = kl_multiplier(GAPS, ref, direction=direction)
        assert torch.equal(kl_multiplier(GAPS, ref, direction=direction, weight_N=weight), weight * plain)


def all_sequences(logits_first, logits_second):
    """Probabilities of the nine sequences of two tokens over three words, and each token's log-prob."""
    first = torch.log_softmax(logits_first, -1)
    second = torch.log_softmax(logits_second, -1)
    logps = torch.stack([first[:, None].expand(3, 3), second], dim=-1).reshape(9, 2)
    return logps.sum(-1).exp(), logps


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_sequence_weight_makes_the_whole_sequences_kl_exact_off_policy(direction):
    """Every sequence enumerated, drawn from another policy: the mean of W kappa sum(s) is the gradient of the KL."""
    generator = torch.Generator().manual_seed(3)
    logits = [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in [(3,), (3, 3)]
    ]
    others = [torch.randn(*x.shape, dtype=torch.float64, generator=generator) for x in logits]
    refs = [torch.randn(*x.shape, dtype=torch.float64, generator=generator) for x in logits]
    probs, logps = all_sequences(*logits)
    drawn, drawn_logps = all_sequences(*others)
    ref_probs, ref_logps = all_sequences(*refs)
    gap = logps.sum(-1) - ref_logps.sum(-1)
    exact = torch.autograd.grad(
        (probs * gap).sum() if direction == "reverse" else -(ref_probs * gap).sum(), logits, retain_graph=True
    )
    sequence = torch.arange(9).repeat_interleave(2)
    flat = logps.reshape(-1)
    weight = kl_correction(
        KL(correction="sequence_weight", scope="sequence"), flat.detach() - drawn_logps.reshape(-1), sequence
    )
    kappa = kl_multiplier(
        flat.detach(),
        ref_logps.reshape(-1),
        direction=direction,
        scope="sequence",
        weight_N=weight,
        sequence_N=sequence,
    )
    got = torch.autograd.grad((drawn.repeat_interleave(2) * kappa * flat).sum(), logits)
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
