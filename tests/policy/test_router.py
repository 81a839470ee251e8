"""The load-balancing loss: transformers' own number and gradient, however the minibatch is cut."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import ModelError
from cohort.objective import PRESETS
from cohort.policy import ExpertBalance, Policy, expert_counts
from cohort.train.sweep import expert_balance
from tests.conftest import tiny_llama
from tests.train.updates import DOUBLE, all_sequences, batch_for, context_for, gradient, segments_of

PAPER = PRESETS["grpo"]


def mixture(vocab_size=37):
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=24,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            initializer_range=0.3,
            eos_token_id=1,
        )
    )
    model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


def test_the_loss_is_transformers(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(30, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    theirs = load_balancing_loss_func(logits, 4, 2)
    balance = ExpertBalance(expert_counts(logits, 2), 90, 1.0)
    halves = [balance.loss([layer[part] for layer in logits]) for part in (slice(0, 11), slice(11, 30))]
    # transformers adds probabilities up in float32.
    torch.testing.assert_close(sum(halves), theirs.double(), rtol=1e-6, atol=0)
    ours = torch.autograd.grad(sum(halves), logits)
    for one, other in zip(ours, torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(one, other.double(), rtol=1e-5, atol=1e-9)


def test_an_updates_gradient_has_the_loss_in_it_however_it_is_cut():
    plain, weighed = (Policy(mixture().double(), DOUBLE) for _ in range(2))
    weighed.router_aux_loss_coef = 0.3
    assert weighed.passes.shared
    batch = batch_for(plain, PAPER)
    without, _ = gradient(plain, batch, PAPER, 1000)
    uncut, _ = gradient(weighed, batch, PAPER, 1000)
    parts, _ = gradient(weighed, batch, PAPER, 7)
    for one, other in zip(uncut, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    # By hand: every completion with its prompt, the routers' outputs at the rows that completions take.
    rows = [[], []]
    for prompt, completion in segments_of(batch):
        with plain.compute():
            output = plain.model.model(torch.tensor([[*prompt, *completion[:-1]]]), output_router_logits=True)
        for layer, logits in enumerate(output.router_logits):
            rows[layer].append(logits.reshape(-1, 4)[len(prompt) - 1 :])
    joined = [torch.cat(layer) for layer in rows]
    plain.model.zero_grad()
    (0.3 * load_balancing_loss_func(tuple(joined), 4, 2)).backward()
    for base, with_loss, parameter in zip(without, uncut, plain.model.parameters(), strict=True):
        expected = base + (0 if parameter.grad is None else parameter.grad)
        torch.testing.assert_close(with_loss, expected, rtol=0, atol=1e-6)  # theirs adds up in float32
    balance = expert_balance(context_for(weighed, PAPER, 11), batch, all_sequences(batch))
    assert balance.rows == 2 * batch.num_tokens
    assert balance.counts_E.sum() == 2 * 2 * batch.num_tokens


def reward(completions, **_):
    return [float(len(text)) for text in completions]


def trainer(model, tokenizer, folder, reward=reward, **objective):
    config = GRPOConfig(
        model={"router_aux_loss_coef": 0.01},
        objective=objective,
        rollout={"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4},
        run={"output_dir": str(folder), "max_steps": 1},
        report={"progress": False},
    )
    return GRPOTrainer(model, reward, config, [{"prompt": "1+1"}, {"prompt": "2+1"}], processing_class=tokenizer)


def test_a_run_with_the_loss(tmp_path, demo_tokenizer):
    run = trainer(mixture(len(demo_tokenizer)), demo_tokenizer, tmp_path / "run")
    assert run.train()["updates"] == 1
    assert run.last_metrics["router_loss"] == run.last_updates[0]["router_loss"]
    assert run.last_metrics["router_loss"] == pytest.approx(2.0, rel=0.3)  # k, if all experts are used alike


@pytest.mark.parametrize("iterations", [1, 2])  # two need the log-probs before the first update
def test_groups_of_equal_rewards_balance_the_experts_too(tmp_path, demo_tokenizer, iterations):
    def equal(completions, **_):
        return [1.0] * len(completions)

    run = trainer(mixture(len(demo_tokenizer)), demo_tokenizer, tmp_path / "run", equal, num_iterations=iterations)
    assert run.train()["updates"] == iterations
    metrics = run.last_metrics
    assert (metrics["groups/dead_share"], metrics["updates_nonfinite"]) == (1, 0)
    assert metrics["grad_norm"] > 0
    assert all(update["router_loss"] == pytest.approx(2.0, rel=0.3) for update in run.last_updates)


def test_models_without_experts(tmp_path, demo_tokenizer):
    with pytest.raises(ModelError, match="needs a mixture-of-experts model, and 'llama' has no experts"):
        trainer(tiny_llama(len(demo_tokenizer)), demo_tokenizer, tmp_path / "run")
