"""The token budget: the memory of a pass, the budget that fits, and recovery when memory runs out."""

import importlib
import os
import platform
import sys

import pytest
import torch
from torch.distributed import DistBackendError
from transformers import GPT2Config, GPT2LMHeadModel

from cohort.errors import ModelError, RankError, StepError, Stopped, out_of_memory
from cohort.objective import PRESETS
from cohort.parallel import World
from cohort.policy import Policy, Precision, attention, enable_checkpointing, pieces
from cohort.policy.device import keep_freed_memory
from cohort.rollout import LocalEngine
from cohort.runs import checkpoints
from cohort.runs.models import read_tensors
from cohort.train import Optimizer, TokenBudget, UpdateResult, find_budget, update
from cohort.train.memory import LiveBytes, memory_metrics, peak_bytes
from tests.conftest import each, telling, tiny_llama
from tests.families.configs import small_model
from tests.train.harness import ROWS, checkpoints_of, make_trainer, metrics_of, same_parameters
from tests.train.updates import DOUBLE, all_sequences, batch_for, context_for, gradient

PAPER = PRESETS["grpo"]
memory, update_module = (importlib.import_module(f"cohort.train.{name}") for name in ("memory", "update"))
SINGLE, MIXED = Precision(torch.float32, torch.float32), Precision(torch.float32, torch.bfloat16)


def wide_llama(**settings):
    """Activations that outweigh the gradients."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 4096}
    return tiny_llama(**sizes | settings)


def test_bytes_alive_at_once_by_hand():
    with LiveBytes() as live:
        first = torch.zeros(1000)  # 4,000
        second = first + 1  # 8,000
        view = second.view(10, 100)  # none
        view.add_(1)
        del first  # 4,000
        third = torch.cat([second, second])  # 12,000
        del second, view, third
        torch.zeros(100)
    assert live.peak == 12_000
    assert live.now == 0


def test_memory_allocated_before_is_not_counted():
    weight = torch.randn(500, 10, requires_grad=True)
    with LiveBytes() as live:
        product = weight.t() @ torch.ones(500, 1)
        del product
    assert live.peak == 4 * (500 + 10)


def test_the_prediction_is_the_peak_of_a_pass_as_long_as_the_budget():
    policy = Policy(wide_llama(), SINGLE)
    budget = find_budget(policy, 1024, 16, 16)
    measured = peak_bytes(policy, 1024, 1024)
    # The prediction is a straight line through small passes; the head works in chunks, which add a step.
    assert measured == pytest.approx(budget.predicted_bytes, rel=0.25)


def test_the_prediction_of_a_completion_in_pieces():
    policy = Policy(wide_llama(), SINGLE)
    budget = find_budget(policy, 256, 16, 4096)
    assert "passes of at most 256 tokens, longer completions in pieces of 256; the largest" in budget.describe()
    measured = peak_bytes(policy, 16, 4096, most_tokens=256)
    # The prediction adds what a token takes to the peak of 512 tokens. Another stage has that peak, with more activations:
    # the prediction errs on the safe side, by the same bytes for any longer completion.
    assert measured < budget.predicted_bytes < 1.1 * measured


@pytest.mark.parametrize(
    ("compute", "heads", "stages", "expected"),
    [
        # The last stage: two residual streams and a gradient of 64, keys and values of 32 with their gradients.
        (torch.float32, 2, [1, 1, 1], 4 * (3 * 64 + 4 * 32) + 28),
        (torch.bfloat16, 2, [1, 1, 1], 4 * (3 * 64 + 4 * 32) + 2 * 64 + 28),
        # Either stage: 64 and twice 4 * 16, or 2 * 64 and once 4 * 16.
        (torch.float32, 1, [2, 1], 4 * (64 + 2 * 4 * 16) + 28),
    ],
)
def test_what_a_token_of_a_long_completion_takes(monkeypatch, compute, heads, stages, expected):
    monkeypatch.setattr(attention, "BLOCK", 256)
    model = tiny_llama(hidden_size=64, num_hidden_layers=3, num_key_value_heads=heads, max_position_embeddings=8192)
    policy = Policy(model, Precision(torch.float32, compute))
    assert pieces.stage_sizes(3, 64, 16 * heads) == stages
    assert pieces.memory_of_token(policy.passes) == (expected, stages[0] / 3)
    # The first pass makes the memory that kernels work in, which is kept.
    _, short, long = (peak_bytes(policy, 16, length, most_tokens=256) for length in (1024, 1024, 1280))
    assert (long - short) / 256 == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("precision", telling([SINGLE, MIXED], MIXED))
def test_the_prediction_counts_logits_of_passes_longer_than_the_tried_one(precision):
    policy = Policy(wide_llama(vocab_size=20_000, max_position_embeddings=16_384), precision)
    budget, measured = find_budget(policy, 512, 16, 16), peak_bytes(policy, 512, 512)
    assert measured > 512 * 20_000 * precision.compute.itemsize
    assert 0.95 * measured < budget.predicted_bytes < 1.3 * measured
    short, long = (find_budget(policy, 256, 16, length).predicted_bytes for length in (4096, 8192))
    # What 8,192 tokens add to 4,096 is what layers need: the chunk of logits has its size before (1,664 or 832 tokens).
    assert long - short == pytest.approx(4096 * pieces.memory_of_token(policy.passes)[0], rel=0.3)


def test_the_longest_completion_is_tried():
    policy = Policy(wide_llama(), SINGLE)
    assert find_budget(policy, 64, 500, 350).predicted_bytes > 3 * find_budget(policy, 64, 16, 16).predicted_bytes


def test_checkpointing_needs_less_memory():
    policy = Policy(wide_llama(), SINGLE)
    before = peak_bytes(policy, 256, 256)
    enable_checkpointing(policy.model)
    assert peak_bytes(policy, 256, 256) < 0.7 * before


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_without_a_backward_pass_leaves_nothing(checkpointing):
    """As the first passes of the plan, and one that runs out of memory halfway."""
    policy = Policy(wide_llama(), SINGLE)
    if checkpointing:
        enable_checkpointing(policy.model)
    assert policy.passes.shared
    with LiveBytes() as live:
        peak_bytes(policy, 64, 64, forward_only=True)
    assert live.peak > 10**5
    assert live.now == 0


def test_trying_changes_nothing():
    policy = Policy(tiny_llama(), SINGLE)
    state = torch.get_rng_state()
    weights = [p.clone() for p in policy.model.parameters()]
    find_budget(policy, None, 20, 20)
    assert torch.equal(torch.get_rng_state(), state)
    for before, parameter in zip(weights, policy.model.parameters(), strict=True):
        assert torch.equal(before, parameter)
        assert parameter.grad is None
    assert not policy.model.training


def test_probes_stay_within_a_short_context():
    """A model with learned positions fails beyond its context."""
    config = GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, n_positions=48)
    policy = Policy(GPT2LMHeadModel(config), SINGLE)
    assert find_budget(policy, None, 20, 20).predicted_bytes > 0
    padded = Policy(small_model("openai-gpt"), SINGLE)  # whole texts in a pass, at most 128 tokens
    assert find_budget(padded, None, 100, 28).predicted_bytes > 0


def test_the_budget_follows_the_free_memory(monkeypatch):
    policy = Policy(wide_llama(), SINGLE)
    chosen = {}
    for free in (2**50, 40 * 2**20, 1):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        chosen[free] = find_budget(policy, None, 16, 16)
    assert chosen[2**50].tokens == 4096
    assert 256 < chosen[40 * 2**20].tokens < 1024
    assert peak_bytes(policy, *2 * (chosen[40 * 2**20].tokens,)) < 0.6 * 40 * 2**20
    assert chosen[1].tokens == 256
    assert "likely too little" in chosen[1].describe()
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    assert find_budget(policy, None, 16, 16).tokens == 4096
    assert find_budget(policy, 77, 16, 16).tokens == 77


def test_no_longer_completion_is_tried_whole_than_a_pass_can_hold(monkeypatch):
    policy, tried, real = Policy(wide_llama(), SINGLE), [], memory.peak_bytes

    def recorded(policy, prompt_length, completion_length, **settings):
        tried.append(real(policy, prompt_length, completion_length, **settings))
        return tried[-1]

    monkeypatch.setattr(memory, "peak_bytes", recorded)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 30 * 2**20)
    budget = find_budget(policy, None, 16, 3000)
    assert "longer completions in pieces" in budget.describe()
    assert max(tried) < 30 * 2**20 < real(policy, 16, 3000)


def test_more_than_1024_tokens_on_a_cpu_must_be_cheap(monkeypatch):
    policy = Policy(wide_llama(), SINGLE)
    of_token = (peak_bytes(policy, 192, 192, forward_only=True) - peak_bytes(policy, 64, 64, forward_only=True)) / 128
    for room, expected in ((1500, 1500), (5000, 4096), (512, 1024)):
        monkeypatch.setattr(memory, "MORE_BYTES", room * of_token)
        assert find_budget(policy, None, 16, 16).tokens == expected


class Counters:
    """The counters of CUDA's allocator, for tensors of a CPU: what is alive, ``workspace`` bytes that the first pass
    allocates and a library keeps, and ``inside`` bytes that kernels of each pass allocate and free themselves."""

    def __init__(self, monkeypatch, workspace=0, inside=0):
        self.live, self.workspace, self.inside = LiveBytes(), workspace, inside
        self.passes, self.base, self.highest = 0, 10**9, 2 * 10**9
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def memory_allocated(self, device):
        assert device == OnCUDA.device
        return self.base + self.live.now

    def max_memory_allocated(self, device):
        of_pass = self.inside + self.workspace * (self.passes == 1)
        return max(self.highest, self.base + self.live.peak + of_pass)

    def reset_peak_memory_stats(self, device):
        self.base += self.workspace * (self.passes == 1)
        self.passes, self.highest, self.live.peak = self.passes + 1, 0, self.live.now


class OnCUDA:
    """A policy whose tensors seem to be on CUDA."""

    device = torch.device("cuda", 0)

    def __init__(self, policy):
        self.policy = policy

    def __getattr__(self, name):
        return getattr(self.policy, name)


def test_on_cuda_the_counters_of_the_allocator_are_read(monkeypatch):
    """With what kernels allocate themselves, and without what the first pass allocates for all."""
    policy = Policy(wide_llama(), SINGLE)
    expected, predicted = peak_bytes(policy, 64, 64), find_budget(policy, 512, 16, 16).predicted_bytes
    counters = Counters(monkeypatch, workspace=10**7, inside=1000)
    monkeypatch.setattr(memory, "EARLIER_PEAKS", {})
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**40)
    # Of each further token, native kernels have a float32 number for each logit, torch has two.
    predicted += 1000 + 4 * policy.vocab_size * (512 - 16)
    with counters.live:
        assert find_budget(OnCUDA(policy), 512, 16, 16).predicted_bytes == pytest.approx(predicted, abs=1)
        assert peak_bytes(OnCUDA(policy), 64, 64) == expected + 1000
    # The peak of the run is not forgotten when the counter is set back.
    assert counters.max_memory_allocated(OnCUDA.device) < 2 * 10**9
    assert memory_metrics(OnCUDA.device)["memory/device_peak_mib"] == 2 * 10**9 / 2**20
    counters.base = 3 * 10**9
    assert memory_metrics(OnCUDA.device)["memory/device_peak_mib"] > 3 * 10**9 / 2**20


def test_free_on_cuda_is_what_the_driver_and_the_allocator_have(monkeypatch):
    for name, answer in (("mem_get_info", (500, 9000)), ("memory_reserved", 300), ("memory_allocated", 120)):
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert memory.free_bytes(OnCUDA.device) == 500 + 180


@pytest.mark.parametrize("newest", [True, False])
def test_expandable_segments_unless_something_else_is_set(newest, monkeypatch):
    """By the function of the installed torch; in the process alone, not in the environment of a vLLM server."""
    given = []
    name = "_accelerator_setAllocatorSettings"
    monkeypatch.setattr(torch._C, name, given.append if newest else None, raising=False)
    if not newest:
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", given.append)
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-amd64")
    monkeypatch.setattr(sys, "platform", "linux")
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    before = dict(os.environ)
    keep_freed_memory(OnCUDA.device)
    assert given == ["expandable_segments:True"]
    assert dict(os.environ) == before
    keep_freed_memory(torch.device("cpu"))
    for patch in (
        lambda patch: patch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128"),
        lambda patch: patch.setenv("PYTORCH_CUDA_ALLOC_CONF", ""),
        lambda patch: patch.setattr(platform, "release", lambda: "5.15.90.1-microsoft-standard-WSL2"),
        lambda patch: patch.setattr(sys, "platform", "win32"),
    ):
        with monkeypatch.context() as context:
            patch(context)
            keep_freed_memory(OnCUDA.device)
    assert len(given) == 1


def test_a_pass_that_never_fits_is_refused_before_the_run(monkeypatch):
    out_once(monkeypatch, memory, "peak_bytes", 3)
    with pytest.raises(ModelError, match=r"one prompt and completion, 40 tokens: set model\.gradient_checkpointing"):
        find_budget(Policy(wide_llama(), SINGLE), None, 30, 10)


def test_the_budget_halves_until_single_tokens():
    budget = TokenBudget(5)
    for expected in (2, 1):
        with pytest.warns(UserWarning, match=f"repeating with {expected} tokens a pass"):
            budget.halve()
        assert budget.tokens == expected
    with pytest.raises(ModelError, match=r"model\.gradient_checkpointing"):
        budget.halve()


NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. "),
    RuntimeError("CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    DistBackendError(
        f"{NCCL}2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'"
    ),
    DistBackendError(f"{NCCL}2.20.5\nLast error:\nCuda failure 2 'out of memory'"),
    DistBackendError(f"{NCCL}2.18.1\nLast error:\nFailed to CUDA calloc async 24 bytes"),
]
NOT_OUT = [
    RuntimeError("shapes do not match"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("the judge answered: I ran out of memory of our conversation"),
    OSError(12, "Cannot allocate memory"),
    DistBackendError(f"{NCCL}2.28.9\nLast error:\nCuda failure 'invalid argument'"),
    DistBackendError("ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    RankError("rank 1 of 2: CUDA out of memory. Tried to allocate 2.00 GiB"),
    StepError("CUDA error: out of memory"),
]
"""As torch and its libraries write them."""


@each("error", OUT)
def test_memory_ran_out(error):
    assert out_of_memory(error)


@each("error", NOT_OUT)
def test_memory_did_not_run_out(error):
    assert not out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "expected"), [(OUT[-3], DistBackendError), (NOT_OUT[-4], RankError), (NOT_OUT[0], RankError)]
)
def test_an_exchange_tells_memory_that_ran_out_from_a_lost_rank(error, expected):
    with pytest.raises(expected), World(rank=0, size=2)._exchange(meet=lambda: None):
        raise error


def fail_once(monkeypatch, error):
    """The second backward pass raises an error."""
    real, calls = torch.Tensor.backward, []

    def backward(self, *arguments, **named):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return real(self, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "backward", backward)


def test_an_update_that_ran_out_of_memory_is_repeated_with_smaller_passes(float64_policy, monkeypatch):
    batch = batch_for(float64_policy, PAPER)
    expected, _ = gradient(float64_policy, batch, PAPER, 10_000)
    fail_once(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    context = context_for(float64_policy, PAPER, 20)
    with pytest.warns(UserWarning, match="repeating with 10"):
        outcome = context.within_memory(update, batch, all_sequences(batch))
    assert isinstance(outcome, UpdateResult)
    for one, parameter in zip(expected, float64_policy.model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-10)  # float64, sums in another order


def test_other_errors_are_raised(float64_policy, monkeypatch):
    batch = batch_for(float64_policy, PAPER)
    fail_once(monkeypatch, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        update(context_for(float64_policy, PAPER, 20), batch, all_sequences(batch))


def out_once(monkeypatch, place, name, at=1):
    """Memory runs out in call ``at`` of a function."""
    real, calls = getattr(place, name), []

    def failing(*arguments, **settings):
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments, **settings)

    monkeypatch.setattr(place, name, failing)


PLACES = {
    "old log-probs of the second step": ("sweep", "token_logps", 2),
    "norms of the terms": ("metrics", "microbatch_losses", 1),
    "backward": (torch.Tensor, "backward", 2),
    "statistics, beside the step": ("update", "token_statistics", 2),
    "how far the step moved": ("metrics", "token_logps", 1),
}


def test_a_run_goes_on_with_smaller_passes(demo_tokenizer, tmp_path, monkeypatch):
    """Wherever memory runs out, no update is left out or made twice: the metrics are those of a run with enough."""
    settings = {"max_steps": 2, "num_iterations": 2, "microbatch_tokens": 2048, "term_norms_steps": 1}
    settings |= {"prompts_per_step": 2, "num_generations": 2}
    expected = list(make_trainer(demo_tokenizer, tmp_path / "enough", **settings).steps())
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    for place, name, at in PLACES.values():
        module = importlib.import_module(f"cohort.train.{place}") if isinstance(place, str) else place
        out_once(monkeypatch, module, name, at)
    with pytest.warns(UserWarning, match="out of memory"):
        got = list(trainer.steps())
    assert trainer.budget.tokens == 2048 // 2 ** len(PLACES)
    steps = {float(state["step"]) for rule in trainer.optimizer.rules for state in rule.state.values()}
    assert steps == {trainer.policy.version} == {4}
    for one, other in zip(got, expected, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)  # float32, sums in another order
        assert one["update_kl"] == pytest.approx(other["update_kl"], rel=1e-3)  # a difference of nearly equal numbers
        assert one["updates"] == other["updates"] == 2


def test_no_gradient_lives_while_completions_are_sampled(demo_tokenizer, tmp_path, monkeypatch):
    """And the state of the optimizer is there before the first are, and before free memory is measured."""
    seen, real = [], LocalEngine.generate

    def generate(self, *arguments, **settings):
        gradients = [p.grad for p in (*self.policy.model.parameters(), *trainer.optimizer.parameters)]
        states = [len(rule.state) for rule in trainer.optimizer.rules]
        seen.append((sum(states), all(gradient is None for gradient in gradients)))
        return real(self, *arguments, **settings)

    def measured(*arguments):
        order.append("find_budget")
        return find_budget(*arguments)

    def allocated(self):
        order.append("allocate_state")
        return allocate(self)

    order, allocate = [], Optimizer.allocate_state
    monkeypatch.setattr("cohort.trainer.find_budget", measured)
    monkeypatch.setattr(Optimizer, "allocate_state", allocated)
    monkeypatch.setattr(LocalEngine, "generate", generate)
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, num_iterations=2, eval_rows=ROWS[:2])
    assert order == ["allocate_state", "find_budget"]
    trainer.train()
    assert trainer.policy.version == 6
    assert seen == [(len(trainer.optimizer.parameters), True)] * 5  # three steps and two evaluations


def test_the_first_checkpoint_has_no_state_and_none_is_needed(demo_tokenizer, tmp_path):
    """A run that is stopped before its first update writes as little as if no state were allocated."""

    def make(folder):
        return make_trainer(demo_tokenizer, folder, max_steps=2)

    straight, stopped = make(tmp_path / "straight"), make(tmp_path / "run")
    straight.train()
    stopped.stop()
    with pytest.raises(Stopped):
        stopped.train()
    state = tmp_path / "run" / "checkpoints" / "step-0" / "state" / "optimizer.safetensors"
    assert read_tensors(state) == {}
    resumed = make(tmp_path / "run")
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)


def test_no_memory_for_the_optimizer_s_state_is_known_at_once(demo_tokenizer, tmp_path, monkeypatch):
    out_once(monkeypatch, torch.optim.AdamW, "_init_group")
    with pytest.raises(ModelError, match="out of memory for the state of AdamW"):
        make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1)


def test_a_checkpoint_without_memory_for_it_is_written_later(demo_tokenizer, tmp_path, monkeypatch, caplog):
    out_once(monkeypatch, checkpoints, "write_tensors", 2)
    monkeypatch.setattr("cohort.runs.writer.RETRY_SECONDS", 0.01)
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, save_steps=1).train()
    assert checkpoints_of(tmp_path / "run") == ["step-1", "step-2", "step-3"]
    assert "not written yet: checkpoint of step 2: CUDA out of memory. Training " in caplog.text


def test_memory_that_runs_out_in_the_optimizers_step_ends_the_run(demo_tokenizer, tmp_path, monkeypatch):
    """Some weights may be stepped: the update is not repeated, and nothing is written of them."""
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, save_steps=1)
    out_once(monkeypatch, torch.optim.AdamW, "_init_group", 2 * 2 + 2)  # two groups; two steps, half a step
    with pytest.raises(StepError, match=r"optimizer's step.*cannot be repeated"):
        trainer.train()
    assert len(metrics_of(tmp_path / "run")) == 2
    assert checkpoints_of(tmp_path / "run") == ["step-1", "step-2"]


def test_a_failed_pass_leaves_no_tensors(float32_policy, monkeypatch):
    """The tensors of the larger pass are freed before the smaller one runs."""
    batch, alive = batch_for(Policy(tiny_llama().double(), DOUBLE), PAPER), []
    real = update_module.microbatch_losses

    def losses(*arguments):
        found = real(*arguments)
        alive.append(found[0]["policy"].untyped_storage()._weak_ref())
        if len(alive) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(update_module, "microbatch_losses", losses)
    context, expired = context_for(float32_policy, PAPER, 64), []

    def first_alive(*arguments):
        expired.append(bool(alive) and torch.UntypedStorage._expired(alive[0]))
        return update(*arguments)

    with pytest.warns(UserWarning, match="out of memory"):
        context.within_memory(first_alive, batch, all_sequences(batch))
    assert expired == [False, True]
