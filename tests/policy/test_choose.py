"""Trials: what is computed is decided in float32, on every token; half precision decides on kernels, on the whole."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from cohort.policy import Policy
from cohort.policy.choose import Candidate, choose_passes, find_head, first_correct
from cohort.policy.compute import ComputeModel
from tests.conftest import tiny_llama
from tests.families.configs import small_config, small_model
from tests.policy.plain import COMPLETIONS, LORA, MIXED, PROMPTS, SINGLE, TEMPERATURE, plain_logps, with_peft

# peft asks transformers for something by its old name; pytest makes warnings errors.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


LAYERS = ["sliding_attention", "full_attention"]


class Way:
    description = "a way"


def tried(gaps_by_dtype, precision=MIXED):
    """Whether a way with such errors of logits is chosen, and the reason if not."""
    model, failures = ComputeModel(tiny_llama(), precision), []
    gaps = lambda _: torch.tensor(gaps_by_dtype[model.precision.compute])
    found = first_correct([Candidate("one", Way)], gaps, model, failures)
    assert model.precision == precision
    return found is not None, *failures


def test_a_trial_in_float32_decides_on_every_token():
    half = [0.02] * 13
    assert tried({torch.float32: [1e-6] * 13, torch.bfloat16: half}) == (True,)
    off = {torch.float32: [1e-6] * 12 + [1e-3], torch.bfloat16: half}
    assert tried(off) == (False, "one: off by 0.001 from the model's forward pass")
    assert tried(off, SINGLE) == (False, "one: off by 0.001 from the model's forward pass")


def test_a_trial_in_half_precision_decides_on_the_whole():
    exact = {torch.float32: [1e-6] * 13}
    assert tried(exact | {torch.bfloat16: [0.02] * 12 + [0.9]}) == (True,)  # a token that goes to another expert
    assert tried(exact | {torch.bfloat16: [0.3] * 13})[0] is False
    assert tried(exact | {torch.bfloat16: [0.02] * 12 + [torch.inf]})[0] is False


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "xlstm"])
def test_soft_caps_of_the_head_are_kept_in_bfloat16(model_type):
    """Their names are not known here, and they change little: 1% in a random model."""
    policy = Policy(small_model(model_type), MIXED)
    assert "padded: off by" in policy.passes.description
    assert policy.passes.head.linear is None
    with torch.no_grad():
        ours, plain = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N, plain_logps(policy)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0.05)  # bfloat16


def test_half_precision_weights_are_widened_for_a_trial():
    """Frozen matrices under adapters are stored in bfloat16."""
    policy = Policy(with_peft(LORA).float(), MIXED)
    linear = policy.model.base_model.model.model.layers[0].mlp.up_proj
    linear.weight.data = linear.weight.data.bfloat16()
    stored = linear.weight.data
    ids = torch.tensor([[5, 9, 20]])
    with torch.no_grad(), policy.in_float32(), policy.compute():
        wide = policy.model(input_ids=ids).logits
    assert linear.weight.data is stored or linear.weight.data_ptr() == stored.data_ptr()
    linear.weight.data = stored.float()
    with torch.no_grad():
        assert torch.equal(wide, policy.model(input_ids=ids).logits)
    linear.weight.data = stored
    assert policy.can_widen(copying=False)
    assert not policy.can_widen(copying=True)
    assert "(" not in policy.passes.description


@pytest.mark.parametrize("model_type", ["hyperclovax", "falcon_h1", "inkling_text"])
def test_multipliers_of_logits_are_known(model_type):
    """The settings of the small models are not 1."""
    policy = ComputeModel(small_model(model_type), SINGLE)
    ids, head = torch.tensor([[5, 9, 20, 7]]), find_head(policy)
    with torch.no_grad():
        expected = policy.model(input_ids=ids).logits[0]
        got = head.logits(policy.model.get_decoder()(input_ids=ids).last_hidden_state[0])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # float32, of other shapes


def test_a_window_that_contradicts_the_type_of_its_layer_is_refused():
    """Transformers masks this model by the types, and the trial is shorter than the window."""
    settings = {"use_sliding_window": False, "sliding_window": 20, "layer_types": LAYERS}
    config = type(small_config("smollm3"))(**small_config("smollm3").to_dict() | settings)
    passes = choose_passes(ComputeModel(AutoModelForCausalLM.from_config(config), SINGLE))
    assert not passes.shared
    assert "layer 0 is of type 'sliding_attention', and its window is None" in passes.description
