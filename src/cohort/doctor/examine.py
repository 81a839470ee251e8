"""All checks in order: what is known without sampling, the reward functions on made answers, then a rollout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil

from cohort.config import GRPOConfig
from cohort.doctor import known
from cohort.doctor.answers import LOOKED_AT, check_answers, try_answers
from cohort.doctor.cost import Time, check_time, rounds_expected
from cohort.doctor.finding import Finding, Status, skipped
from cohort.doctor.known import CHECKS, Run, Trainer, check_optimizer, check_sampling
from cohort.doctor.signal import check_cut, check_distinct, check_reference, check_rewards, check_sampler, check_signal
from cohort.doctor.trial import Trial, try_run
from cohort.errors import CohortError, ConfigError, did_you_mean
from cohort.policy import load_policy, load_tokenizer, read_config
from cohort.presets.parts import DynamicSampling
from cohort.report import diagnosis
from cohort.runs.folder import output_folder
from cohort.train.inputs import chosen_model
from cohort.train.sweep import CACHED, SERVED, most_gap
from cohort.types import FinishReason

OF_ROLLOUT = ("sampler", "reference", "signal", "rewards", "duplicates", "cut", "time")
NAMES = ("folder", *CHECKS, "answers", *OF_ROLLOUT)
"""Every check that can be left out, in order."""
ENDED_BY = {
    "ConfigError": "settings",
    "DataError": "data",
    "RewardError": "rewards",
    "EpisodeError": "environment",
    "ModelError": "model",
    "EngineError": "servers",
    "RunFolderError": "folder",
}
"""What an error that ends the preparation of a run is about."""


def check_names(names: Sequence[str], known: Collection[str] = (*NAMES, *diagnosis.NAMES)) -> None:
    """Check the names of checks to leave out; by default of those before a run or in its diagnosis.

    Raises:
        ConfigError: there is no such check.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no check {name!r}; there are: {', '.join(known)}{did_you_mean(name, known)}")


def refused(error: Exception) -> Finding:
    """The finding for an error with which the run would not start."""
    name = ENDED_BY.get(type(error).__name__, "start")
    return Finding(name, Status.FAIL, str(error), "correct this first: the other checks need it")


def without_data(config: GRPOConfig) -> Iterator[Finding]:
    """The checks of a run whose data cannot be loaded: its rewards, model and settings.

    Args:
        config: the settings, with which a trainer was refused because of the data. A trainer looks at the settings and
            loads the reward functions before that.
    """
    names = ", ".join(config.reward.functions) or "the environment's"
    yield Finding("rewards", Status.PASS, f"loaded, and not called without data: {names}")
    model, trust = str(chosen_model(None, config.model)), config.model.trust_remote_code
    try:
        load_tokenizer(model, trust_remote_code=trust)
        policy = load_policy(model, config.model, read_config(model, trust_remote_code=trust), seed=config.run.seed)
    except CohortError as error:
        yield refused(error)
        return
    trained = sum(one.numel() for one in policy.model.parameters() if one.requires_grad)
    yield Finding("model", Status.PASS, f"{model}: {type(policy.model).__name__}, {trained:,} trained parameters")
    yield from check_sampling(config)
    if config.run.max_steps is not None:  # else the number of rows decides
        yield from check_optimizer(config, config.run.max_steps * config.objective.updates_per_rollout, trained)


def examine(trainer: Trainer, skip: Sequence[str] = ()) -> Iterator[Finding]:
    """Make all checks of a run, and yield what they find as soon as it is known. Ends with an update of the policy:
    make a new trainer to train.

    Args:
        trainer: a ``GRPOTrainer`` that has not started.
        skip: names of checks to leave out, beside those of ``report.skip_checks``; see ``NAMES``.

    Raises:
        ConfigError: there is no such check, or there are several ranks.
    """
    skip = [*trainer.args.report.skip_checks, *skip]
    check_names(skip)
    if trainer.world.size > 1:
        raise ConfigError(f"the checks are for one process, and there are {trainer.world.size}")
    run = Run.of(trainer, output_folder(trainer.args, trainer.world).path)
    try:
        yield from _findings(run, skip)
    finally:
        run.parts.rewards.close()
        if trainer.acting:
            trainer.acting.close()


def _findings(run: Run, skip: Sequence[str]) -> Iterator[Finding]:
    fits = True
    for name, check in {"folder": known.folder, **CHECKS}.items():
        found = skipped(name, "left out") if name in skip else check(run)
        fits &= name != "memory" or all(finding.status is not Status.FAIL for finding in found)
        yield from found
    yield from skipped("answers", "left out") if "answers" in skip else _answers(run)
    none_wanted = set(OF_ROLLOUT) <= set(skip)
    if none_wanted or not fits:
        why = "left out" if none_wanted else "the run does not fit into memory"
        yield from (finding for name in OF_ROLLOUT for finding in skipped(name, why))
        return
    try:
        trial = try_run(run)
    except CohortError as error:
        yield Finding("rollout", Status.FAIL, str(error), "correct this first: the other checks need it")
        return
    for name, found in _of_trial(run, trial).items():
        yield from skipped(name, "left out") if name in skip else found
    if trial.problem:
        yield Finding("update", Status.FAIL, trial.problem, "look at the model: are its weights or logits finite?")


def _answers(run: Run) -> list[Finding]:
    if run.parts.sampler is not run.parts.engine:
        return skipped("answers", "with tools or an environment, a reward may depend on an episode")
    some = run.parts.prompts.prompts[:LOOKED_AT]
    tokenizer = run.parts.tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return check_answers(*try_answers(run.parts.rewards, some, known.reads_of(run), encode))


def _of_trial(run: Run, trial: Trial) -> Mapping[str, list[Finding]]:
    """The checks of a rollout and of its costs, by name."""
    config, objective, scores = run.config, run.parts.objective, trial.rollout.sampled_scores
    precision = str(run.parts.policy.precision.compute).removeprefix("torch.")
    shared = run.parts.engine.capabilities.shared_weights
    most = most_gap(run.parts.policy, shared_weights=shared)
    size = config.rollout.num_generations
    rewards = scores.rewards_S.tolist()
    completions = [one for one in trial.rollout.completions if one.finish_reason.usable]
    weights = dict(zip(scores.names, scores.weights or (1.0,) * len(scores.names), strict=True))
    distinct = [len({one.token_ids.tobytes() for one in group.completions}) for group in trial.rollout.sampled]
    rule = objective.group_filter
    rounds = rule.max_rounds if isinstance(rule, DynamicSampling) else 1
    by_function = dict(zip(scores.names, scores.by_function_SK.T.tolist(), strict=True))
    signal = check_signal(
        [rewards[start : start + size] for start in range(0, len(rewards), size)],
        sum(weight for weight in weights.values() if weight > 0),
        group_relative=objective.group_relative,
        rounds=rounds,
        by_function={name: rewards for name, rewards in by_function.items() if weights[name]},
    )
    cut = sum(one.finish_reason is FinishReason.LENGTH for one in completions)
    limit = config.rollout.max_completion_length
    dead = signal[0].numbers.get("dead_share") or 0.0
    no_signal = any(one.status is Status.FAIL for one in signal)
    found = {
        "sampler": check_sampler(trial.sampler_gap, most, precision, CACHED if shared else SERVED),
        "reference": check_reference(trial.reference_gap, precision),
        "signal": signal,
        "rewards": check_rewards(by_function, weights),
        "duplicates": check_distinct(distinct, size),
        "cut": check_cut(cut, len(completions), limit, masked=objective.truncated == "mask", no_signal=no_signal),
    }
    time = _time_of(run, trial, rounds_expected(1 - dead, rounds))
    return found | {"time": check_time(time, len(trial.rollout.sampled))}


def _time_of(run: Run, trial: Trial, rounds: float) -> Time:
    """The pieces of the prediction of time, with so many calls of the engine per step."""
    config, steps, sampling = run.config, run.schedule.steps, ("generate", "reward")
    each = sum(trial.seconds[name] for name in sampling)
    each /= config.rollout.prompts_per_step * config.rollout.num_generations
    sets = run.parts.evaluator.sets.values() if run.parts.evaluator else ()
    every = config.eval.eval_steps
    return Time(
        phases=trial.seconds | {name: trial.seconds[name] * rounds for name in sampling},
        steps=steps,
        evaluation=each * sum(map(len, sets)) * config.eval.num_generations_eval,
        evaluations=(ceil(steps / every) if every else 1) + config.eval.eval_on_start if sets else 0,
        lag=config.rollout.lag,
    )
