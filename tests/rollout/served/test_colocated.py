"""vLLM in the trainer's process, over a stand-in of its module."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cohort.config import ModelConfig, VLLMConfig
from cohort.errors import ConfigError, DataError, EngineError, PolicyMismatchError
from cohort.parallel import World
from cohort.policy import Policy, Precision, load_policy, load_tokenizer
from cohort.rollout import DividedSampler, Request, RNGKey, Sampling, ServedEngine, Watch
from cohort.rollout.served import colocated, tensor_group
from cohort.rollout.served.colocated import NAME, Colocated, missing
from cohort.rollout.served.connect import Probe
from cohort.types import FinishReason, Group
from tests.conftest import DEMO_MODEL, tiny_llama
from tests.parallel.launching import Ranks, on_ranks
from tests.train.harness import (
    digits_reward,
    make_trainer,
    metrics_of,
    rows_of,
    same_parameters,
    straight_and_resumed,
    untimed_metrics_of,
)

from . import fake_vllm
from .test_engine import (
    SELECTIONS,
    adapted_policy,
    allowed_of,
    completions_of,
    play,
    prompts,
    sampler_logps,
    trainer_logps,
)

PROMPTS = prompts((5, 9, 20), (7,), (30, 31, 32, 33), (2, 3))
KEY = RNGKey(0, 3)
CLOSE = {"rtol": 0, "atol": 1e-5}  # float32: two orders of summation
MERGED = {"rtol": 0, "atol": 3e-5}  # and weights that are rounded once more
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it


@pytest.fixture
def llm(monkeypatch):
    with fake_vllm.installed(monkeypatch) as llm:
        yield llm


@pytest.fixture
def tokenizer(demo_tokenizer):
    return demo_tokenizer


def policy_of(tokenizer, **config):
    return Policy(tiny_llama(len(tokenizer), initializer_range=0.1, **config), Precision(torch.float32, torch.float32))


def engine_of(policy, tokenizer, **settings):
    vllm = VLLMConfig(**settings.pop("vllm", {}))
    probe = Probe(policy)
    turns = Colocated(policy, tokenizer, vllm, context=128, probe=lambda one: probe(one, NAME, one.found), **settings)
    return ServedEngine(policy, tokenizer, (1,), turns, context=128)


@pytest.fixture
def policy(tokenizer):
    return policy_of(tokenizer)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sampler_and_trainer_log_probs_agree_after_each_update(llm, tokenizer, tied):
    policy = policy_of(tokenizer, tie_word_embeddings=tied)
    engine = engine_of(policy, tokenizer)
    for version in range(2):
        engine.update_weights(version)
        groups = engine.generate(PROMPTS, 4, Sampling(12, 0.8), KEY)
        torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups, 0.8), **CLOSE)
        assert {c.weights_version for c in completions_of(groups)} == {version}
        metrics = engine.metrics()
        assert metrics["server/probe_gap_max"] < 1e-5
        assert metrics["seconds/weights"] > 0
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
    assert {c.finish_reason for c in completions_of(groups)} == {FinishReason.EOS, FinishReason.LENGTH}
    assert llm.events == ["start", "weights", "weights"]
    engine.close()
    assert llm.events[3:] == ["shutdown", "left the groups", "left the process group"]
    engine.close()


def test_a_draw_depends_on_its_key_alone(llm, policy, tokenizer):
    engine, other = engine_of(policy, tokenizer), engine_of(policy, tokenizer)
    engine.update_weights(0)
    other.update_weights(3)
    one, two = (each.generate(PROMPTS, 4, Sampling(12), KEY) for each in (engine, other))
    assert [c.segments[0].token_ids.tolist() for c in completions_of(one)] == [
        c.segments[0].token_ids.tolist() for c in completions_of(two)
    ]
    later = engine.generate(PROMPTS, 4, Sampling(12), RNGKey(0, 4))
    assert sum(a == b for a, b in zip(completions_of(one), completions_of(later), strict=True)) <= 2


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "candidates"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_a_draw_could_have_given_comes_back(llm, policy, tokenizer, name, masks):
    engine = engine_of(policy, tokenizer)
    engine.turns.masks = masks  # on a GPU
    engine.update_weights(0)
    sampling = Sampling(8, **{"temperature": 0.9, **SELECTIONS[name]})
    for group in engine.generate(PROMPTS, 2, sampling, KEY):
        for completion in group.completions:
            ids, drawn = group.prompt.token_ids, completion.segments[0].token_ids.tolist()
            with torch.no_grad():
                logits = policy.model(torch.tensor([[*ids, *drawn]])).logits[0, len(ids) - 1 : -1].float()
            allowed = allowed_of(completion, policy.vocab_size, len(drawn))
            logps = (logits / (sampling.temperature or 1.0)).masked_fill(~allowed, -torch.inf).log_softmax(-1)
            expected = logps.gather(-1, torch.tensor(drawn)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.sampler_logps), expected.double(), **CLOSE)


def test_turns_stop_strings_and_cancelling(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    groups = engine.generate(PROMPTS, 8, Sampling(12, stop=("1", "2")), KEY)
    stopped = [c for c in completions_of(groups) if c.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(c.text[-1] in "12" for c in stopped)
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), **CLOSE)
    steps = []
    watch = Watch(on_step=lambda: steps.append(1), cancelled=lambda: len(steps) > 3)
    cancelled = engine.generate(PROMPTS, 2, Sampling(12), KEY, watch)
    assert FinishReason.CANCELLED in {c.finish_reason for c in completions_of(cancelled)}
    assert engine.unfinished == 0
    assert engine.generate(PROMPTS, 8, Sampling(12, stop=("1", "2")), KEY) == groups
    assert not llm.made[0].requests
    assert "abort" in llm.events


def test_turns_continue_after_given_tokens(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    turns = play(engine, [[9, 11, 14], [6]], prompts=PROMPTS)
    for turn in turns:
        (segment,) = turn.completion.segments
        assert (~segment.is_drawn).sum() == 4
    groups = [Group(turn.request.prompt, (turn.completion,)) for turn in turns]
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), **CLOSE)
    assert len(llm.made[0].asked) == 1 + 1 + 3 * len(turns)  # the probe's two, and three turns of each


def test_a_reset_drops_what_is_under_way(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    undisturbed = engine.generate(PROMPTS, 2, Sampling(12), KEY)
    engine.submit([Request(p, n, Sampling(12), KEY, i) for i, p in enumerate(PROMPTS) for n in range(4)])
    stream = engine.stream()
    next(stream)
    stream.close()
    assert engine.unfinished > 0
    assert llm.made[0].requests
    engine.reset()
    assert engine.unfinished == 0
    assert engine.generate(PROMPTS, 2, Sampling(12), KEY) == undisturbed
    assert not llm.made[0].requests


def test_a_failure_of_vllm_is_an_error_that_names_it(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access")

    llm.fault = staticmethod(fails)
    with pytest.raises(EngineError, match="vLLM in this process failed .RuntimeError: CUDA error: an illegal memory"):
        engine.generate(PROMPTS, 2, Sampling(4), KEY)
    assert engine.unfinished == 0


def test_what_vllm_does_not_start_with_says_what_to_set(llm, policy, tokenizer, monkeypatch):
    def fails(self, **arguments):
        raise ValueError("Free memory on device is less than desired")

    monkeypatch.setattr(llm, "__init__", fails)
    engine = engine_of(policy, tokenizer)
    with pytest.raises(ConfigError, match=r"does not start .ValueError: Free memory on device .* in \[vllm\]; with"):
        engine.update_weights(0)


def test_weights_that_do_not_arrive_stop_the_run(llm, policy, tokenizer, monkeypatch):
    monkeypatch.setattr(llm, "collective_rpc", lambda self, method, kwargs: list(kwargs["weights_iterator"]))
    with pytest.raises(PolicyMismatchError, match="vLLM in this process does not compute the policy"):
        engine_of(policy, tokenizer).update_weights(0)


def test_the_random_generators_stay_as_they_are(llm, policy, tokenizer):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    engine_of(policy, tokenizer).update_weights(0)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


# Adapters.


def test_the_base_is_loaded_once_and_the_adapter_after_each_update(llm, tokenizer):
    policy = adapted_policy(len(tokenizer))
    engine = engine_of(policy, tokenizer)
    for version in range(3):
        engine.update_weights(version)
        groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
        torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), **MERGED)
        (number,) = llm.made[0].adapters
        assert number == 1 + version  # it is part of the key of cached prefixes
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
    assert llm.events == ["start", "weights", "adapter", "adapter", "adapter"]
    assert llm.made[0].arguments["max_lora_rank"] == 8
    folders = list(engine.turns._folder.iterdir())
    assert len(folders) == 2  # the model's config, and the adapter of now
    engine.close()
    assert not engine.turns._folder.exists()


def test_adapters_on_four_bits_are_sampled_with_the_values_that_these_stand_for(llm, tokenizer):
    pytest.importorskip("bitsandbytes")
    config = ModelConfig(path="cohort:demo", device="cpu", precision="float32", quantization="4bit", lora={"rank": 4})
    policy = load_policy("cohort:demo", config, None)
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
    # bitsandbytes' own product on one side.
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), rtol=0, atol=1e-4)
    assert llm.events == ["start", "weights", "adapter"]


def test_an_adapter_that_vllm_does_not_load_is_merged(llm, tokenizer):
    policy = adapted_policy(len(tokenizer), use_dora=True)
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    groups = engine.generate(PROMPTS, 2, Sampling(8), KEY)
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), **MERGED)
    assert "enable_lora" not in llm.made[0].arguments


# Memory.


def sleeping(engine, llm, monkeypatch):
    monkeypatch.setattr(colocated, "release_memory", lambda: llm.events.append("freed"))
    engine.update_weights(0)
    engine.generate(PROMPTS, 1, Sampling(3), KEY)
    engine.sleep()
    engine.sleep()
    engine.update_weights(1)
    return engine.generate(PROMPTS, 2, Sampling(8), KEY)


def test_it_sleeps_and_wakes_with_memory_freed_before(llm, policy, tokenizer, monkeypatch):
    groups = sleeping(engine_of(policy, tokenizer, sleeps=True), llm, monkeypatch)
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), **CLOSE)
    first, then = ["freed", "start", "weights"], ["freed", "wake weights", "weights", "wake kv_cache"]
    assert llm.events == [*first, "sleep 2", *then]


def test_the_base_of_an_adapter_waits_in_the_hosts_memory(llm, tokenizer, monkeypatch):
    policy = adapted_policy(len(tokenizer))
    groups = sleeping(engine_of(policy, tokenizer, sleeps=True), llm, monkeypatch)
    torch.testing.assert_close(sampler_logps(groups), trainer_logps(policy, groups), **MERGED)
    first, then = ["freed", "start", "weights", "adapter"], ["freed", "wake weights", "adapter", "wake kv_cache"]
    assert llm.events == [*first, "sleep 1", *then]


def test_an_engine_that_does_not_sleep_stays_awake(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    engine.sleep()
    assert llm.events == ["start", "weights"]


@pytest.mark.parametrize(
    ("sleeps", "given", "share"), [(True, None, 0.9 * 0.5), (False, None, 0.45 * 0.5), (True, 0.3, 0.3)]
)
def test_vllm_gets_a_share_of_what_is_free(llm, policy, tokenizer, monkeypatch, sleeps, given, share):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2**30, 80 * 2**30))
    engine = engine_of(policy, tokenizer, sleeps=sleeps, vllm={"gpu_memory_utilization": given})
    engine.turns.on_gpu = True
    assert engine.turns.reserved == pytest.approx(0 if sleeps else share * 80 * 2**30)
    engine.update_weights(0)
    assert engine.turns.reserved == 0  # taken
    arguments = llm.made[0].arguments
    assert arguments["gpu_memory_utilization"] == pytest.approx(share)
    assert (arguments["enforce_eager"], arguments["enable_sleep_mode"]) == (False, sleeps)


def test_what_vllm_will_take_is_no_room_for_the_update(llm, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setattr("cohort.train.memory.free_bytes", lambda device: 7 * 2**30)
    budget = run(tokenizer, tmp_path).budget
    assert budget.free == 4 * 2**30


def test_further_arguments_go_to_vllm(llm, policy, tokenizer):
    settings = {"arguments": {"block_size": 16, "enforce_eager": False}}
    engine_of(policy, tokenizer, vllm=settings, max_batch_size=7).update_weights(0)
    arguments = llm.made[0].arguments
    found = {name: arguments[name] for name in ("max_model_len", "block_size", "enforce_eager", "max_num_seqs")}
    assert found == {"max_model_len": 128, "block_size": 16, "enforce_eager": False, "max_num_seqs": 7}
    assert (arguments["dtype"], arguments["logprobs_mode"]) == ("float32", "processed_logprobs")


@pytest.mark.parametrize(
    ("version", "why"),
    [("0.31.1", "vLLM 0.31.1 is older than 0.32"), ("0.32.0", ""), ("0.100.0", ""), ("0.1.dev12+gabc", "")],
)
def test_an_old_vllm_is_told(monkeypatch, version, why):
    monkeypatch.setattr(colocated, "find_spec", lambda name: name)
    monkeypatch.setattr(colocated, "version", lambda name: version)
    assert missing() == why


# Whole runs.


def run(tokenizer, folder, **settings):
    sizes = {"max_steps": 3, "prompts_per_step": 2, "max_completion_length": 6}
    return make_trainer(tokenizer, folder, engine="vllm", **sizes | settings)


def test_a_run_trains_the_policy_that_vllm_samples_from(llm, tokenizer, tmp_path):
    trainer = run(tokenizer, tmp_path / "run")
    assert "sampler: vLLM in this process, at most 256 completions at a time" in trainer.describe()
    assert not llm.made  # what is free for passes was measured before it starts
    trainer.train()
    for line in (line for line in metrics_of(tmp_path / "run") if line["step"]):
        assert 0 < line["sampler/gap"] < 1e-5
        assert line["server/probe_gap"] < 1e-5
        assert line["sampler/version_lag_max"] == 0
    (made,) = llm.made
    assert made.arguments["max_model_len"] == 128  # the model's context, which is shorter than vLLM's room
    trainer.engine.close()


def test_a_run_that_is_killed_after_a_step_ends_as_one_that_is_not(llm, tokenizer, tmp_path):
    straight_and_resumed(lambda folder: run(tokenizer, folder, save_steps=1), tmp_path, 2)


def test_a_run_that_is_killed_after_a_rollout_ends_as_one_that_is_not(llm, tokenizer, tmp_path):
    calls = []

    def killed(completions, **_):
        calls.append(len(completions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return digits_reward(completions)

    def make(name, rewards):
        return run(tokenizer, tmp_path / name, rewards=rewards, save_steps=1)

    straight = make("straight", digits_reward)
    straight.train()
    broken = make("broken", killed)
    with pytest.raises(KeyboardInterrupt):
        list(broken.steps())
    assert len(calls) == 2
    resumed = make("broken", digits_reward)
    resumed.train(resume=True)
    assert same_parameters(straight, resumed)
    assert untimed_metrics_of(tmp_path / "broken") == untimed_metrics_of(tmp_path / "straight")


def test_a_lag_samples_beside_the_updates(llm, tokenizer, tmp_path):
    trainer = run(tokenizer, tmp_path / "run", lag=1)
    trainer.train()
    lines = [line for line in metrics_of(tmp_path / "run") if line["step"]]
    assert [line["sampler/version_lag_max"] for line in lines] == [0, 1, 1]
    assert lines[0]["sampler/gap"] < 1e-5 < 1e-3 < lines[1]["sampler/gap"]


# Several ranks.


@contextmanager
def on_a_rank():
    with pytest.MonkeyPatch.context() as patch, fake_vllm.installed(patch) as llm:
        yield llm, load_tokenizer(str(DEMO_MODEL))


def drawn_together():
    """What a rank of a tensor group has got, its requests and steps, and what it leaves in the end."""
    with on_a_rank() as (llm, tokenizer):
        world = World.of_environment()
        engine = engine_of(policy_of(tokenizer), tokenizer, world=world, vllm={"tensor_parallel_size": world.size})
        engine.update_weights(0)
        sampler, found, steps = DividedSampler(engine, world), [], []
        watch = Watch(on_step=lambda: steps.append(1), cancelled=lambda: world.is_main and len(steps) > 3)
        for prompts_, one in ((PROMPTS, None), (PROMPTS[:1], None), (PROMPTS, watch), (PROMPTS, None)):
            groups = sampler.generate(prompts_, 2, Sampling(12), KEY, one)
            found.append([[(c.token_ids.tolist(), c.finish_reason) for c in group.completions] for group in groups])
        engine.close()
        world.close()
        (made,) = llm.made
        return found, made.asked, made.steps, llm.events, len(made.requests)


@pytest.mark.ranks
def test_ranks_of_a_tensor_group_step_through_the_same_requests(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    alone = [
        [(c.token_ids.tolist(), c.finish_reason) for c in group.completions]
        for group in engine.generate(PROMPTS, 2, Sampling(12), KEY)
    ]
    one, other = on_ranks(2, drawn_together)
    assert one == other
    (whole, single, cancelled, again), asked, _, events, left = one
    assert whole == again == alone
    assert single == alone[:1]  # one rank has no prompt, and takes part
    cut = [reason is FinishReason.CANCELLED for group in cancelled for _, reason in group]
    assert any(cut)
    assert not all(cut)  # the other rank's go on
    assert {name.split(":")[0] for name in asked} == {"probe", "0", "1"}
    assert left == 0
    assert events[-2:] == ["shutdown", "left the groups"]  # the process group is the trainer's


def failed_together():
    """What a rank of a tensor group raises when rank 1 fails: in vLLM, in a callback, while it loads; and what it draws
    afterwards."""
    with on_a_rank() as (llm, tokenizer):
        world, found = World.of_environment(), []
        fails = world.rank == 1
        engine = engine_of(policy_of(tokenizer), tokenizer, world=world, vllm={"tensor_parallel_size": world.size})
        engine.update_weights(0)
        sampler = DividedSampler(engine, world)

        def fail(*_):
            if fails:
                raise DataError("seven")

        def generate(watch=None):
            return sampler.generate(PROMPTS, 2, Sampling(12), KEY, watch)

        def after_five():
            if llm.made[0].steps > 5:
                fail()

        for watch in (Watch(on_completion=fail), Watch(on_step=fail), None):
            llm.fault = staticmethod(lambda: None) if watch else staticmethod(after_five)
            with pytest.raises((DataError, EngineError)) as raised:
                generate(watch)
            found.append(str(raised.value))
        llm.fault = staticmethod(lambda: None)
        engine.turns.probe = lambda _: fail() or {}
        with pytest.raises(DataError) as raised:
            engine.update_weights(1)
        found.append(str(raised.value))
        engine.turns.probe = None
        engine.update_weights(2)
        groups = generate()
        world.close()
        return found, [[c.token_ids.tolist() for c in group.completions] for group in groups]


@pytest.mark.ranks
def test_a_rank_of_a_tensor_group_that_fails_is_named_by_the_others(llm, policy, tokenizer):
    engine = engine_of(policy, tokenizer)
    engine.update_weights(0)
    alone = [
        [c.token_ids.tolist() for c in group.completions] for group in engine.generate(PROMPTS, 2, Sampling(12), KEY)
    ]
    with Ranks(2, failed_together) as ranks:
        ranks.wait(30)
        outcomes = ranks.outcomes()
    (_, (one, drawn), _), (_, (other, _), _) = outcomes
    assert drawn == alone
    for heard, own in zip(one, other, strict=True):
        assert "rank 1 of 2" in heard
        assert "seven" in heard
        assert "seven" in own


def stuck_in_vllm():
    with on_a_rank() as (llm, tokenizer):
        world = World.of_environment()
        tensor_group.GRACE_SECONDS = 0.5
        engine = engine_of(policy_of(tokenizer), tokenizer, world=world, vllm={"tensor_parallel_size": world.size})
        engine.update_weights(0)

        def fault():
            if world.rank == 1:
                raise RuntimeError("no memory")
            time.sleep(600)  # as a collective without the other rank

        llm.fault = staticmethod(fault)
        DividedSampler(engine, world).generate(PROMPTS, 2, Sampling(12), KEY)


@pytest.mark.ranks
def test_a_rank_that_waits_in_vllm_for_one_that_failed_ends():
    with Ranks(2, stuck_in_vllm) as ranks:
        ranks.wait(30)
        (died, code, stderr), (raised, (kind, text), _) = ranks.outcomes()
    assert (died, code, raised, kind) == ("died", 1, "raised", "EngineError")
    assert "rank 0 of 2 waits inside vLLM and ends: rank 1 of 2" in stderr
    assert "no memory" in stderr
    assert "no memory" in text


def trained_on_a_rank(folder, settings):
    with on_a_rank() as (llm, tokenizer):
        trainer = run(tokenizer, folder, **settings)
        steps = list(trainer.steps())
        trainer.engine.close()
        trainer.world.close()
        return [step["sampler/gap"] for step in steps], llm.made[0].arguments["distributed_executor_backend"]


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2], ids=["each its own", "tensor parallel"])
def test_runs_on_two_ranks_draw_what_one_does(llm, tokenizer, tmp_path, size):
    run(tokenizer, tmp_path / "one").train()
    for gaps, launcher in on_ranks(2, trained_on_a_rank, tmp_path / "two", {"tensor_parallel_size": size}):
        assert len(gaps) == 3
        assert max(gaps) < 1e-5
        assert launcher == "external_launcher"
    one, two = ([row["token_ids"] for row in rows_of(tmp_path / name)] for name in ("one", "two"))
    assert one == two
