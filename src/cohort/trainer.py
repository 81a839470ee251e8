"""GRPOTrainer: puts the parts of a run together, in the order that finds mistakes before anything expensive starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cohort.config import GRPOConfig, ModelConfig, ObjectiveConfig, Schedule
from cohort.data import PromptSet, PromptStream, check_rows, load_rows
from cohort.errors import ConfigError, DataError, ModelError
from cohort.objective import PRESETS, Objective
from cohort.policy import (
    Policy,
    context_length,
    enable_checkpointing,
    end_token_ids,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_precision,
)
from cohort.report.console import StepDisplay, announce, describe_run
from cohort.rewards import RewardFunction, RewardRunner, resolve_reward
from cohort.rollout import LocalEngine, Sampling
from cohort.train import Evaluation, Evaluator, Optimizer, Parts, RunFolder, run, save_model


class GRPOTrainer:
    """Trains a causal language model with GRPO.

    Args:
        model: a folder, a hub id, or a loaded transformers model (which is then trained in place).
        reward_funcs: one reward function or several: callables, or names as ``reward.functions`` takes them. See
            ``cohort.rewards.contract``.
        args: the settings. None: the defaults.
        train_dataset: rows with the prompt's column: a list of dicts, a ``datasets.Dataset``, or the like.
        eval_dataset: the same, for evaluation. None: no evaluation.
        processing_class: the tokenizer. None: the one that lies beside the model.

    Raises:
        CohortError: anything that can be known to be wrong now. Checks run from the cheapest to the dearest: output
            folder, data, tokenizer, prompts, rewards (tried on two rows), and only then the model.

    >>> trainer = GRPOTrainer(model="path/to/model", reward_funcs=reward, train_dataset=rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
    ) -> None:
        self.started = time.time()
        """When the run began, for its summary. The command line sets it to its own start."""
        self.args = config = args or GRPOConfig()
        if not isinstance(config, GRPOConfig):
            raise ConfigError(f"args must be a cohort.GRPOConfig, got {type(config).__name__}")
        self.rewards = RewardRunner(_reward_functions(reward_funcs), config.reward.weights)
        if train_dataset is None:
            raise DataError("no training data: pass train_dataset, or set data.train")
        rows = check_rows(train_dataset, "the training data")
        self.schedule = Schedule.of(config, len(rows))
        eval_rows = check_rows(eval_dataset, "the evaluation data") if eval_dataset is not None else None

        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        if processing_class is None and not name and not isinstance(model, str):
            raise ModelError("a model built in memory has no tokenizer of its own: pass processing_class")
        self.tokenizer = processing_class or load_tokenizer(name, trust_remote_code=config.model.trust_remote_code)
        prompts = PromptSet(rows, self.tokenizer, config.data)
        sets = [prompts]
        if eval_rows is not None:
            sets.append(PromptSet(eval_rows, self.tokenizer, config.data, name="the evaluation data"))
        self.prompts = PromptStream(prompts, seed=config.run.seed, shuffle=config.data.shuffle)
        context = context_length(model, trust_remote_code=config.model.trust_remote_code)
        for tried in sets:
            if context is not None:
                tried.check_context(context, config.rollout.max_completion_length)
            self.rewards.dry_run([tried.prompt(index, uid=index) for index in range(min(2, len(tried)))])

        self.policy = load_policy(model, config.model)
        self.objective = objective_of(config.objective)
        # Copied from the policy as it is now. Without a KL term there is none, and no memory is spent on it.
        self.reference = self.policy.copy_frozen() if self.objective.beta else None
        self.optimizer = Optimizer(self.policy.model, config.optim, self.schedule.updates)
        ends = end_token_ids(self.policy.model, self.tokenizer)
        self.engine = LocalEngine(self.policy, self.tokenizer, ends, max_batch_size=config.rollout.max_batch_size)
        self.evaluator = self._evaluator(sets[1]) if eval_rows is not None else None
        self.folder: RunFolder | None = None
        """Where the run is written; chosen when ``train`` starts."""

    def train(self, *, resume: bool = False) -> dict[str, Any]:
        """Train, showing progress; return the summary that also lies in the run folder as ``summary.json``.

        Args:
            resume: continue the run in ``run.output_dir`` from its newest checkpoint.

        Raises:
            RunFolderError: the output folder holds another run, or nothing to resume.
        """
        with StepDisplay(self.schedule.steps, enabled=self.args.report.progress) as display:
            for metrics in self.steps(resume=resume):
                display.show(metrics)
        assert self.folder is not None
        return self.summary

    def steps(self, *, resume: bool = False) -> Iterator[dict[str, Any]]:
        """The run as an iterator over its steps' metrics, for code that wants to stand between them."""
        self.folder = folder = output_folder(self.args)
        first_step = self._resume(folder) if resume else self._start(folder)
        parts = Parts(
            policy=self.policy,
            reference=self.reference,
            engine=self.engine,
            rewards=self.rewards,
            prompts=self.prompts,
            objective=self.objective,
            optimizer=self.optimizer,
            evaluator=self.evaluator,
            tokenizer=self.tokenizer,
        )
        self.summary: dict[str, Any] = {"steps": first_step, "updates": self.policy.version, "completions": 0}
        if self.evaluator and first_step == 0:
            self.summary["eval_before"] = self.evaluator.evaluate(self.engine).metrics()
        for metrics in run(parts, self.schedule, self.args, folder, first_step=first_step):
            self.summary.setdefault("seconds_to_first_update", round(metrics["time"] - self.started, 2))
            self.summary["steps"] = metrics["step"]
            self.summary["updates"] = self.policy.version
            self.summary["completions"] += self.schedule.prompts_per_step * self.schedule.num_generations
            if evaluated := {key: value for key, value in metrics.items() if key.startswith("eval/")}:
                self.summary["eval_after"] = evaluated
            yield metrics
        self.summary["seconds"] = round(time.time() - self.started, 2)
        self.summary["output_dir"] = str(folder.path)
        folder.write_summary(self.summary)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, Any]:
        """Sample and score the evaluation prompts with the policy as it is; means with 95% intervals.

        Args:
            eval_dataset: rows to use instead of those given at construction.
        """
        return self.evaluation(eval_dataset).metrics()

    def evaluation(self, eval_dataset: Any = None) -> Evaluation:
        """``evaluate`` with the completions it drew."""
        evaluator = self.evaluator
        if eval_dataset is not None:
            rows = check_rows(eval_dataset, "the evaluation data")
            prompts = PromptSet(rows, self.tokenizer, self.args.data, name="the evaluation data")
            if (context := context_length(self.policy.model)) is not None:
                prompts.check_context(context, self.args.rollout.max_completion_length)
            evaluator = self._evaluator(prompts)
        if evaluator is None:
            raise DataError("no evaluation data: pass eval_dataset, or set data.eval")
        return evaluator.evaluate(self.engine)

    def save_model(self, path: str | Path) -> None:
        """Write weights, config and tokenizer as transformers loads them."""
        save_model(self.policy, self.tokenizer, path)

    def describe(self) -> str:
        """The run in words: what the start of ``train`` prints."""
        return describe_run(
            policy=self.policy,
            engine=self.engine,
            prompts=self.prompts,
            objective=self.objective,
            schedule=self.schedule,
            config=self.args,
            tokenizer=self.tokenizer,
        )

    def _start(self, folder: RunFolder) -> int:
        folder.start(self.args)
        torch.manual_seed(self.args.run.seed)
        if self.args.report.progress:
            announce(self.describe(), f"run folder: {folder.path}")
        return 0

    def _resume(self, folder: RunFolder) -> int:
        step = folder.check_resumable(self.args)
        if step >= self.schedule.steps:
            raise ConfigError(
                f"{folder.path} is complete: it is at step {step} of {self.schedule.steps}; "
                "raise run.max_steps to go on"
            )
        folder.load_checkpoint(step, self.policy, self.reference, self.optimizer)
        folder.drop_metrics_after(step)
        if self.args.report.progress:
            announce(self.describe(), f"resuming {folder.path} after step {step}")
        return step

    def _evaluator(self, prompts: PromptSet) -> Evaluator:
        rollout = self.args.rollout
        sampling = Sampling(rollout.max_completion_length, rollout.temperature, rollout.stop)
        return Evaluator(prompts, self.rewards, sampling, rollout.num_generations_eval, self.args.run.seed)


def trainer_from_config(config: GRPOConfig, *, resume: bool = False) -> GRPOTrainer:
    """The trainer that a config file describes: model, data and rewards by name.

    Raises:
        CohortError: as ``GRPOTrainer``; and the output folder is looked at before anything is loaded.
    """
    folder = output_folder(config)
    if resume:
        folder.check_resumable(config)
    else:
        folder.check_free()
    functions = _reward_functions(config.reward.functions)
    data = config.data
    if not data.train:
        raise DataError("no training data: set data.train")
    rows = load_rows(data.train, split=data.train_split, limit=data.train_rows)
    eval_rows = load_rows(data.eval, split=data.eval_split, limit=data.eval_rows) if data.eval else None
    return GRPOTrainer(config.model.path, functions, config, rows, eval_rows)


def load_policy(model: Any, config: ModelConfig) -> Policy:
    """A policy from a folder, a hub id or a loaded model, with the precision and the switches of the settings."""
    device = resolve_device(config.device)
    precision = resolve_precision(config.precision, device)
    if isinstance(model, str):
        model = load_model(model, precision, device, trust_remote_code=config.trust_remote_code)
    else:
        model.to(device=device, dtype=precision.master)
    if config.gradient_checkpointing:
        enable_checkpointing(model)
    return Policy(model, precision, dropout=config.dropout)


def objective_of(config: ObjectiveConfig) -> Objective:
    """The settings as a row of the table: epsilons become bounds on the ratio."""
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    return PRESETS["grpo"].replace(
        scale=config.scale_rewards,
        std_ddof=config.std_ddof,
        std_epsilon=config.std_epsilon,
        ratio_low=1 - config.epsilon,
        ratio_high=1 + high,
        beta=config.beta,
        kl_gradient=config.kl_gradient,
    )


def output_folder(config: GRPOConfig) -> RunFolder:
    """The folder of the settings, or the next free one under ``runs``."""
    if config.run.output_dir is None:
        return RunFolder.next_free("run", keep_checkpoints=config.run.save_total_limit)
    return RunFolder(config.run.output_dir, keep_checkpoints=config.run.save_total_limit)


def _reward_functions(given: Any) -> list[RewardFunction]:
    listed = [given] if callable(given) or isinstance(given, str) else list(given or ())
    return [resolve_reward(item) if isinstance(item, str) else item for item in listed]
