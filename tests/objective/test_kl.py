"""The KL's estimators, multipliers and corrections by hand, and their numerics; tests/exact has their gradients."""

import math

import pytest
import torch

from cohort.objective import k3, kl_correction, kl_multiplier
from cohort.presets.parts import KL
from tests.conftest import each


def test_multipliers_agree_to_first_order_and_part_far_away():
    near = torch.tensor([1e-4], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    forward, reverse = (kl_multiplier(near, zero, direction=g).item() for g in ("forward", "reverse"))
    assert forward == pytest.approx(reverse, rel=1e-4)
    # the policy 5 nats below the reference: forward pulls with e^5 - 1, reverse with 5
    far = torch.tensor([-5.0], dtype=torch.float64)
    assert kl_multiplier(far, zero, direction="forward").item() == pytest.approx(1 - math.exp(5))
    assert kl_multiplier(far, zero, direction="reverse").item() == -5.0


@each("gap", [1e-6, 1e-4, 1e-3, 1e-2])
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


@each(
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


@each("gap", [-1e4, -30.0, -18.0, 18.0, 30.0, 1e4])
def test_no_clamp_takes_the_gradient_away(gap):
    logps, ref = torch.zeros(1, dtype=torch.float64), torch.tensor([gap], dtype=torch.float64)
    held = math.copysign(min(abs(gap), 20.0), gap)
    assert kl_multiplier(logps, ref, direction="forward").item() == pytest.approx(1 - math.exp(held), rel=1e-12)
    assert kl_multiplier(logps, ref, direction="reverse").item() == -gap
