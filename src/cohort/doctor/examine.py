"""All checks in order: what is known without sampling, the reward functions on made answers, then a rollout."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from cohort.config import GRPOConfig
from cohort.doctor.answers import LOOKED_AT, check_answers, try_answers
from cohort.doctor.checks import CHECKS, Run, Trainer, check_optimizer, check_sampling, folder, reads_of
from cohort.doctor.finding import Finding, Status, skipped
from cohort.doctor.trial import try_run
from cohort.errors import CohortError, ConfigError, did_you_mean
from cohort.policy import load_policy, load_tokenizer, read_config
from cohort.report import diagnosis
from cohort.runs.folder import output_folder
from cohort.train.inputs import chosen_model

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
    for name, check in {"folder": folder, **CHECKS, "answers": _answers}.items():
        found = skipped(name, "left out") if name in skip else check(run)
        fits &= name != "memory" or all(finding.status is not Status.FAIL for finding in found)
        yield from found
    none_wanted = set(OF_ROLLOUT) <= set(skip)
    if none_wanted or not fits:
        why = "left out" if none_wanted else "the run does not fit into memory"
        yield from (finding for name in OF_ROLLOUT for finding in skipped(name, why))
        return
    try:
        of_trial = try_run(run)
    except CohortError as error:
        yield Finding("rollout", Status.FAIL, str(error), "correct this first: the other checks need it")
        return
    for name, found in of_trial.items():
        yield from skipped(name, "left out") if name in skip else found


def _answers(run: Run) -> list[Finding]:
    if run.parts.sampler is not run.parts.engine:
        return skipped("answers", "with tools or an environment, a reward may depend on an episode")
    some = run.prompts[:LOOKED_AT]
    return check_answers(*try_answers(run.parts.rewards, some, reads_of(run), run.parts.tokenizer))
