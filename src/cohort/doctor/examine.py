"""All checks in order: what is known without sampling, the reward functions on made answers, then a rollout."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from cohort.doctor import known
from cohort.doctor.agreement import check_reference, check_sampler
from cohort.doctor.answers import LOOKED_AT, check_answers, try_answers
from cohort.doctor.cost import Disk, Time, check_disk, check_time, checkpoints_of, rounds_expected
from cohort.doctor.finding import Finding, Status, skipped
from cohort.doctor.known import CHECKS, Run, Trainer, existing_parent
from cohort.doctor.signal import check_cut, check_distinct, check_rewards, check_signal
from cohort.doctor.trial import Trial, try_run
from cohort.errors import CohortError, ConfigError
from cohort.policy import adapter_weights, has_adapters
from cohort.presets.parts import DynamicSampling
from cohort.runs import RunFolder
from cohort.runs.durable import write_file
from cohort.runs.output import output_folder
from cohort.runs.tensors import named_weights
from cohort.train.check import CACHED, MAX_SAMPLER_GAP, SERVED
from cohort.types import FinishReason

OF_ROLLOUT = ("sampler", "reference", "signal", "rewards", "duplicates", "cut", "time", "disk")
NAMES = ("folder", *CHECKS, "answers", *OF_ROLLOUT)
"""Every check that can be left out, in order."""
CHUNK, MOST_CHUNKS = 2**23, 8
"""Bytes and number of the pieces that are written to measure the disk."""
LINE = 6000
"""Bytes of a step in metrics.jsonl."""
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


def check_names(names: Sequence[str]) -> None:
    """Check the names of checks to leave out.

    Raises:
        ConfigError: there is no such check.
    """
    for name in names:
        if name not in NAMES:
            close = get_close_matches(name, NAMES, 1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"there is no check {name!r}{hint}; there are: {', '.join(NAMES)}")


def refused(error: Exception) -> Finding:
    """The finding for an error with which the run would not start."""
    name = ENDED_BY.get(type(error).__name__, "start")
    return Finding(name, Status.FAIL, str(error), "correct this first: the other checks need it")


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
    if set(OF_ROLLOUT) <= set(skip):
        yield from (finding for name in OF_ROLLOUT for finding in skipped(name, "left out"))
        return
    if not fits:
        yield from (finding for name in OF_ROLLOUT for finding in skipped(name, "the run does not fit into memory"))
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
    size = config.rollout.num_generations
    rewards = scores.rewards_S.tolist()
    completions = [one for one in trial.rollout.completions if one.finish_reason.usable]
    weights = dict(zip(scores.names, scores.weights or (1.0,) * len(scores.names), strict=True))
    distinct = [len({one.token_ids.tobytes() for one in group.completions}) for group in trial.rollout.sampled]
    rule = objective.group_filter
    rounds = rule.max_rounds if isinstance(rule, DynamicSampling) else 1
    signal = check_signal(
        [rewards[start : start + size] for start in range(0, len(rewards), size)],
        sum(weight for weight in weights.values() if weight > 0),
        group_relative=objective.group_relative,
        rounds=rounds,
    )
    cut = sum(one.finish_reason is FinishReason.LENGTH for one in completions)
    limit = config.rollout.max_completion_length
    dead = signal[0].numbers.get("dead_share") or 0.0
    sampled = rounds_expected(1 - dead, rounds)
    found = {
        "sampler": check_sampler(trial.sampler_gap, MAX_SAMPLER_GAP, precision, CACHED if shared else SERVED),
        "reference": check_reference(trial.reference_gap, precision),
        "signal": signal,
        "rewards": check_rewards(dict(zip(scores.names, scores.by_function_SK.T.tolist(), strict=True)), weights),
        "duplicates": check_distinct(distinct, size),
        "cut": check_cut(cut, len(completions), limit, masked=objective.truncated == "mask"),
    }
    disk = disk_of(run, trial, sampled)
    return found | {
        "time": check_time(time_of(run, trial, sampled, disk.checkpoint), len(trial.rollout.sampled)),
        "disk": check_disk(disk),
    }


def time_of(run: Run, trial: Trial, rounds: float, checkpoint: int) -> Time:
    """The pieces of the prediction.

    Args:
        run: the run.
        trial: the measured phases.
        rounds: calls of the engine per step, with dynamic sampling.
        checkpoint: bytes of a checkpoint.
    """
    config, steps = run.config, run.schedule.steps
    of_sampling = {name: trial.seconds[name] * rounds for name in ("generate", "reward")}
    per_completion = (trial.seconds["generate"] + trial.seconds["reward"]) / (
        config.rollout.prompts_per_step * config.rollout.num_generations
    )
    written, _ = checkpoints_of(steps, config.run.save_steps, config.run.save_total_limit)
    return Time(
        phases=trial.seconds | of_sampling,
        steps=steps,
        evaluation=per_completion * _evaluated(run),
        evaluations=_evaluations(run),
        checkpoint=checkpoint / write_rate(run.folder, checkpoint),
        checkpoints=written,
        lag=config.rollout.lag,
    )


def _evaluated(run: Run) -> int:
    """Completions of one evaluation."""
    sets = run.parts.evaluator.sets.values() if run.parts.evaluator else ()
    return sum(map(len, sets)) * run.config.eval.num_generations_eval


def _evaluations(run: Run) -> int:
    """Evaluations of the whole run."""
    if run.parts.evaluator is None:
        return 0
    steps, every = run.schedule.steps, run.config.eval.eval_steps
    return checkpoints_of(steps, every, None)[0] + run.config.eval.eval_on_start


def disk_of(run: Run, trial: Trial, rounds: float) -> Disk:
    """The pieces of the prediction; the arguments as for ``time_of``."""
    parts, config, steps = run.parts, run.config, run.schedule.steps
    model = parts.policy.model
    saved = adapter_weights(model) if has_adapters(model) else named_weights(model)
    weights = sum(tensor.nbytes for tensor in saved.values())
    reference = parts.models.stored_reference
    state = parts.optimizer.state_dict()["tensors"].values()
    with tempfile.TemporaryDirectory() as made:
        parts.tokenizer.save_pretrained(made)
        RunFolder(made).write_rollout(
            1, trial.rollout.sampled, trial.rollout.sampled_scores, [None] * len(trial.rollout.completions)
        )
        stored = sum(one.stat().st_size for one in Path(made, "rollouts").iterdir()) / len(trial.rollout.completions)
        others = sum(one.stat().st_size for one in Path(made).iterdir() if one.is_file())
    checkpoint = weights + others + sum(tensor.nbytes for tensor in state)
    if reference is not None:
        checkpoint += sum(tensor.nbytes for tensor in named_weights(reference.model).values())
    per_step = config.rollout.prompts_per_step * config.rollout.num_generations * rounds
    completions = steps * per_step + _evaluations(run) * _evaluated(run)
    merged = sum(p.nbytes for p in model.parameters()) if config.model.lora.save_merged else 0
    best = 2 * (weights + others) if config.eval.metric_for_best_model else 0  # the old one stays until it is replaced
    free = shutil.disk_usage(existing_parent(run.folder)).free
    return Disk(
        free=free,
        checkpoint=checkpoint,
        kept=checkpoints_of(steps, config.run.save_steps, config.run.save_total_limit)[1],
        models=best + merged,
        completions=int(stored * completions if config.report.log_completions else 0) + LINE * steps,
    )


def write_rate(folder: Path, most: int) -> float:
    """Bytes per second of writing, hashing and syncing files on the disk of a folder.

    Args:
        folder: the folder, which need not exist.
        most: write no more bytes than this.
    """
    chunk = os.urandom(max(1, min(CHUNK, most)))
    count = max(1, min(MOST_CHUNKS, most // len(chunk)))
    try:
        with tempfile.TemporaryDirectory(dir=existing_parent(folder)) as made:
            start = time.perf_counter()
            write_file(Path(made) / "part", [chunk] * count)
            return len(chunk) * count / (time.perf_counter() - start)
    except OSError:  # the check 'folder' says so
        return float("inf")
