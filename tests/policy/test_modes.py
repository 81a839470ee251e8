"""The update runs in evaluation mode, as the sampler does: training mode changes more than dropout in some models."""

import pytest
import torch

from cohort.errors import ModelError
from cohort.policy import PackedRows, Policy
from cohort.policy.compute import enable_checkpointing
from tests.families.configs import ATTENTION, COMMON, small_model
from tests.policy.plain import COMPLETIONS, PROMPTS, SINGLE, TEMPERATURE, assert_near, gradients, plain_logps, weighted
from tests.policy.plain import model_of as small

EXPERTS = ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "word_embed_proj_dim": 32}
CHANGED_BY_TRAINING = {
    "phimoe": EXPERTS,  # draws experts at random
    "mixtral": EXPERTS | {"router_jitter_noise": 0.3},
    "falcon": COMMON
    | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"hidden_dropout": 0.5},  # read from the config in each forward pass
    "opt": COMMON | OPT | {"max_position_embeddings": 128, "layerdrop": 0.9},
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", CHANGED_BY_TRAINING)
def test_an_update_computes_what_the_sampler_computed(family, checkpointed):
    policy = Policy(small(family, CHANGED_BY_TRAINING[family]), SINGLE)
    expected = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N.detach()
    plain = gradients(policy, weighted(policy))
    if checkpointed:
        enable_checkpointing(policy.model)
    with policy.training():
        logps_N = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N
        got = gradients(policy, weighted(policy))
    torch.testing.assert_close(logps_N.detach(), expected, rtol=0, atol=0)
    assert_near(got, plain, 1e-6)  # float32; the same operations, layers recomputed
    assert not any(module.training for module in policy.model.modules())


def test_checkpointed_layers_are_recomputed_in_evaluation_mode():
    policy = Policy(small("arcee"), SINGLE)
    enable_checkpointing(policy.model)
    mlp, runs = policy.model.model.layers[0].mlp, []
    mlp.register_forward_pre_hook(lambda module, _: runs.append((module.training, torch.is_grad_enabled())))
    policy.passes  # noqa: B018 - chosen before the hook counts
    runs.clear()
    prompts = [(5, 9, 20)]
    with policy.training():
        prefixes = policy.passes.read(prompts)
        policy.states(prefixes, PackedRows.of([0], [(4, 6)]), 1.0).logps().logps_N.sum().backward()
    assert [training for training, _ in runs] == [False] * len(runs)
    assert len(runs) == 3  # the prompt's, the row's, and the row's again


def test_dropout_needs_training_mode():
    policy = Policy(small("gpt2"), SINGLE, dropout=True)
    with policy.training():
        assert all(module.training for module in policy.model.modules())
    assert not policy.model.training


@pytest.mark.parametrize("family", ["jetmoe", "ctrl"])
def test_checkpointing_that_transformers_does_not_support_is_refused(family):
    with pytest.raises(ModelError, match="transformers does not support it for"):
        enable_checkpointing(small_model(family))


@pytest.mark.parametrize("family", ["phimoe", "opt"])
def test_dropout_is_refused_where_training_mode_changes_more(family):
    policy = Policy(small(family, CHANGED_BY_TRAINING[family]), SINGLE, dropout=True)
    with pytest.raises(ModelError, match="training mode changes more than dropout"):
        policy.passes  # noqa: B018


def test_dropout_from_the_config_is_dropout():
    policy = Policy(small("falcon", CHANGED_BY_TRAINING["falcon"]), SINGLE, dropout=True)
    assert not policy.passes.shared
    assert policy.model.config.hidden_dropout == 0.5


def test_padding_has_no_gradient_where_states_are_divided_by_their_norms():
    """The embedding of the padding token is 0 in Gemma 3n, and its norms have no epsilon."""
    policy = Policy(small_model("gemma3n_text"), SINGLE)
    assert not policy.model.get_input_embeddings().weight[0].any()
    assert policy.passes.shared
    assert_near(gradients(policy, weighted(policy)), gradients(policy, weighted(policy, plain_logps)), 1e-3)


def test_a_model_that_reads_later_tokens_cannot_be_trained():
    with pytest.raises(ModelError, match="a text's logits depend on the texts beside it"):
        Policy(small_model("xlnet"), SINGLE).passes  # noqa: B018
