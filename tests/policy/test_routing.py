"""Routing replay: the update routes tokens by the recorded experts, in every way of cutting its passes."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.config import LoraConfig
from cohort.errors import DataError, ModelError
from cohort.policy import PackedRows, Policy, Precision
from cohort.policy.adapters import add_adapters
from cohort.policy.compute import enable_checkpointing
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.passes import PlainPasses, SharedPasses
from cohort.policy.routing import Routing, check_mixture, replayable, replaying
from tests.conftest import tiny_llama

FLOAT, DOUBLE = Precision(torch.float32, torch.float32), Precision(torch.float64, torch.float64)
LAYERS, EXPERTS, EACH = 3, 8, 2
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 12, "vocab_size": 37, "eos_token_id": 1, "pad_token_id": 0}
MIXTURE = {"num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS}
MIXTURE |= {"num_experts_per_tok": EACH, "moe_intermediate_size": 16, "initializer_range": 0.3}
DEEPSEEK = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DEEPSEEK |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "head_dim": 4}
FAMILIES = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {"sliding_window": 8, "layer_types": ["full_attention"] * LAYERS},
    "deepseek_v3": DEEPSEEK,
}
PROMPTS = [(5, 9, 11, 3), (7, 2)]
COMPLETIONS = [(4, 8, 15, 16), (23, 30), (6, 13, 20), (33,), (10, 12, 14, 18, 21)]
PROMPT_B = [0, 0, 1, 1, 0]


def mixture(family="qwen3_moe", **more):
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES | MIXTURE | FAMILIES.get(family, {}) | more)
    return AutoModelForCausalLM.from_config(config).eval()


def policy_of(model, precision=DOUBLE):
    policy = Policy(model.to(precision.master), precision)
    policy.replay_routes()
    return policy


def routers(model):
    """Parameters that only routers have."""
    names = ("gate.weight", "router.weight", "router.bias", "gate.e_score_correction_bias")
    return [tensor for name, tensor in model.state_dict(keep_vars=True).items() if name.endswith(names)]


def perturbed(model, size=2.0):
    """A model that routes otherwise: the sampler of these tests."""
    other = copy.deepcopy(model)
    torch.manual_seed(11)
    with torch.no_grad():
        for tensor in routers(other):
            tensor += size * torch.randn_like(tensor) * (tensor.std() if tensor.numel() > 1 else 1)
    return other


@contextlib.contextmanager
def recording(model):
    """The experts that each layer's tokens get, by layer."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if "is_transposed" in vars(module):
            layer = int(name.split("layers.")[1].split(".")[0])

            def record(_module, given, layer=layer):
                seen[layer] = given[1].clone()

            hooks.append(module.register_forward_pre_hook(record))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def drawn(model, prompt, ids):
    """Routes of the prompt but its last token, and of the inputs of a completion, as a sampler records them."""
    with recording(model) as seen:
        model(torch.tensor([[*prompt, *ids]]), use_cache=False)
    routes = torch.full((len(prompt) + len(ids), LAYERS, EACH), 0, dtype=torch.int8)  # dense layers: 0, as vLLM
    for layer, index in seen.items():
        routes[:, layer] = index.to(torch.int8)
    return routes[: len(prompt) - 1], routes[len(prompt) - 1 : -1]


def recorded(model, number):
    return drawn(model, PROMPTS[PROMPT_B[number]], COMPLETIONS[number])


@torch.no_grad()
def forced(model, sampler, prompt, ids):
    """The model's log-probs of a completion by its own forward pass, each layer's experts replaced: the reference."""
    with pytest.MonkeyPatch.context() as patch, recording(sampler) as seen:
        sampler(torch.tensor([[*prompt, *ids]]), use_cache=False)
        use_fixed_experts(patch, model, seen)
        logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
    logps = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return logps.gather(1, torch.tensor(ids)[:, None])[:, 0]


def use_fixed_experts(patch, model, seen):
    """Compute Qwen3-MoE's routers by hand: softmax over all experts, gathered, renormalised."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            layer = int(name.split("layers.")[1].split(".")[0])

            def forward(x, module=module, layer=layer):
                logits = functional.linear(x.reshape(-1, x.shape[-1]), module.weight)
                weights = logits.softmax(-1).gather(1, seen[layer])
                return logits, weights / weights.sum(-1, keepdim=True), seen[layer]

            patch.setattr(module, "forward", forward)


def rows_of(sampler, numbers, *, with_routes=True):
    parts = [recorded(sampler, number) for number in numbers]
    rows = PackedRows.of([PROMPT_B[n] for n in numbers], [COMPLETIONS[n] for n in numbers])
    prompt_routes = [
        next((p for n, (p, _) in zip(numbers, parts, strict=True) if PROMPT_B[n] == k), None) for k in (0, 1)
    ]
    if not with_routes:
        return rows, None
    return replace(rows, routes_T=torch.cat([routes for _, routes in parts])), prompt_routes


def logps(policy, rows, routes, passes=None, most=None):
    policy.passes = passes = passes or policy.passes
    prefixes = passes.read(PROMPTS, attached=most is None, routes=routes)
    with policy.compute():
        return policy.states(prefixes, rows, 1.0, most_tokens=most).logps().logps_N


def passes_of(policy, kind):
    """The passes that are chosen by themselves, which are lean for families that ``Anatomy`` reads; or others."""
    if kind == "custom":
        return SharedPasses(policy, policy.passes.head, CustomAttention(policy))
    return PlainPasses(policy, policy.passes.head) if kind == "plain" else policy.passes


def test_a_hand_worked_router():
    """Logits (2, 1, 0): free, experts 0 and 1 with weights e and 1 over e + 1; replayed 2 and 0: 1 and e^2 over e^2+1."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.is_transposed, self.num_experts = False, 3

        def forward(self, _x, index, weights):
            return index, weights

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts()

        def forward(self, logits):
            top, index = torch.topk(logits.softmax(-1), 2, dim=-1)
            top /= top.sum(-1, keepdim=True)
            return self.experts(logits, index, top)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.ModuleDict({"mlp": Block()})])
            self.config = AutoConfig.for_model("llama", num_hidden_layers=1)

        def forward(self, logits):
            return self.layers[0]["mlp"](logits)

    model = Model()
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3, dtype=torch.float64, requires_grad=True)
    assert replayable(model, lambda: model(logits)) == Routing(1, 3, 2)
    e = float(np.e)
    with replaying(torch.tensor([[[2, 0]], [[-1, -1]]])):  # the third has none
        index, weights = model(logits)
    assert index.tolist() == [[2, 0], [0, 1], [0, 1]]
    expected = [[1 / (e**2 + 1), e**2 / (e**2 + 1)], [e / (e + 1), 1 / (e + 1)], [e / (e + 1), 1 / (e + 1)]]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    # d w / d logit of a softmax over the two replayed experts: w (1 - w), and -w (1 - w) for the other.
    (grad,) = torch.autograd.grad(weights[0, 0], logits)
    slope = e**2 / (e**2 + 1) ** 2
    torch.testing.assert_close(grad[0], torch.tensor([-slope, 0.0, slope], dtype=torch.float64), rtol=0, atol=1e-12)
    index, _ = model(logits)
    assert index.tolist() == [[0, 1]] * 3  # outside of the block the router is free


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["lean", "custom", "plain"])
def test_the_update_agrees_with_a_sampler_that_routes_otherwise(family, kind):
    """The sampler is the update's model with the update's routers, and a choice of its own: it draws the routes of a
    perturbed router. With them the update's log-probs are those of its own full forward pass under the same routes; to
    float32 rounding. Without, they are not."""
    model = mixture(family)
    policy, other = policy_of(model, FLOAT), perturbed(model)
    passes = passes_of(policy, kind)
    found = logps(policy, *rows_of(other, range(5)), passes).detach()
    sampled = []
    for number, ids in enumerate(COMPLETIONS):
        prompt = PROMPTS[PROMPT_B[number]]
        whole = torch.cat([*recorded(other, number), torch.full((1, LAYERS, EACH), -1, dtype=torch.int8)])
        with torch.no_grad(), recording(model) as seen, replaying(whole):
            out = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
        for layer, index in seen.items():  # the routes were followed
            assert torch.equal(index[:-1], whole[:-1, layer].long())
        sampled.append(out[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(sampled), rtol=0, atol=2e-5)  # float32, in passes of another size
    free = logps(policy, *rows_of(other, range(5), with_routes=False), passes).detach()
    assert float((free - torch.cat(sampled)).abs().max()) > 0.01


def test_log_probs_and_gradients_are_those_of_fixed_experts():
    """Against routers written by hand, in float64: the numbers, and the gradients of every parameter."""
    model = mixture()
    policy, other = policy_of(model), perturbed(model.double())
    found = logps(policy, *rows_of(other, range(5)))
    found.sin().sum().backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    twin = copy.deepcopy(model)
    expected = []
    for number, ids in enumerate(COMPLETIONS):
        prompt = PROMPTS[PROMPT_B[number]]
        text = torch.tensor([[*prompt, *ids]])
        with pytest.MonkeyPatch.context() as patch:
            with torch.no_grad(), recording(other) as seen:
                other(text, use_cache=False)
            use_fixed_experts(patch, twin, dict(seen))
            out = twin(text, use_cache=False).logits[0]
        expected.append(out[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
    torch.cat(expected).sin().sum().backward()
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-6)  # the routers' softmax is in float32
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, rtol=1e-4, atol=1e-6)
    assert all(float(ours[name].abs().max()) > 0 for name in ours if name.endswith("gate.weight"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_neither_order_nor_packing_matters(family, seed):
    model = mixture(family)
    policy, other = policy_of(model), perturbed(model.double())
    whole = logps(policy, *rows_of(other, range(5))).detach().split([len(ids) for ids in COMPLETIONS])
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(5, generator=generator).tolist()
    cut = int(torch.randint(1, 5, (), generator=generator))
    for some in (numbers[:cut], numbers[cut:]):
        prompts = [recorded(other, next(n for n in range(5) if PROMPT_B[n] == k))[0] for k in (0, 1)]
        rows, _ = rows_of(other, some)
        found = logps(policy, rows, prompts).detach()
        expected = torch.cat([whole[n] for n in some])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # routers in float32


def test_long_rows_in_pieces():
    """Also with the gradient, whose backward pass runs each piece again."""
    found = []
    for most in (None, 2):
        policy = policy_of(mixture())
        rows, routes = rows_of(perturbed(policy.model), [0, 4])
        with policy.gradients_in_place(), policy.compute():
            prefixes = policy.passes.read(PROMPTS, routes=routes)
            states = policy.states(prefixes, rows, 1.0, most_tokens=most)
            assert (type(states.hidden_NH.grad_fn).__name__ == "CatBackward0") is (most is not None)
            states.hidden_NH.sin().sum().backward()
            prefixes.backward()
        found.append([states.hidden_NH.detach(), *(weight.grad for weight in policy.model.parameters())])
    for whole, cut in zip(*found, strict=True):
        if whole is not None:  # the head has no gradient here
            torch.testing.assert_close(cut, whole, rtol=0, atol=1e-6)  # routers in float32


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["lean", "custom", "plain"])
def test_recomputed_layers_have_the_same_routes(family, kind):
    """Checkpointing recomputes layers in the backward pass, after the pass's block was left: bit for bit the same."""
    grads = []
    for checkpointed in (False, True):
        model = mixture(family)
        if checkpointed:
            enable_checkpointing(model)
        policy, other = policy_of(model, FLOAT), perturbed(model)
        passes = passes_of(policy, kind)
        with policy.training():
            found = logps(policy, *rows_of(other, range(5)), passes)
            found.sin().sum().backward()
        grads.append([found.detach(), *(weight.grad for weight in model.parameters())])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of peft, for experts
@pytest.mark.parametrize("targets", ["all-linear", "q_proj"])  # peft wraps the experts, or it does not
def test_adapters(targets):
    model = add_adapters(mixture(), LoraConfig(rank=2, target_modules=(targets,)), FLOAT, seed=0)
    policy = policy_of(model, FLOAT)
    other = perturbed(mixture())
    rows, routes = rows_of(other, range(5))
    found = logps(policy, rows, routes).detach()
    whole = policy_of(mixture(), FLOAT)
    torch.testing.assert_close(found, logps(whole, rows, routes).detach(), rtol=0, atol=2e-5)  # they add nothing yet


def test_a_reference_routes_freely():
    policy = policy_of(mixture(), FLOAT)
    assert policy.routing == Routing(LAYERS, EXPERTS, EACH)
    assert policy.reference().routing is None
    assert policy.snapshot().routing is None


def test_routes_of_another_model_are_refused():
    policy, (rows, routes) = policy_of(mixture(), FLOAT), rows_of(mixture(), range(5))
    with pytest.raises(DataError, match="of 3 layers with 2 experts each were expected, got"):
        logps(policy, replace(rows, routes_T=rows.routes_T[:, :2]), routes)
    with pytest.raises(DataError, match="experts 0 to 8, and the model has 8"):
        logps(policy, replace(rows, routes_T=rows.routes_T.clone().index_fill_(0, torch.tensor([2]), 8)), routes)


def test_models_that_cannot_replay_are_refused_by_name():
    with pytest.raises(
        ModelError, match="rollout.replay_routing needs a mixture of experts, and 'llama' has no expert"
    ):
        check_mixture(tiny_llama().config)
    check_mixture(mixture().config)
    grouped = mixture("deepseek_v2", **DEEPSEEK, topk_method="group_limited_greedy", norm_topk_prob=False)
    with pytest.raises(ModelError, match="how DeepseekV2ForCausalLM chooses experts .*replay_routing to false"):
        policy_of(grouped, FLOAT)
    with pytest.raises(ModelError, match="how PhimoeForCausalLM chooses experts"):
        policy_of(mixture("phimoe"), FLOAT)
