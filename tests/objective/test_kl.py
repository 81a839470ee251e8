"""KL estimators against exact sums, their gradients against exact gradients, and their numerics."""

import math

import pytest
import torch

from cohort.objective import k1, k2, k3, kl_multiplier

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


@pytest.mark.parametrize("seed", range(5))
def test_forward_multiplier_gives_the_forward_kl_gradient(seed):
    logits, ref = random_pair(seed=seed)
    kappa = kl_multiplier(torch.log_softmax(logits, 0), ref, gradient="forward")
    exact = exact_gradient(logits, lambda lp: (ref.exp() * (ref - lp)).sum())
    torch.testing.assert_close(expected_gradient(logits, kappa), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_reverse_multiplier_gives_the_reverse_kl_gradient(seed):
    logits, ref = random_pair(seed=seed)
    kappa = kl_multiplier(torch.log_softmax(logits, 0), ref, gradient="reverse")
    exact = exact_gradient(logits, lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(expected_gradient(logits, kappa), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_k3_as_a_loss_has_the_forward_gradient_though_its_value_is_the_reverse_kl(seed):
    logits, ref = random_pair(seed=seed)
    logps = torch.log_softmax(logits, 0)
    weights = logps.exp().detach()  # tokens drawn from the policy; the draw carries no gradient
    (gradient,) = torch.autograd.grad((weights * k3(logps, ref)).sum(), logits)
    forward = exact_gradient(logits, lambda lp: (ref.exp() * (ref - lp)).sum())
    reverse = exact_gradient(logits, lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(gradient, forward, rtol=0, atol=1e-12)
    assert (gradient - reverse).abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(5))
def test_off_policy_the_ratio_keeps_the_reverse_gradient_exact(seed):
    logits, ref = random_pair(seed=seed)
    old = torch.log_softmax(logits.detach() + 0.7 * torch.randn(5, dtype=torch.float64), 0)
    logps = torch.log_softmax(logits, 0)
    kappa = kl_multiplier(logps, ref, gradient="reverse", ratio_N=(logps - old).exp()).detach()
    (gradient,) = torch.autograd.grad((old.exp() * kappa * logps).sum(), logits)  # tokens drawn from the old policy
    exact = exact_gradient(logits, lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-12)


def test_multipliers_agree_to_first_order_and_part_far_away():
    near = torch.tensor([1e-4], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    forward, reverse = (kl_multiplier(near, zero, gradient=g).item() for g in ("forward", "reverse"))
    assert forward == pytest.approx(reverse, rel=1e-4)
    # the policy 5 nats below the reference: forward pulls with e^5 - 1, reverse with 5
    far = torch.tensor([-5.0], dtype=torch.float64)
    assert kl_multiplier(far, zero, gradient="forward").item() == pytest.approx(1 - math.exp(5))
    assert kl_multiplier(far, zero, gradient="reverse").item() == -5.0


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


def test_unknown_gradient():
    with pytest.raises(ValueError, match="reverse"):
        kl_multiplier(torch.zeros(1), torch.zeros(1), gradient="k3")
