"""``GRPOTrainer`` with TRL's arguments and methods. It translates them and drives ``cohort.GRPOTrainer``, which
trains.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Generator, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerControl, TrainerState, set_seed
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state
from transformers.trainer_utils import TrainOutput, speed_metrics

import cohort.trainer
from cohort.errors import FIXABLE, ConfigError, Stopped
from cohort.parallel import World, on_main
from cohort.policy import read_config
from cohort.report.describe import announce
from cohort.runs.checkpoints import load_weights
from cohort.runs.starts import CONTINUED_BY
from cohort.train.boundary import RunEndedError, with_resume_hint
from cohort.trl.callbacks import Events, check_callback, check_trackers, handler_of, state_of, tell_evaluation
from cohort.trl.checkpoints import begin, best_checkpoint, check_resumable, create_repo, link, upload, write_card
from cohort.trl.config import TABLE, Batch, GRPOConfig
from cohort.trl.given import (
    TrainerReference,
    checked_inputs,
    count_prompts,
    default_arguments,
    named_model,
    prepared_model,
    read_whole,
    reward_functions,
    rows,
    with_environment_rewards,
    without_unread_variables,
)
from cohort.trl.logs import OF_TRANSFORMERS, CompletionTables, LastRollout, Window
from cohort.trl.notice import Findings, differences
from cohort.trl.translate import check_args, errors_in_trl_terms, key_of_setting, level_warning, translate, trusts_code

# ----------------------------------------
# ``trainer.accelerator``: what scripts ask accelerate's ``Accelerator`` about the processes of a run.


class Processes:
    """The processes of a run, by the names of accelerate.

    Args:
        world: the ranks.
        device: of this process.
    """

    def __init__(self, world: World, device: Any) -> None:
        self._world, self.device = world, device
        self.is_main_process, self.is_local_main_process = world.is_main, world.local_rank == 0
        self.process_index, self.local_process_index = world.rank, world.local_rank
        self.num_processes = world.size

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self._world.barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The model, which nothing wraps here."""
        return model


# ----------------------------------------
# Attributes of TRL's trainer that ``cohort.trl.GRPOTrainer`` does not have: a subclass may not override its methods,
# and an error says what to use instead.


PRIVATE = frozenset(
    (
        *("_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions"),
        *("_generate_single_turn", "_get_per_token_logps_and_entropies", "_get_tool_suffix_ids"),
        *("_log_completion_extra", "_log_metric", "_send_telemetry", "_tokenize_prompts", "_tool_call_loop"),
        *("get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask"),
    )
)
"""Methods of TRL's ``GRPOTrainer`` that transformers' ``Trainer`` does not have."""


def absent_attribute(trainer: Any, name: str) -> Any:
    """``GRPOTrainer.__getattr__``.

    Raises:
        AttributeError: always; says what to use for an attribute of TRL's trainer.
    """
    instead = TABLE["attributes"].get(name)
    if instead is None and name in {field.name for field in fields(GRPOConfig)}:
        instead = f"it is trainer.args.{name}"
    if instead is None and (name in PRIVATE or hasattr(Trainer, name)):
        instead = "Cohort's trainer does not work by TRL's methods (see 'cohort docs trl')"
    hint = f": {instead}" if instead else ""
    raise AttributeError(f"cohort.trl.GRPOTrainer has no attribute {name!r}{hint}", name=name, obj=trainer)


def check_overrides(subclass: type, own: type) -> None:
    """Check that a subclass overrides nothing that would never be called.

    Args:
        subclass: the class.
        own: ``cohort.trl.GRPOTrainer``.

    Raises:
        ConfigError: names what it overrides.
    """
    public = {name for name in vars(own) if not name.startswith("_")}
    private = {name for name, value in vars(own).items() if callable(value) and not name.startswith("__")} - public
    refused = (PRIVATE | private | {name for name in dir(Trainer) if not name.startswith("__")}) - public
    mixed = [base for base in subclass.__mro__ if not issubclass(own, base)]
    if found := sorted({name for base in mixed for name, value in vars(base).items() if _is_method(value)} & refused):
        raise ConfigError(
            f"{subclass.__name__} overrides {', '.join(found)}, which cohort.trl.GRPOTrainer never calls: use reward "
            "functions, callbacks, environment_factory, or the settings of cohort.GRPOTrainer"
        )


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod | property)


log = logging.getLogger("cohort.trl")


class GRPOTrainer:
    """Trains with GRPO: the arguments and methods of TRL 1.16.0's ``GRPOTrainer``, run by Cohort. docs/trl.md lists the
    differences.

    Args:
        model: a folder, a hub id, or a loaded model of transformers or peft.
        reward_funcs: functions, names of reward models, or loaded reward models; one or a list.
        args: a ``cohort.trl.GRPOConfig``. None: the defaults, with "MODEL-GRPO" as ``output_dir``.
        train_dataset: rows with a column ``prompt``. None: an environment gives the prompts, and ``max_steps`` is set.
        eval_dataset: rows for evaluation, or a dict of named sets.
        processing_class: the tokenizer. None: the one in the model's folder.
        reward_processing_classes: tokenizers of the reward models. None: those in their folders.
        callbacks: transformers' callbacks, objects or classes.
        optimizers: an optimizer of the model's parameters and its schedule, instead of those of ``args``.
        quantization_config: how to quantize the model while it is loaded.
        peft_config: new adapters to train instead of the model's weights.
        tools: functions that the policy may call.
        rollout_func: not supported.
        environment_factory: makes the environment of each completion, or a dict of several by name.

    Raises:
        CohortError: something is wrong that can be known before training. ``ConfigError`` for arguments.
    """

    __getattr__ = absent_attribute
    _tag_names = ("cohort", "grpo")
    begun_by = "cohort.trl"  # what begins the run: a key of cohort.runs.CONTINUED_BY
    is_fsdp_enabled = is_deepspeed_enabled = False
    """Scripts ask before they gather weights themselves. ``save_model`` gathers them here in any layout."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        check_overrides(cls, GRPOTrainer)

    @checked_inputs
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        self.args = args = default_arguments(model) if args is None else args
        check_args(args)
        _check_given(args, callbacks, eval_dataset, rollout_func, optimizers)
        batch = Batch.of(args, args.world_size)
        train_dataset = batch.blank_rows(args, environment_factory) if train_dataset is None else train_dataset
        set_seed(args.seed)
        model = named_model(model, args)
        self.train_dataset, self.eval_dataset = rows(train_dataset), rows(eval_dataset)
        count = count_prompts(train_dataset)
        model_config = read_config(model, trust_remote_code=trusts_code(args))
        config = translate(args, world_size=args.world_size, num_prompts=count, model_config=model_config)
        processing_class = getattr(processing_class, "tokenizer", processing_class)  # a processor has one
        config, processing_class = without_unread_variables(config, model, processing_class, self.train_dataset)
        listed, config = with_environment_rewards(reward_funcs, environment_factory, config)
        self.reward_funcs = reward_functions(listed, reward_processing_classes, config, TrainerReference(self))
        self.state, self.control, self._last = TrainerState(), TrainerControl(), LastRollout()
        self.core = cohort.trainer.GRPOTrainer(
            prepared_model(model, args, config, peft_config, quantization_config),
            self.reward_funcs,
            config,
            self.train_dataset,
            None if args.eval_strategy == "no" and not args.eval_on_start else read_whole(self.eval_dataset),
            processing_class,
            tools,
            environment_factory,
            [self._last],
            optimizers=optimizers,
        )
        """Cohort's trainer of this run."""
        self.model, self.processing_class = self.core.policy.model, self.core.tokenizer
        self.accelerator = Processes(self.core.world, self.core.policy.device)
        self.optimizer, self.lr_scheduler = self.core.optimizer.rules[0], self.core.optimizer.schedules[0]
        window, optimizer = Window(config), self.core.optimizer
        callbacks = [*(callbacks or ()), *([CompletionTables(self._last)] if args.log_completions else ())]
        self.callback_handler = handler_of(args, callbacks, self.model, self.processing_class, optimizer, window)
        self.hub_model_id = on_main(self.core.world, lambda: create_repo(args)) if args.push_to_hub else None
        steps = batch.max_steps(args, count)
        per_epoch = batch.updates_per_epoch(count) if count else steps
        self._events = Events(self, window, batch.updates_per_rollout, per_epoch)
        self.state = TrainerState(
            max_steps=steps,
            num_train_epochs=-(-steps // per_epoch),
            train_batch_size=args.per_device_train_batch_size,
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
        )
        self.state.compute_steps(args, steps)
        self._notice = differences(args, config, batch, steps)
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)

    def train(
        self,
        resume_from_checkpoint: str | bool | os.PathLike[str] | None = None,
        *,
        allow_changed: Collection[str] = (),
    ) -> TrainOutput:
        """Train. Returns the number of updates, the mean loss, and the metrics of the run.

        Args:
            resume_from_checkpoint: continue the run in ``args.output_dir`` from its newest checkpoint. True, or the
                path of that checkpoint.
            allow_changed: what may differ from the resumed run though it changes results; the error names it.

        Raises:
            RunFolderError: ``output_dir`` holds another run, or there is no such checkpoint to continue from.
            Stopped: a signal came; a checkpoint is written.
        """
        resume, started = check_resumable(self.args.output_dir, resume_from_checkpoint), time.time()
        if self.is_world_process_zero():
            announce(self._notice)
        hint = with_resume_hint(CONTINUED_BY[self.begun_by], show=self.is_world_process_zero())
        with errors_in_trl_terms(), self.core.obeying_signals(), hint:
            allowed = [key_of_setting(key) for key in allow_changed]
            begin(self.core, self.begun_by, resume=resume, allowed=allowed)
            steps = self._steps(resume=resume, allowed=allowed)
            first = self.state.global_step
            with contextlib.closing(steps), self._state_of_a_stop():
                self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
                findings = Findings(self.core.folder if self.is_world_process_zero() else None)
                for metrics in steps:
                    findings.show(metrics)
                    if self._end_rollout() and metrics["step"] < self.core.schedule.steps:
                        self._events.end_epoch()
                        self._save()
                        break
        return self._end(started, first)

    def _steps(self, *, resume: bool, allowed: Collection[str]) -> Generator[dict[str, Any]]:
        """The rollouts of the run. Of one that has ended there are none: model and state are those of its end, as in
        transformers."""
        try:
            return self.core.steps(resume=resume, allow_changed=allowed, observers=[self._events])
        except RunEndedError:
            if self.is_world_process_zero():
                announce(f"the run in {self.args.output_dir} has ended: to train longer, raise max_steps")
            return (step for step in list[dict[str, Any]]())

    def _end_rollout(self) -> bool:
        """After a rollout's updates and evaluation: save if it is asked for. What callbacks ask for on one rank is done
        on all. Returns whether the run is to stop."""
        events, world = self._events, self.core.world
        # With an evaluator, the run has evaluated; without one, a callback asks although ``eval_strategy`` is "no".
        if self.core.evaluator is None and any(world.gather(events.wants_evaluation)) and self.eval_dataset is not None:
            events.note(self.evaluate())
        if any(world.gather(events.wants_checkpoint or self.control.should_save)):
            self._save()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return any(world.gather(events.wants_stop or self.control.should_training_stop))

    def _save(self) -> None:
        """Write a checkpoint, and name it. Every rank must call."""
        checkpoint = self.core.checkpoint()
        self.state.best_model_checkpoint = on_main(self.core.world, partial(self._link, checkpoint))

    def _link(self, checkpoint: Path) -> str | None:
        """Name a checkpoint as transformers does; return the name of the best one. For rank 0."""
        assert self.core.folder is not None
        self.state.best_model_checkpoint = best = best_checkpoint(self.core.folder.path, self.state)
        link(self.core.folder.path, checkpoint, state_of(self))
        return best

    @contextlib.contextmanager
    def _state_of_a_stop(self) -> Iterator[None]:
        """Name the checkpoint of a run that is stopped, or ends with an error that can be fixed, as the others."""
        try:
            yield
        except (Stopped, *FIXABLE):
            folder = self.core.folder
            if folder is not None and self.is_world_process_zero() and (steps := folder.checkpoint_steps()):
                self._link(folder.checkpoint(steps[-1]))
            raise

    def _end(self, started: float, first: int) -> TrainOutput:
        """The end of a run whose process began after update ``first``."""
        window, updates = self._events.window, self.state.global_step - first
        completions = updates * self.core.args.rollout.prompts_per_step * self.core.args.rollout.num_generations
        samples = completions / self._events.updates_per_rollout
        metrics = speed_metrics("train", started, num_samples=samples, num_steps=updates)
        metrics |= {"total_flos": 0.0, "train_loss": window.total_loss / max(1, window.updates)}
        left = {key: value for key, value in window.entry().items() if key not in OF_TRANSFORMERS}
        metrics["epoch"] = self.state.epoch
        self.log(metrics | left)
        best = Path(self.args.output_dir).expanduser() / "best"
        if self.args.load_best_model_at_end and best.exists():
            load_weights(self.core.policy, best)
            self.core.policy.version += 1  # the sampler's copies are of other weights
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if self.args.push_to_hub:
            self.push_to_hub()
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:  # noqa: ARG002 - TRL's signature
        """Append an entry to ``state.log_history`` and give it to the callbacks."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,  # noqa: ARG002 - TRL's signature
        metric_key_prefix: str = "eval",
    ) -> dict[str, Any]:
        """Sample and score the evaluation prompts with the present weights; return TRL's metrics with Cohort's beside
        them. Every rank must call.

        Args:
            eval_dataset: rows, or named sets of rows. None: those given to the trainer.
            ignore_keys: without effect.
            metric_key_prefix: "eval" in the names of the metrics.
        """
        given = read_whole(self.eval_dataset if eval_dataset is None else rows(eval_dataset))
        if given is None:
            raise ConfigError("evaluate() needs rows: pass eval_dataset to it, or to GRPOTrainer")
        is_own = eval_dataset is None and self.core.evaluator is not None
        return tell_evaluation(self, self.core.evaluations(None if is_own else given), metric_key_prefix)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights, config and tokenizer as transformers loads them; of a model with adapters, the adapters. Every
        rank must call.

        Args:
            output_dir: a folder. None: ``args.output_dir``.
        """
        self.core.save_model(output_dir or self.args.output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub("Model save")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Save the model in ``args.output_dir`` and upload it with a card to ``args.hub_model_id``. The run's own files
        stay here. Every rank must call; rank 0 uploads, and returns what ``HfApi.upload_folder`` does.

        Args:
            commit_message, blocking, token, revision: of the upload.
            card: arguments of ``create_model_card``.
        """
        self.control = self.callback_handler.call_event("on_push_begin", self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.hub_model_id = self.hub_model_id or create_repo(self.args)
        self.create_model_card(**card)
        return upload(self.args, self.hub_model_id, commit_message, blocking, token, revision)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write ``README.md`` into ``args.output_dir``.

        Args:
            model_name: of the model. None: the name of ``output_dir``.
            dataset_name: id of the data set.
            tags: of the model.
        """
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            folder, found = Path(self.args.output_dir), {*tags, *self._tag_names}
            write_card(folder, self.model, name=model_name, dataset=dataset_name, tags=found, hub_id=self.hub_model_id)

    log_metrics, save_metrics, save_state = log_metrics, save_metrics, save_state

    @property
    def ref_model(self) -> Any:
        """The reference model; None without a KL, and with adapters, where it is the model without them."""
        reference = self.core.reference
        return None if reference is None or reference.model is self.model else reference.model

    @property
    def reward_func_names(self) -> list[str]:
        """Names of the reward functions, of the environments' own too, as the log has them."""
        return list(self.core.rewards.names)

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizer of each reward model; None for other functions."""
        return [getattr(one, "tokenizer", None) for one in self.reward_funcs]

    @property
    def reward_weights(self) -> torch.Tensor:
        """Weights of the reward functions."""
        return torch.tensor(self.core.rewards.weights)

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether a load-balancing loss is part of the loss."""
        return self.core.args.model.router_aux_loss_coef != 0

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus, after the last update."""
        return self._events.window.entropy_coef

    @property
    def _logs(self) -> dict[str, Any]:
        return self._last.columns()

    def add_callback(self, callback: Any) -> None:
        """Add a callback of transformers, an object or a class."""
        check_callback(callback, self.args)
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class, and return it."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first process of all."""
        return self.core.world.is_main

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.core.world.local_rank == 0

    def end(self) -> None:
        """Without effect: the process group and the trackers end with the process."""

    def get_num_trainable_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [group["lr"] for rule in self.core.optimizer.rules for group in rule.param_groups]


def _check_given(args: Any, callbacks: Any, eval_dataset: Any, rollout_func: Any, optimizers: Any) -> None:
    """Check the arguments that need nothing else, and log what TRL warns of in them."""
    if warning := level_warning(args):
        log.warning(warning)
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func is not supported here: the sampler is Cohort's own; use environment_factory for episodes"
        )
    for callback in callbacks or ():
        check_callback(callback, args)
    check_trackers(args.report_to)
    if optimizers[0] is None and optimizers[1] is not None:
        raise ConfigError("optimizers: a schedule needs its optimizer: pass (optimizer, scheduler)")
    if args.eval_strategy != "no" and eval_dataset is None:
        raise ConfigError(f"eval_strategy is {str(args.eval_strategy.value)!r}, and there is no eval_dataset")
